"""`sonde.watch` and `sonde.open_session`: check the options, open the run, start a session.

The module is not called `watch`: importing a submodule of that name would replace the function `sonde.watch`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack, get_args

from torch import nn
from torch.optim import Optimizer

from sonde.core import schema
from sonde.core.arguments import mapping, whole_number, with_methods
from sonde.core.signals import SHOWN
from sonde.diagnosis.monitor import Monitor
from sonde.diagnosis.rules import WANTED
from sonde.errors import OptionError
from sonde.forensics.watcher import GuardAction
from sonde.forensics.wiring import Forensics, ForensicsOptions
from sonde.hooks.guard import OnError
from sonde.hooks.names import named_modules, named_parameters
from sonde.parallel.ranks import num_ranks, this_rank
from sonde.record.describe import describe_environment, describe_model
from sonde.record.governor import JUDGING
from sonde.record.kinds import inner_optimizer, is_compiled
from sonde.record.pipeline import Extensions, Pipeline
from sonde.record.plan import DEFAULT_WHAT, Helpers, Plan, What
from sonde.records import RunHeader
from sonde.schedule import When, schedule
from sonde.select import Where, check_each_matches, selector
from sonde.sensors.dispatcher import Sensors
from sonde.session import HandFedSession, IdleSession, Session
from sonde.store import RunWriter
from sonde.store.runs import place_of
from sonde.version import VERSION

logger = logging.getLogger("sonde")

Models = nn.Module | Mapping[str, nn.Module]

DEFAULT_BUDGET: Final = 0.05
_BUDGET_VARIABLE: Final = "SONDE_BUDGET"

_watchers: weakref.WeakKeyDictionary[nn.Module, Callable[[], Session | None]] = weakref.WeakKeyDictionary()
"""By model: the session that watches it, held weakly."""


def _default_budget() -> float | None:
    text = os.environ.get(_BUDGET_VARIABLE, "").strip().lower()
    if text == "none":
        return None
    try:
        return _checked_budget(float(text)) if text else DEFAULT_BUDGET
    except ValueError as error:
        raise OptionError(f"{_BUDGET_VARIABLE}={text!r} takes a share such as 0.05, or none.") from error


def _checked_budget(budget: Any) -> float | None:
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise OptionError(f"budget={budget!r} takes a share of the training's time such as 0.05, or None for no bound.")
    return float(budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What is measured, where, how often, and within which memory."""

    what: Iterable[What] = DEFAULT_WHAT
    """Any of parameters, gradients, updates, outputs, output_gradients, optimizer_state. Updates come with parameters,
    since their ratio needs both."""
    where: Where = None
    """Which modules and parameters; see `sonde.select`. None: everything."""
    every: When = 1
    """Which steps; a number n for each n-th, or a schedule of `sonde.schedule`."""
    histogram: bool = True
    """Whether readings carry a histogram of magnitudes."""
    max_calls: int = 16
    """Calls of one module within a step beyond this many share the last call's site."""
    max_memory_mb: int = 1024
    """Bound of what the session holds: steps not yet written, and a copy of the parameters for updates."""
    budget: float | None = field(default_factory=_default_budget)
    """How much longer recording may make the training, as a share of its own time: beyond the first 24 steps Sonde
    measures what it costs and records less often where that is more, what only the diagnosis needs first, then outputs,
    parameters and gradients last. None records everything always. The environment variable SONDE_BUDGET (a number, or
    none) changes the default of 0.05."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How the run is written."""

    resume: bool = False
    """Append to a run that exists instead of refusing it."""
    start_step: int | None = None
    """In a resumed run, the number of its first step if it continues from before the end. What an earlier attempt
    recorded from there on stays in the files but is no longer shown."""
    max_disk_mb: int | None = None
    """Bound of the run's telemetry on disk; beyond it old steps are merged into windows. None: a tenth of the free
    space, at most 16 GiB."""
    rank: int | None = None
    """This process's rank in a distributed run. None: found from torch.distributed or RANK."""
    config: Mapping[str, Any] | None = None
    """Settings of your own to keep in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisOptions:
    """What happens when something looks wrong."""

    diagnose: bool = True
    """Whether to record the vital signs that a diagnosis needs, and to judge them while the run goes on, in the
    worker's thread: `session.findings`."""
    guard: GuardAction | None = None
    """What to do when gradients are not finite. "skip" makes that optimizer step do nothing; "stop" raises
    `sonde.NonFiniteError` before anything is written. With an optimizer that is not fused both make the host wait for a
    GPU once per step. "stop_late" never waits and skips nothing: it raises in the first step after the readings have
    shown it, on the CPU before anything is written. None: nothing is skipped or stopped."""
    bundles: bool = True
    """Whether to save what is needed to repeat a step that went non-finite, in `run/bundles`."""
    max_bundle_mb: int = 512
    """Bound of one bundle; if the weights do not fit, it is saved without them."""


