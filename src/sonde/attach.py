"""`sonde.watch`: check what the user asked for, open the run, start a session."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde import schema
from sonde.arguments import mapping, whole_number, with_methods
from sonde.diagnosis.monitor import Monitor
from sonde.errors import OptionError
from sonde.forensics.watcher import GuardAction
from sonde.forensics.wiring import ForensicsOptions
from sonde.guard import OnError
from sonde.names import is_wrapper, named_modules, named_parameters
from sonde.plan import DEFAULT_WHAT, Helpers, Plan, What
from sonde.ranks import num_ranks, this_rank
from sonde.records import Finding, Quantity, RunHeader, Sink
from sonde.schedule import When, schedule
from sonde.select import Where, check_each_matches, selector
from sonde.session import CLOSE_TIMEOUT_S, Session, T
from sonde.stages import Stages
from sonde.store import RunWriter
from sonde.store.runs import place_of
from sonde.taps.describe import describe_environment, describe_model
from sonde.version import VERSION

logger = logging.getLogger("sonde")

DEFAULT_MEMORY_MB: Final = 1024
Models = nn.Module | Mapping[str, nn.Module]

_watchers: weakref.WeakKeyDictionary[nn.Module, Callable[[], Session | None]] = weakref.WeakKeyDictionary()
"""By model: the session that watches it, held weakly."""


def watch(
    model: Models,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    run: str | os.PathLike[str],
    what: Iterable[What] = DEFAULT_WHAT,
    where: Where = None,
    every: When = 1,
    histogram: bool = True,
    loss_fn: Any = None,
    loader: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    on_error: OnError = "isolate",
    max_memory_mb: int = DEFAULT_MEMORY_MB,
    max_disk_mb: int | None = None,
    max_calls: int = 16,
    resume: bool = False,
    start_step: int | None = None,
    rank: int | None = None,
    config: Mapping[str, Any] | None = None,
    diagnose: bool = True,
    guard: GuardAction | None = None,
    bundles: bool = True,
    max_bundle_mb: int = 512,
    enabled: bool = True,
    clock: Callable[[], float] = time.time,
) -> Session:
    """Record a model while it trains, into the folder `run`.

    Args:
        model: A module, or several by name, such as `{"generator": g, "discriminator": d}`.
        optimizer: The optimizer or optimizers. Without one, any that turns out to own a parameter of the model is used.
        run: The folder to write. It must not hold a run yet, unless `resume` is true. A star in its name becomes the
            next number: "runs/first-*" writes runs/first-1, then runs/first-2; `session.path` tells which.
        what: Any of parameters, gradients, updates, outputs, output_gradients, optimizer_state. Updates come with
            parameters, since their ratio needs both.
        where: Which modules and parameters; see `sonde.select`. Everything by default.
        every: Which steps; a number n for each n-th, or a schedule of `sonde.schedule`.
        histogram: Whether readings carry a histogram of magnitudes.
        loss_fn: The loss; if it is a module, its output is recorded as `loss_fn:output`.
        loader: The data loader, described in the run.
        scheduler: The learning-rate scheduler; its counter is recorded.
        scaler: The gradient scaler; its scale is recorded, gradients are unscaled, and held-back steps are marked.
        on_error: "isolate" switches a failing part of Sonde off and goes on; "raise" lets its error through.
        max_memory_mb: Bound of what the session holds: steps not yet written and a copy of the parameters for updates.
        max_disk_mb: Bound of the run's telemetry on disk; beyond it old steps are merged into windows. By default a
            tenth of the free space, at most 16 GiB.
        max_calls: Calls of one module within a step beyond this many share the last call's site.
        resume: Append to a run that exists instead of refusing it.
        start_step: In a resumed run, the number of its first step if it goes on from before the end; what an earlier
            attempt recorded from there on stays in the files but is no longer shown.
        rank: This process's rank in a distributed run; found from torch.distributed or RANK by default.
        config: Settings of your own to keep in the run.
        diagnose: Whether to record the vital signs that a diagnosis needs, and to judge them while the run goes on, in
            the worker's thread: `session.findings`.
        guard: What to do when gradients are not finite: "skip" makes that optimizer step do nothing, "stop" raises
            `sonde.NonFiniteError` before anything is written. With an optimizer that is not fused both make the host
            wait for a GPU once per step. "stop_late" never waits and holds nothing back: it raises in the first step
            after the readings have shown it, on the CPU before anything is written. By default nothing is held back.
        bundles: Whether to save what is needed to repeat a step that went non-finite, in `run/bundles`.
        max_bundle_mb: Bound of one bundle; if the weights do not fit, it is saved without them.
        enabled: False attaches nothing and writes nothing; every verb of the session then does nothing.
        clock: Where times come from.

    Example:
        with sonde.watch(model, optimizer, run="runs/first") as session:
            for x, y in loader:
                loss = loss_fn(model(x), y)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                session.log(loss=loss)

    """
    if not enabled:
        return IdleSession(Path(run or ""))  # whoever switches it off may have no name for it
    models = _models(model)
    optimizers = _optimizers(optimizer)
    plan = replace(
        _plan(models, what, where, every, histogram, on_error, max_memory_mb, max_calls), diagnose=bool(diagnose)
    )
    helpers = _helpers(loss_fn, loader, scheduler, scaler)
    _check_start(start_step, resume)
    forensics = _forensics(diagnose, guard, bundles, max_bundle_mb, plan.what)
    _warn_if_compiled(models, plan)
    _warn_if_watched(models)
    writer = RunWriter(
        place_of(run, resume=resume, shared=num_ranks() > 1),
        _header(models, optimizers, plan, helpers, config, clock),
        rank=this_rank() if rank is None else whole_number("rank", rank, least=0),
        resume=resume,
        start_step=start_step,
        max_disk_bytes=None if max_disk_mb is None else whole_number("max_disk_mb", max_disk_mb) << 20,
        num_ranks=num_ranks(),
        clock=clock,
    )
    steps_before = writer.last_step if start_step is None else start_step - 1
    judge = Monitor if diagnose else None
    session = Session(
        Stages(
            models,
            optimizers,
            writer,
            plan,
            helpers,
            judge=judge,
            forensics=forensics,
            steps_before=steps_before,
            clock=clock,
        )
    )
    _watchers.update(dict.fromkeys(models.values(), weakref.ref(session)))
    return session


class IdleSession(Session):
    """What `watch(..., enabled=False)` returns: nothing is attached, no file is made, every verb does nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = False

    current_step = 0
    dropped_steps = 0

    @property
    def findings(self) -> list[Finding]:
        """Nothing is found where nothing is looked at."""
        return []

    def log(self, **scalars: float | Tensor) -> None:
        """Do nothing."""

    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Do nothing."""

    def loading(self, loader: Iterable[T]) -> Iterable[T]:
        """Hand the loader back."""
        return loader

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Do nothing."""

    def epoch(self, number: int) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""

    def save_bundle(self, reason: str = "by hand") -> Path:
        """Do nothing."""
        return self.path

    def subscribe(self, sink: Sink) -> None:
        """Do nothing."""

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Do nothing."""
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Do nothing but remember it."""
        self._closed = True

    def _note_exception(self, error: BaseException) -> None: ...


