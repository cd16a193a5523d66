"""`sonde.watch` and `sonde.open_session`: check the options, open the run, start a session.

The module is not called `watch`: importing a submodule of that name would replace the function `sonde.watch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack, get_args

import numpy as np
from torch import nn
from torch.optim import Optimizer

from sonde.core import schema
from sonde.core.arguments import mapping, shown, whole_number, with_methods
from sonde.core.signals import SCHEDULE, SHOWN, STATE_STEPS, part_of
from sonde.diagnosis.monitor import Monitor
from sonde.diagnosis.ranks.monitor import RankMonitor
from sonde.diagnosis.rules import WANTED
from sonde.errors import OptionError, RunError, RunInUse, SondeError
from sonde.forensics.tape.recorder import TapeRecorder
from sonde.forensics.watcher import GuardAction
from sonde.forensics.wiring import Forensics, ForensicsOptions
from sonde.hooks.guard import OnError, attempt
from sonde.hooks.names import named_modules, named_parameters
from sonde.options import (
    DiagnosisOptions,
    Keywords,
    Options,
    RecordingOptions,
    StorageOptions,
    checked_budget,
)
from sonde.parallel.ranks import Identity, identity
from sonde.record.describe import describe_environment, describe_model
from sonde.record.extensions import Extensions
from sonde.record.governor import JUDGING, UNLIMITED_JUDGING
from sonde.record.kinds import Given, is_compiled, see_through, steps_counted
from sonde.record.pipeline import Pipeline
from sonde.record.plan import Helpers, Plan, What
from sonde.record.rank_watch import RankOptions
from sonde.records import Finding, RunHeader, Sink
from sonde.schedule import schedule
from sonde.select import check_each_matches, selector
from sonde.sensors.dispatcher import Sensors
from sonde.session import HandFedSession, IdleSession, Session, check_sink
from sonde.store import RunWriter, open_run
from sonde.store.fingerprints import FingerprintWriter
from sonde.store.remote.spool import CarrierProcess, address_of, local_place
from sonde.store.runs import place_of
from sonde.store.shared_names import choose_folder, may_have_siblings, own_folder
from sonde.version import VERSION

logger = logging.getLogger("sonde")

Models = nn.Module | Mapping[str, nn.Module]

_watchers: weakref.WeakKeyDictionary[nn.Module, Callable[[], Session | None]] = weakref.WeakKeyDictionary()
"""By model: the session that watches it, held weakly."""


def watch(
    model: Models,
    optimizer: Any = None,
    *,
    run: str | os.PathLike[str],
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> Session:
    """Record a model while it trains, into the folder `run`.

    Args:
        model: A module, or several by name, such as `{"generator": g, "discriminator": d}`.
        optimizer: The optimizer or optimizers: of torch, wrapped by a framework, or a class of your own that holds one.
            Whichever torch optimizer steps the model's parameters is watched, also if it is another one, or none is
            given.
        run: The folder to write, or an address in an object store, such as "s3://bucket/runs/first", to which the run
            is carried from a local folder. It must not hold a run yet, unless `resume` is true. A star in its name
            becomes the next number: "runs/first-*" writes runs/first-1, then runs/first-2; `session.path` is the local
            folder.
        options: A set of options to share between programs.
        **keywords: Single options; they take precedence over `options`. `help(sonde.Options)` explains the groups:

            what is recorded: what, where, every, steps_by_hand, ranks, histogram, max_calls, max_memory_mb, budget
            objects of the loop: loss_fn, loader, scheduler, scaler
            how the run is written: resume, start_step, max_disk_mb, rank, config, logs, to
            what happens when something looks wrong: diagnose, guard, bundles, max_bundle_mb, stuck_after, tape
            Sonde itself: on_error, enabled, clock

    A disk that is full or a folder that may not be written costs the recording, not the training: a warning says so,
    and the session does nothing. With `on_error="raise"` it is an error, as a wrong argument always is.

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
    return _or_unrecorded(run, chosen, functools.partial(_start, model, optimizer, run, chosen))


def _or_unrecorded(run: str | os.PathLike[str], options: Options, start: Callable[[], Session]) -> Session:
    """Start a session. If the disk refuses, or Sonde fails, the program continues without one, and a warning says so.

    What is wrong with an argument is raised, and everything with `on_error="raise"`.
    """
    session = attempt(start)
    if isinstance(session, Session):
        return session
    error, is_ours = session, not isinstance(session, SondeError)
    if options.on_error == "raise" or not (is_ours or isinstance(error.__cause__, OSError)):
        raise error
    attempt(functools.partial(_warn_of_nothing, run, error, is_ours))  # a logging handler of the program's may raise
    return IdleSession(Path(run), is_unrecorded=True)