class Keywords(TypedDict, total=False):
    """The options as keywords of `watch`: the fields of all groups, by their own names."""

    what: Iterable[What]
    where: Where
    every: When
    histogram: bool
    max_calls: int
    max_memory_mb: int
    budget: float | None
    loss_fn: Any
    loader: Any
    scheduler: Any
    scaler: Any
    resume: bool
    start_step: int | None
    max_disk_mb: int | None
    rank: int | None
    config: Mapping[str, Any] | None
    diagnose: bool
    guard: GuardAction | None
    bundles: bool
    max_bundle_mb: int
    on_error: OnError
    enabled: bool
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of `watch`, in groups. Every field of a group is also a keyword of `watch` and of `replace`.

    >>> Options().replace(every=10, guard="skip").recording.every
    10
    """

    recording: RecordingOptions = field(default_factory=RecordingOptions)
    helpers: Helpers = field(default_factory=Helpers)
    """Objects of the training loop that are observed: `loss_fn`, `loader`, `scheduler`, `scaler`."""
    storage: StorageOptions = field(default_factory=StorageOptions)
    diagnosis: DiagnosisOptions = field(default_factory=DiagnosisOptions)
    on_error: OnError = "isolate"
    """"isolate" switches a failing part of Sonde off and continues; "raise" lets its error through."""
    enabled: bool = True
    """False attaches nothing and writes nothing; every method of the session then does nothing."""
    clock: Callable[[], float] = time.time
    """Where times come from."""

    def replace(self, **keywords: Unpack[Keywords]) -> Options:
        """Return these options with some of them replaced, each by its own name.

        Raises:
            TypeError: There is no option of that name.

        """
        given: dict[str, Any] = dict(keywords)
        for name in given:
            if name not in OPTION_NAMES:
                raise TypeError(f"watch() got an unexpected keyword argument {name!r}")
        parts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name, part in parts.items():
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                mine = {each.name: given[each.name] for each in dataclasses.fields(part) if each.name in given}
                parts[name] = dataclasses.replace(part, **mine)
            else:
                parts[name] = given.get(name, part)
        return Options(**parts)


OPTION_NAMES: Final = frozenset(Keywords.__annotations__)
"""All keywords of `watch`."""


def watch(
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    run: str | os.PathLike[str],
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Session:
    """Record a model while it trains, into the folder `run`.

    Args:
        model: A module, or several by name, such as `{"generator": g, "discriminator": d}`.
        optimizer: The optimizer or optimizers. Without one, any that turns out to own a parameter of the model is used.
        run: The folder to write. It must not hold a run yet, unless `resume` is true. A star in its name becomes the
            next number: "runs/first-*" writes runs/first-1, then runs/first-2; `session.path` is the folder.
        options: A set of options to share between programs.
        **keywords: Single options; they take precedence over `options`. `help(sonde.Options)` explains the groups:

            what is recorded: what, where, every, histogram, max_calls, max_memory_mb, budget
            objects of the loop: loss_fn, loader, scheduler, scaler
            how the run is written: resume, start_step, max_disk_mb, rank, config
            what happens when something looks wrong: diagnose, guard, bundles, max_bundle_mb
            Sonde itself: on_error, enabled, clock

    Example:
        with sonde.watch(model, optimizer, run="runs/first") as session:
            for x, y in loader:
                loss = loss_fn(model(x), y)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                session.log(loss=loss)

    """
    chosen = _options(options).replace(**keywords)
    if not chosen.enabled:
        return IdleSession(Path(run or ""))  # a program that switches it off may have no name for the run
    models = _models(model)
    optimizers = _optimizers(optimizer)
    plan = _plan(models, chosen)
    _check_helpers(chosen.helpers)
    _check_start(chosen.storage)
    forensics = _forensics(chosen.diagnosis, plan.what)
    _warn_if_compiled(models, plan)
    _warn_if_watched(models)
    writer = _open_writer(run, chosen, _header(models, optimizers, plan, chosen))
    start_step = chosen.storage.start_step
    session = Session(
        Pipeline(
            models,
            optimizers,
            writer,
            plan,
            chosen.helpers,
            extensions=Extensions(
                sensors=functools.partial(Sensors, wanted=WANTED | SHOWN) if plan.diagnose else None,
                forensics=functools.partial(Forensics, options=forensics),
                judge=functools.partial(Monitor, share=_judging_share(plan.budget)) if plan.diagnose else None,
            ),
            steps_before=writer.last_step if start_step is None else start_step - 1,
            clock=chosen.clock,
        )
    )
    _watchers.update(dict.fromkeys(models.values(), weakref.ref(session)))
    return session


def open_session(
    *,
    run: str | os.PathLike[str],
    resume: bool = False,
    max_disk_mb: int | None = None,
    rank: int | None = None,
    config: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.time,
) -> Session:
    """Record into the folder `run` what you hand in yourself; no model is watched.

    The options mean what they mean for `watch`.

    Example:
        with sonde.open_session(run="runs/notes") as session:
            session.log(accuracy=0.93)
            session.step()

    """
    storage = StorageOptions(resume=resume, max_disk_mb=max_disk_mb, rank=rank, config=config)
    options = Options(
        recording=RecordingOptions(max_calls=1),
        storage=storage,
        diagnosis=DiagnosisOptions(diagnose=False),
        clock=clock,
    )
    plan = _plan({}, options)
    writer = _open_writer(run, options, _header({}, [], plan, options))
    return HandFedSession(Pipeline({}, [], writer, plan, options.helpers, steps_before=writer.last_step, clock=clock))


def _judging_share(budget: float | None) -> float | None:
    return None if budget is None else JUDGING * budget


def _options(options: Any) -> Options:
    if options is not None and not isinstance(options, Options):
        raise OptionError(f"options takes sonde.Options; got {type(options).__name__}: {options!r:.80}.")
    return options or Options()


def _open_writer(run: str | os.PathLike[str], options: Options, header: RunHeader) -> RunWriter:
    storage = options.storage
    return RunWriter(
        place_of(run, resume=storage.resume, shared=num_ranks() > 1),
        header,
        rank=this_rank() if storage.rank is None else whole_number("rank", storage.rank, least=0),
        resume=storage.resume,
        start_step=storage.start_step,
        max_disk_bytes=None if storage.max_disk_mb is None else whole_number("max_disk_mb", storage.max_disk_mb) << 20,
        num_ranks=num_ranks(),
        clock=options.clock,
    )


def _models(model: Models) -> dict[str, nn.Module]:
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    for name, each in models.items():
        if not isinstance(each, nn.Module):
            raise OptionError(
                f"watch() takes a torch.nn.Module or a dict of them; {name or 'model'} is {type(each).__name__}."
            )
    if not models:
        raise OptionError("watch() got an empty dict: there is no model to watch.")
    return models


def _optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    given: Any = optimizer
    optimizers = [inner_optimizer(each) for each in (given if isinstance(given, Iterable) else [given])]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise OptionError(
                f"optimizer takes torch optimizers; got {type(each).__name__}. Leave it out to find them."
            )
    return optimizers


def _check_helpers(helpers: Helpers) -> None:
    if helpers.loss_fn is not None and not callable(helpers.loss_fn):
        raise OptionError(f"loss_fn takes a function or a module; got {helpers.loss_fn!r:.80}.")
    loader = helpers.loader
    if isinstance(loader, str | bytes) or not (loader is None or hasattr(loader, "__iter__")):
        raise OptionError(f"loader takes what the loop iterates over, such as a DataLoader; got {loader!r:.80}.")
    with_methods("scheduler", helpers.scheduler, "a learning-rate scheduler", ["step"])
    with_methods("scaler", helpers.scaler, "a torch.amp.GradScaler", ["is_enabled", "step", "get_scale"])


def _check_start(storage: StorageOptions) -> None:
    if storage.start_step is not None:
        whole_number("start_step", storage.start_step)
        if not storage.resume:
            raise OptionError(
                f"start_step={storage.start_step} is for a run that is resumed: pass resume=True as well."
            )


def _plan(models: dict[str, nn.Module], options: Options) -> Plan:
    recording = options.recording
    chosen = [recording.what] if isinstance(recording.what, str) else list(recording.what or ())
    unknown = [item for item in chosen if item not in get_args(What)]
    if unknown or not chosen:
        raise OptionError(f"what={chosen!r}: choose from {', '.join(get_args(What))}.")
    if options.on_error not in get_args(OnError):
        raise OptionError(f"on_error={options.on_error!r}: choose 'isolate' or 'raise'.")
    names = {name: type(module).__name__ for name, module, _ in named_modules(models)}
    names |= {name: "" for name, _, _ in named_parameters(models)}
    check_each_matches(recording.where, names, " + ".join(type(model).__name__ for model in models.values()))
    return Plan(
        what=frozenset(chosen),
        where=selector(recording.where),
        when=schedule(recording.every),
        histogram=bool(recording.histogram),
        on_error=options.on_error,
        max_memory_bytes=whole_number("max_memory_mb", recording.max_memory_mb) << 20,
        max_calls=whole_number("max_calls", recording.max_calls),
        budget=_checked_budget(recording.budget),
        diagnose=bool(options.diagnosis.diagnose),
    )


def _forensics(options: DiagnosisOptions, what: frozenset[str]) -> ForensicsOptions:
    guard = options.guard
    if guard is not None and guard not in get_args(GuardAction):
        raise OptionError(
            f"guard={guard!r}: choose 'skip', 'stop' or 'stop_late', or leave it out to hold nothing back."
        )
    if guard == "stop_late" and not what & {"gradients", "parameters", "updates"}:
        raise OptionError("guard='stop_late' goes by readings of gradients or parameters: add 'gradients' to what.")
    return ForensicsOptions(
        enabled=options.diagnose or guard is not None,
        guard=guard,
        bundles=bool(options.bundles),
        max_bundle_bytes=whole_number("max_bundle_mb", options.max_bundle_mb) << 20,
    )


def _header(models: dict[str, nn.Module], optimizers: list[Optimizer], plan: Plan, options: Options) -> RunHeader:
    watching = {
        "what": sorted(plan.what),
        "where": plan.where.text,
        "every": plan.when.text,
        "histogram": plan.histogram,
        "budget": plan.budget,
    }
    described = options.helpers.describe() | {"optimizers": [type(each).__name__ for each in optimizers]}
    return RunHeader(
        schema_version=schema.SCHEMA_VERSION,
        created=options.clock(),
        sonde_version=VERSION,
        model=describe_model(models),
        environment=describe_environment(),
        config={"watch": watching, "helpers": described, "user": mapping("config", options.storage.config)},
    )


def _warn_if_watched(models: dict[str, nn.Module]) -> None:
    """Warn about a forgotten session, as when a notebook's cell runs again: both would record the model."""
    for model in models.values():
        watcher = _watchers.get(model, lambda: None)()
        if watcher is not None and not watcher.is_closed:
            logger.warning(
                "this model is watched already, by a session that writes %s and goes on doing so. Call its close() "
                "first if you meant to begin anew.",
                watcher.path,
            )
            return


def _warn_if_compiled(models: dict[str, nn.Module], plan: Plan) -> None:
    compiled = any(is_compiled(module) for model in models.values() for module in model.modules())
    if compiled and {"outputs", "output_gradients"} & plan.what:
        logger.warning(
            "the model is compiled: Sonde sees its parameters, gradients, updates and its final output, but not the "
            "outputs of modules inside the compiled part. Run the model eagerly to see those."
        )