class Notebook(Session):
    """A session without a model: it listens to nothing and records what it is handed. Steps end by `step()`.

    What is noted can be read at once, since no pass of a model comes by to send it off.
    """

    def log(self, **scalars: float | Tensor) -> None:
        """Record single numbers of this step."""
        self._stages.packer.begin()
        super().log(**scalars)

    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Record the statistics of a tensor, array or list of numbers, or a reading, under a name of your own."""
        self._stages.packer.begin()
        super().record(site, values, quantity=quantity)

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened on the run's timeline."""
        super().event(event_type, message, data)
        self._stages.packer.ship()


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
    # Without a model its stages have nothing to listen to.
    plan = _plan({}, DEFAULT_WHAT, None, 1, True, "isolate", DEFAULT_MEMORY_MB, 1)
    helpers = Helpers()
    writer = RunWriter(
        place_of(run, resume=resume, shared=num_ranks() > 1),
        _header({}, [], plan, helpers, config, clock),
        rank=this_rank() if rank is None else whole_number("rank", rank, least=0),
        resume=resume,
        max_disk_bytes=None if max_disk_mb is None else whole_number("max_disk_mb", max_disk_mb) << 20,
        num_ranks=num_ranks(),
        clock=clock,
    )
    return Notebook(Stages({}, [], writer, plan, helpers, steps_before=writer.last_step, clock=clock))


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
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise OptionError(
                f"optimizer takes torch optimizers; got {type(each).__name__}. Leave it out to find them."
            )
    return optimizers