def _warn_of_nothing(run: str | os.PathLike[str], error: Exception, is_ours: bool) -> None:
    reason = "Sonde failed.\n" + "".join(traceback.format_exception(error)).rstrip() if is_ours else str(error)
    logger.warning("NOTHING IS RECORDED in %s; the program continues without it. %s", os.fspath(run), reason)


def _extensions(writer: RunWriter, plan: Plan, forensics: ForensicsOptions, options: DiagnosisOptions) -> Extensions:
    """Return what takes part in the recording beside the taps."""
    return Extensions(
        sensors=functools.partial(Sensors, wanted=WANTED | SHOWN) if plan.diagnose else None,
        forensics=functools.partial(Forensics, options=forensics),
        judge=functools.partial(_judge, writer=writer, plan=plan) if plan.diagnose else None,
        ranks=_rank_options(writer, options),
        tape=TapeRecorder if plan.diagnose and _is_taped(options) and writer.rank == 0 else None,
    )


@contextlib.contextmanager
def _closed_if_it_fails(writer: RunWriter) -> Iterator[None]:
    try:
        yield
    except BaseException:
        attempt(writer.close)
        raise


def _start(model: Models, optimizer: Any, run: str | os.PathLike[str], chosen: Options) -> Session:
    """Check what was passed in, open the run and start its session."""
    models = _models(model)
    given = _optimizers(optimizer)
    plan = _plan(models, chosen)
    _check_helpers(chosen.helpers)
    _check_start(chosen.storage)
    sinks = _sinks(chosen.storage.to)
    forensics, is_full = _forensics(chosen.diagnosis, plan.what), schedule(chosen.recording.ranks)
    warned = _warn_if_compiled(models, plan)
    _settle_other_sessions(models)
    run = _local_place(run, chosen.storage)
    chosen = _find_start(run, chosen, given)
    writer = _open_writer(run, chosen, _header(models, given.optimizers, plan, chosen))
    if writer is None:
        return IdleSession(Path(run), is_unrecorded=True)
    with _closed_if_it_fails(writer):
        if writer.rank and not is_full(writer.rank):
            plan, forensics = _in_brief(plan, forensics)
        start_step = chosen.storage.start_step
        pipeline = Pipeline(
            models,
            given,
            writer,
            plan,
            chosen.helpers,
            extensions=_extensions(writer, plan, forensics, chosen.diagnosis),
            steps_before=writer.last_step if start_step is None else start_step - 1,
            clock=chosen.clock,
        )
        if not warned:  # parts may be compiled between now and the first pass
            pipeline.before_first_pass = functools.partial(_warn_if_compiled, models, plan)
        for sink in _subscribers(sinks, writer, plan):
            pipeline.worker.subscribe(sink)
        session = Session(pipeline, carrier=CarrierProcess.start(writer.path))
    if chosen.storage.logs and writer.rank == 0:
        pipeline.guard.wrap("keeping what is printed", session.keep_logs)()
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
    return _or_unrecorded(run, options, functools.partial(_start_by_hand, run, options))


def _start_by_hand(run: str | os.PathLike[str], options: Options) -> Session:
    plan = _plan({}, options)
    run = _local_place(run, options.storage)
    writer = _open_writer(run, options, _header({}, [], plan, options))
    if writer is None:
        return IdleSession(Path(run), is_unrecorded=True)
    with _closed_if_it_fails(writer):
        pipeline = Pipeline(
            {}, Given(), writer, plan, options.helpers, steps_before=writer.last_step, clock=options.clock
        )
        return HandFedSession(pipeline, carrier=CarrierProcess.start(writer.path))


def _judge(report: Callable[[Finding], None], *, writer: RunWriter, plan: Plan) -> Monitor:
    """Return what judges the run while it is recorded; the first rank also has taped steps examined."""
    run = writer.path if writer.rank == 0 else None
    return Monitor(report, share=_judging_share(plan.budget), run=run, earlier=_earlier(writer))