def _helpers(loss_fn: Any, loader: Any, scheduler: Any, scaler: Any) -> Helpers:
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"loss_fn takes a function or a module; got {loss_fn!r:.80}.")
    if isinstance(loader, str | bytes) or not (loader is None or hasattr(loader, "__iter__")):
        raise OptionError(f"loader takes what the loop iterates over, such as a DataLoader; got {loader!r:.80}.")
    with_methods("scheduler", scheduler, "a learning-rate scheduler", ["step"])
    with_methods("scaler", scaler, "a torch.amp.GradScaler", ["is_enabled", "step", "get_scale"])
    return Helpers(loss_fn=loss_fn, loader=loader, scheduler=scheduler, scaler=scaler)


def _check_start(start_step: int | None, resume: bool) -> None:
    if start_step is not None:
        whole_number("start_step", start_step)
        if not resume:
            raise OptionError(f"start_step={start_step} is for a run that is resumed: pass resume=True as well.")


def _plan(
    models: dict[str, nn.Module],
    what: Iterable[What],
    where: Where,
    every: When,
    histogram: bool,
    on_error: OnError,
    max_memory_mb: int,
    max_calls: int,
) -> Plan:
    chosen = [what] if isinstance(what, str) else list(what or ())
    unknown = [item for item in chosen if item not in get_args(What)]
    if unknown or not chosen:
        raise OptionError(f"what={chosen!r}: choose from {', '.join(get_args(What))}.")
    if on_error not in get_args(OnError):
        raise OptionError(f"on_error={on_error!r}: choose 'isolate' or 'raise'.")
    names = {name: type(module).__name__ for name, module, _ in named_modules(models)}
    names |= {name: "" for name, _, _ in named_parameters(models)}
    check_each_matches(where, names, " + ".join(type(model).__name__ for model in models.values()))
    return Plan(
        what=frozenset(chosen),
        where=selector(where),
        when=schedule(every),
        histogram=bool(histogram),
        on_error=on_error,
        max_memory_bytes=whole_number("max_memory_mb", max_memory_mb) << 20,
        max_calls=whole_number("max_calls", max_calls),
    )


def _forensics(
    diagnose: bool, guard: GuardAction | None, bundles: bool, max_bundle_mb: int, what: frozenset[str]
) -> ForensicsOptions:
    if guard is not None and guard not in get_args(GuardAction):
        raise OptionError(
            f"guard={guard!r}: choose 'skip', 'stop' or 'stop_late', or leave it out to hold nothing back."
        )
    if guard == "stop_late" and not what & {"gradients", "parameters", "updates"}:
        raise OptionError("guard='stop_late' goes by readings of gradients or parameters: add 'gradients' to what.")
    return ForensicsOptions(
        enabled=diagnose or guard is not None,
        guard=guard,
        bundles=bool(bundles),
        max_bundle_bytes=whole_number("max_bundle_mb", max_bundle_mb) << 20,
    )


def _header(
    models: dict[str, nn.Module],
    optimizers: list[Optimizer],
    plan: Plan,
    helpers: Helpers,
    config: Mapping[str, Any] | None,
    clock: Callable[[], float],
) -> RunHeader:
    watching = {
        "what": sorted(plan.what),
        "where": plan.where.text,
        "every": plan.when.text,
        "histogram": plan.histogram,
    }
    described = helpers.describe() | {"optimizers": [type(each).__name__ for each in optimizers]}
    return RunHeader(
        schema_version=schema.SCHEMA_VERSION,
        created=clock(),
        sonde_version=VERSION,
        model=describe_model(models),
        environment=describe_environment(),
        config={"watch": watching, "helpers": described, "user": mapping("config", config)},
    )


def _warn_if_watched(models: dict[str, nn.Module]) -> None:
    """Tell of a session that was forgotten, as by a notebook's cell that runs again: both would record the model."""
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
    compiled = [
        type(module).__name__
        for model in models.values()
        for module in model.modules()
        if (is_wrapper(module) and type(module).__name__ == "OptimizedModule") or module._compiled_call_impl is not None
    ]
    if compiled and {"outputs", "output_gradients"} & plan.what:
        logger.warning(
            "the model is compiled: Sonde sees its parameters, gradients, updates and its final output, but not the "
            "outputs of modules inside the compiled part. Run the model eagerly to see those."
        )