def _earlier(writer: RunWriter) -> dict[str, float]:
    """Return how a schedule stood when a run ended that is resumed now."""
    found: dict[str, float] = {}
    for name in SCHEDULE if writer.attempt else ():
        with contextlib.suppress(SondeError, OSError, LookupError, ValueError):
            values = open_run(writer.path).series(f"{name}:scalar", "mean").values
            found |= {name: float(values[-1])} if len(values) else {}
    return found


def _rank_options(writer: RunWriter, options: DiagnosisOptions) -> RankOptions | None:
    """Return how this rank looks after the others; None for a process that trains alone."""
    world = identity().world
    if world < 2:
        return None
    return RankOptions(
        rank=writer.rank,
        world=world,
        stuck_after=options.stuck_after,
        monitor=functools.partial(RankMonitor, writer.path, writer.rank) if options.diagnose else None,
    )


def _is_taped(options: DiagnosisOptions) -> bool:
    return options.tape and os.environ.get("SONDE_TAPE") != "0"


def _in_brief(plan: Plan, forensics: ForensicsOptions) -> tuple[Plan, ForensicsOptions]:
    """Return what a rank does that is not recorded in full: a guard must act on all ranks alike, so it stays."""
    kept = plan.what & {"gradients"} if forensics.guard is not None else frozenset()
    brief = dataclasses.replace(forensics, enabled=forensics.guard is not None, bundles=False)
    return dataclasses.replace(plan, what=kept, diagnose=False), brief


def _judging_share(budget: float | None) -> float:
    return UNLIMITED_JUDGING if budget is None else JUDGING * budget


def _options(options: Any) -> Options:
    if options is not None and not isinstance(options, Options):
        raise OptionError(f"options takes sonde.Options; got {type(options).__name__}: {shown(options)}.")
    return options or Options()


def _who(storage: StorageOptions) -> Identity:
    if storage.rank is None:
        return identity()
    return dataclasses.replace(
        identity(), rank=whole_number("rank", storage.rank, least=0), source="rank", is_known=True
    )


def _local_place(run: str | os.PathLike[str], storage: StorageOptions) -> str | os.PathLike[str]:
    """Return the folder to write: that of the spool where the run goes to an object store."""
    given: Any = run
    if not isinstance(given, str | os.PathLike):
        return run  # which is refused where the folder is chosen
    return local_place(run, resume=storage.resume, is_first=_who(storage).rank == 0)


def _open_writer(run: str | os.PathLike[str], options: Options, header: RunHeader) -> RunWriter | None:
    """Open the run; None if another rank than the first cannot, since the others must not wait for it.

    Where nothing tells the processes of a training apart, each writes a run of its own.
    """
    who = _who(options.storage)
    path = choose_folder(run, rank=who.rank, world=who.world, resume=options.storage.resume)
    if not who.is_known:
        path = _own_folder(path, "nothing names the rank of this process")
    try:
        return _writer(path, options, header, who)
    except RunError as error:
        if isinstance(error, RunInUse) and not who.source and may_have_siblings():
            own = _own_folder(path, "another process writes it, and nothing names the rank of this one")
            return _writer(own, options, header, who)
        if who.rank == 0 or who.source == "rank":
            raise
        logger.warning("rank %d is not recorded; training continues. %s", who.rank, error)
        return None


def _own_folder(path: Path, why: str) -> Path:
    own = own_folder(path)
    logger.warning("%s: %s, so it records into %s. Call init_process_group before, or pass rank=.", path, why, own)
    return own


def _writer(path: Path, options: Options, header: RunHeader, who: Identity) -> RunWriter:
    storage = options.storage
    address = address_of(path)
    if address is not None:
        where = {"address": address, "spool": str(path)}
        header = dataclasses.replace(header, environment={**header.environment, **where})
    return RunWriter(
        path,
        header,
        rank=who.rank,
        resume=storage.resume,
        start_step=storage.start_step,
        max_disk_bytes=None if storage.max_disk_mb is None else whole_number("max_disk_mb", storage.max_disk_mb) << 20,
        num_ranks=who.world,
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


def _optimizers(optimizer: Any) -> Given:
    if optimizer is None:
        return Given()
    several = isinstance(optimizer, Iterable) and not hasattr(optimizer, "step")
    objects = [*optimizer.values()] if isinstance(optimizer, Mapping) else [*optimizer] if several else [optimizer]
    for each in objects:
        if isinstance(each, type) or not callable(getattr(each, "step", None)):
            raise OptionError(
                f"optimizer takes torch optimizers; got {type(each).__name__}. Leave it out to find them."
            )
    return see_through(objects)


def _check_helpers(helpers: Helpers) -> None:
    if helpers.loss_fn is not None and not callable(helpers.loss_fn):
        raise OptionError(f"loss_fn takes a function or a module; got {shown(helpers.loss_fn)}.")
    loader = helpers.loader
    if isinstance(loader, str | bytes) or not (loader is None or hasattr(loader, "__iter__")):
        raise OptionError(f"loader takes what the loop iterates over, such as a DataLoader; got {shown(loader)}.")
    with_methods("scheduler", helpers.scheduler, "a learning-rate scheduler", ["step"])
    with_methods("scaler", helpers.scaler, "a torch.amp.GradScaler", ["is_enabled", "step", "get_scale"])


def _check_start(storage: StorageOptions) -> None:
    if storage.start_step is not None:
        whole_number("start_step", storage.start_step)
        if not storage.resume:
            raise OptionError(
                f"start_step={storage.start_step} is for a run that is resumed: pass resume=True as well."
            )


def _sinks(given: Any) -> list[Sink]:
    sinks = list(given) if isinstance(given, Iterable) else [given]
    for sink in sinks:
        check_sink("to", sink)
    return sinks


def _subscribers(sinks: list[Sink], writer: RunWriter, plan: Plan) -> list[Sink]:
    """Return who takes the readings beside the run: the user's sinks on the first rank, what ranks compare on each."""
    own: list[Sink] = [FingerprintWriter(writer.folder, lambda: identity().world > 1)] if plan.diagnose else []
    return [*own, *(sinks if writer.rank == 0 else ())]


def _find_start(run: str | os.PathLike[str], options: Options, given: Given) -> Options:
    """Find where a run is resumed that goes on from an earlier checkpoint: its optimizer has counted fewer steps."""
    storage = options.storage
    counts = [count for each in given.optimizers[:1] if (count := steps_counted(each))]
    if not storage.resume or storage.start_step is not None or not counts:
        return options
    try:
        recorded = open_run(place_of(run, resume=True))
        series = recorded.series(f"optimizer:vital{part_of(STATE_STEPS)}", "mean")
    except (SondeError, OSError, LookupError, ValueError):
        return options  # a new run, or one without such a count
    earlier = np.flatnonzero(series.values <= counts[0])
    if not len(earlier):
        return options
    at = earlier[-1]
    start = int(series.steps[at] + counts[0] - series.values[at]) + 1
    return options.replace(start_step=start) if start <= int(recorded.steps[-1]) else options


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
        budget=checked_budget(recording.budget),
        steps_by_hand=bool(recording.steps_by_hand),
        diagnose=bool(options.diagnosis.diagnose),
    )


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _forensics(options: DiagnosisOptions, what: frozenset[str]) -> ForensicsOptions:
    guard, stuck_after = options.guard, options.stuck_after
    if stuck_after is not None and not _is_seconds(stuck_after):
        raise OptionError(f"stuck_after={stuck_after!r} takes a number of seconds, or None for the usual limit.")
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


def watched_models(*, closed: bool = False) -> Iterator[nn.Module]:
    """Yield the models that an open session watches, or those whose session is closed."""
    for model, watcher in list(_watchers.items()):
        session = watcher()
        if (session is None or session.is_closed) is closed:
            yield model


def _settle_other_sessions(models: dict[str, nn.Module]) -> None:
    """Warn about a forgotten session, as when a notebook's cell runs again; close one that `sonde run` started."""
    for model in models.values():
        watcher = _watchers.get(model, lambda: None)()
        if watcher is None or watcher.is_closed:
            continue
        if watcher.is_automatic:
            watcher.close()
            continue
        logger.warning(
            "this model is watched already, by a session that writes %s and goes on doing so. Call its close() "
            "first if you meant to begin anew.",
            watcher.path,
        )
        return


def _warn_if_compiled(models: dict[str, nn.Module], plan: Plan) -> bool:
    """Warn of outputs that cannot be seen, and return whether that was done."""
    modules = [module for model in models.values() for module in model.modules()]
    compiled = any(is_compiled(each) or hasattr(each.forward, "_torchdynamo_orig_callable") for each in modules)
    warns = compiled and bool({"outputs", "output_gradients"} & plan.what)
    if warns:
        logger.warning(
            "the model is compiled: Sonde sees its parameters, gradients, updates and its final output, but not the "
            "outputs of modules inside the compiled part. Run the model eagerly to see those."
        )
    return warns
