"""The session: wires taps, kernels, pipe and store together, and is what the user holds.

This is the only module that knows all stages. A session has few verbs: log, record, event, epoch, step, subscribe,
flush, close.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde import schema
from sonde.errors import ClosedError, OptionError
from sonde.forensics.wiring import Forensics, ForensicsOptions
from sonde.pipe.book import SiteBook
from sonde.pipe.packer import Packer
from sonde.pipe.pool import ArenaPool
from sonde.pipe.worker import Worker
from sonde.probes.cuda_timing import CudaTiming
from sonde.probes.device_memory import DeviceMemory
from sonde.probes.step_vitals import StepVitals
from sonde.records import Finding, Judge, Phase, Quantity, Reading, Sink, summarise
from sonde.schedule import Schedule
from sonde.select import Selector
from sonde.signals import is_capturing
from sonde.stats import kernel_for
from sonde.store import RunWriter
from sonde.taps.describe import describe_helper
from sonde.taps.guard import Guard, OnError
from sonde.taps.modules import ModuleTap, WatchedModule
from sonde.taps.names import named_modules, named_parameters, unwrap
from sonde.taps.optimizers import OptimizerTap, Wants
from sonde.taps.parameters import ParameterTable, WatchedParameter
from sonde.taps.reach import Reach
from sonde.taps.scaler import ScalerTap
from sonde.taps.vital_signs import Subjects, VitalSigns

logger = logging.getLogger("sonde")
T = TypeVar("T")

What = Literal["parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state"]
DEFAULT_WHAT: Final[tuple[What, ...]] = ("parameters", "gradients", "updates", "outputs")
CLOSE_TIMEOUT_S: Final = 30.0

_live: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """Objects of the training loop that are observed only."""

    loss_fn: Any = None
    loader: Any = None
    scheduler: Any = None
    scaler: Any = None

    def describe(self) -> dict[str, Any]:
        """Return what each helper says about itself."""
        return {name: describe_helper(helper) for name in self.__slots__ if (helper := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a session records, where, when and within which bounds."""

    what: frozenset[str]
    where: Selector
    when: Schedule
    histogram: bool
    on_error: OnError
    max_memory_bytes: int
    max_calls: int
    diagnose: bool = False
    """Whether to record the vital signs and facts that a diagnosis needs."""

    @property
    def ring_bytes(self) -> int:
        """Bytes for steps on their way to the store; the rest of the memory is for shadows of parameters."""
        return min(self.max_memory_bytes // 4, 64 << 20)


class Session:
    """A recording in progress. Made by `sonde.watch`; a context manager that closes itself."""

    _step_vitals: StepVitals | None = None

    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: list[Optimizer],
        writer: RunWriter,
        plan: Plan,
        helpers: Helpers,
        *,
        judge: Callable[[Callable[[Finding], None]], Judge] | None = None,
        forensics: ForensicsOptions | None = None,
        steps_before: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = writer.path
        self._writer = writer
        self._plan = plan
        self._helpers = helpers
        self._closed = False
        self._eval_passes = 0
        self._log_sites: dict[str, int] = {}
        self._num_optimizers = max(1, len(optimizers))
        self._guard = Guard(plan.on_error, self._report_fault)
        modules = _watched_modules(models, plan.where, helpers.loss_fn)
        parameters = _watched_parameters(models, plan.where)
        book = SiteBook(writer.sites)
        self._pool = ArenaPool(plan.ring_bytes)
        self._kernels = functools.cache(kernel_for)
        self._worker = Worker(writer, self._pool, book, histogram=plan.histogram, clock=clock)
        self._packer = Packer(
            book,
            self._pool,
            self._kernels,
            self._worker.send,
            clock=clock,
            histogram=plan.histogram,
            expected_sites=3 * len(parameters) + len(modules),
            first_step=0 if steps_before is None else steps_before + 1,
        )
        self._table = ParameterTable(parameters, self._packer)
        self._reach = Reach()
        self._timings: list[CudaTiming] = []
        self._memories: list[DeviceMemory] = []
        self._mark = self._guard.wrap("device timing", self._mark_phase)
        roots = [root for model in models.values() for root in {model, unwrap(model)}] if plan.diagnose else []
        if roots:
            self._step_vitals = StepVitals(
                roots,
                self._packer,
                self._guard.wrap,
                own_seconds=self._guard.meter.total,
                own_bytes=self._held_bytes,
            )
        self._see_devices = self._guard.wrap("device timing and memory", self._see_device_numbers)
        self._vitals = self._make_vitals(models, modules, optimizers) if plan.diagnose else None
        self._make_taps(modules, optimizers, steps_before)
        options = forensics or ForensicsOptions(enabled=False)
        self._forensics = Forensics(
            models,
            self._packer,
            self._guard,
            self._worker.publish,
            options,
            self.path,
            measured=self._optimizers.has_measured_gradients,
            clock=clock,
        )
        if options.enabled:
            self._worker.subscribe(self._forensics.watcher.recent)
        self._judge = None if judge is None else judge(self._worker.publish)
        if self._judge is not None:
            self._worker.subscribe(self._judge)
        _live.add(self)
        try:
            self._guard.wrap("attaching", self._attach_first if steps_before is None else self._attach)()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ wiring

    def _make_vitals(
        self, models: dict[str, nn.Module], modules: list[WatchedModule], optimizers: list[Optimizer]
    ) -> VitalSigns:
        helpers = self._helpers
        watches_loss = isinstance(helpers.loss_fn, nn.Module) and "outputs" in self._plan.what
        names = ["optimizer", *(f"optimizer{number}" for number in range(2, len(optimizers) + 1))]
        return VitalSigns(
            Subjects(
                models=models,
                modules=modules,
                table=self._table,
                optimizers=list(zip(names, optimizers, strict=False)),
                loader=helpers.loader,
                scheduler=helpers.scheduler,
                scaler=helpers.scaler,
            ),
            self._packer,
            self._guard,
            reach=self._reach,
            is_due=lambda phase: self._is_round_due() if phase == "train" else self._modules.is_recording,
            state=self._packer.put_event,
            step=lambda: self._packer.step,
            loss_outputs=not watches_loss,
        )

    def _make_taps(self, modules: list[WatchedModule], optimizers: list[Optimizer], steps_before: int | None) -> None:
        what, packer, guard = self._plan.what, self._packer, self._guard
        self._modules = ModuleTap(
            modules,
            packer,
            guard,
            outputs="outputs" in what,
            output_gradients="output_gradients" in what,
            max_calls=self._plan.max_calls,
            reach=self._reach,
            before_pass=self._before_pass,
            after_pass=self._after_pass,
            observer=self._vitals,
        )
        self._optimizers = OptimizerTap(
            optimizers,
            self._table,
            packer,
            guard,
            wants=Wants(
                parameters=bool({"parameters", "updates"} & what),
                gradients="gradients" in what,
                updates="updates" in what,
                state="optimizer_state" in what,
            ),
            is_due=self._is_due,
            before_step=packer.begin,
            after_step=self._end_step,
            mark=self._mark,
            steps_before=steps_before or 0,
            observer=self._vitals,
        )
        self._scaler: ScalerTap | None = None
        if self._helpers.scaler is not None:
            self._scaler = ScalerTap(
                self._helpers.scaler,
                self._optimizers,
                packer,
                guard,
                before_step=packer.begin,
                after_skip=functools.partial(self._end_step, skipped=True),
            )

    def _attach_first(self) -> None:
        """Attach to a fresh run: the parameters before the first step are its step 0."""
        self._optimizers.see_initial()
        if self._vitals is not None:
            self._vitals.see_initial()
        self._packer.end_step()
        self._attach()

    def _attach(self) -> None:
        self._prepare_devices()
        if "updates" in self._plan.what:
            self._make_shadows()
        if self._vitals is not None:
            self._vitals.attach()
        elif {"outputs", "output_gradients"} & self._plan.what:
            self._reach.listen("", (entry.parameter for entry in self._table if entry.is_ready()))
        if self._vitals is not None or {"outputs", "output_gradients"} & self._plan.what:
            self._modules.attach()
        self._optimizers.attach()
        if self._scaler is not None:
            self._scaler.attach()
        if self._step_vitals is not None:
            self._step_vitals.attach()
        self._forensics.attach()

    def _prepare_devices(self) -> None:
        # Whoever has a scaler runs in float16, even if all parameters are float32.
        dtypes = {torch.float16} if self._helpers.scaler is not None else set()
        dtypes |= {entry.parameter.dtype for entry in self._table}
        devices = {entry.parameter.device for entry in self._table if entry.parameter.device.type != "meta"}
        for device in sorted(devices, key=str):
            self._kernels(device).warm_up(dtypes)
            if device.type == "cuda":
                self._timings.append(CudaTiming(device, self._packer))
                self._memories.append(DeviceMemory(device, self._packer))

    def _make_shadows(self) -> None:
        left_out = self._table.make_shadows(self._plan.max_memory_bytes - self._plan.ring_bytes)
        if left_out:
            names = ", ".join(entry.name for entry in left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            message = (
                f"updates of {len(left_out)} parameter(s) are not recorded ({names}): a copy of them does not fit into "
                f"max_memory_mb={self._plan.max_memory_bytes >> 20}. Raise it, or leave 'updates' out of what."
            )
            logger.warning("%s", message)
            self._packer.put_event("updates_left_out", message, {"parameters": [entry.name for entry in left_out]})

    # ------------------------------------------------------------------ what taps call

    def _is_due(self, step: int) -> bool:
        return self._plan.when(step) and step % self._packer.stride == 0

    def _before_pass(self, phase: Phase) -> bool:
        if is_capturing():
            return False
        self._packer.begin()
        if phase == "train":
            self._eval_passes = 0
            due = self._is_round_due()
            if due:
                self._mark("forward")
            return due
        self._eval_passes += 1
        return self._is_due(self._eval_passes - 1)

    def _is_round_due(self) -> bool:
        # With several optimizers one round of the loop is several steps; sample rounds, so that all are seen.
        return self._is_due((self._packer.step - 1) // self._num_optimizers + 1)

    def _after_pass(self, phase: Phase) -> None:
        if phase == "train":
            self._mark("backward")

    def _mark_phase(self, phase: str) -> None:
        if self._step_vitals is not None:
            self._step_vitals.mark(phase)
        for timing in self._timings:
            timing.mark(phase)

    def _held_bytes(self) -> int:
        """Return what Sonde holds and grows within its bounds, so that nobody takes it for a leak of the program."""
        return self._pool.used_bytes + (0 if self._judge is None else self._judge.nbytes)

    def _end_step(self, *, skipped: bool = False) -> None:
        self._unscale_output_gradients()
        self._see_helpers()
        if self._vitals is not None:
            self._vitals.end_step()
        if self._timings:
            self._see_devices(self._is_round_due())
        if self._step_vitals is not None:
            self._step_vitals.end_step(self._is_round_due())
        self._modules.end_step()
        if skipped:
            self._forensics.after_skip()
        self._packer.end_step(skipped=skipped or self._forensics.is_holding)

    def _see_device_numbers(self, due: bool) -> None:
        for timing in self._timings:
            if due:
                timing.end_step()
            else:
                timing.forget()
        for memory in self._memories if due else ():
            memory.see()

    def _unscale_output_gradients(self) -> None:
        if self._scaler is not None and self._scaler.site >= 0 and self._modules.gradient_sites:
            self._packer.unscale(self._modules.gradient_sites, self._scaler.site)

    def _see_helpers(self) -> None:
        last_epoch = getattr(self._helpers.scheduler, "last_epoch", None)
        if isinstance(last_epoch, int | float):
            self._packer.put(self._scalar_site("scheduler.last_epoch"), float(last_epoch))

    def _report_fault(self, part: str, what: str) -> None:
        message = f"{part} failed and is switched off; training goes on without it"
        logger.warning("%s.\n%s", message, what.rstrip())
        self._packer.put_event("fault", message, {"traceback": what})

    # ------------------------------------------------------------------ verbs

    @property
    def current_step(self) -> int:
        """The step that is being recorded, or that has just ended; steps count from 1."""
        return self._packer.step

    @property
    def dropped_steps(self) -> int:
        """How many steps could not be recorded because the writer lagged behind."""
        return self._packer.dropped

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the run as far as can be told by now, best first; complete once the session is closed."""
        return [] if self._judge is None else self._judge.findings

    def log(self, **scalars: float | Tensor) -> None:
        """Record single numbers of this step: a loss, an accuracy. A tensor is not waited for.

        Example:
            session.log(loss=loss, accuracy=0.93)

        """
        self._check_open("log")
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise OptionError(
                        f"log({name}=...) takes single numbers; this tensor has shape {tuple(value.shape)}. "
                        f"Use session.record({name!r}, tensor) for its statistics."
                    )
                self._packer.see(self._scalar_site(name), value.detach())
            else:
                self._packer.put(self._scalar_site(name), _number(name, value))

    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Record the statistics of a tensor, array or list of numbers under a name of your own.

        A `Reading` that was made elsewhere is taken as it is. `quantity` says what the numbers are, if they are not
        just values: a gradient that you hand in is shown beside those that Sonde saw itself.
        """
        self._check_open("record")
        if isinstance(values, Tensor):
            self._packer.see(self._packer.site(site, quantity, tensor=values), values.detach())
        elif isinstance(values, Reading):
            bins = np.zeros(schema.NUM_BINS, np.uint64) if values.bins is None else values.bins
            self._packer.put_reading(self._packer.site(site, quantity), values.row, bins)
        else:
            row, bins = summarise(_numbers(site, values))
            self._packer.put_reading(self._packer.site(site, quantity), row, bins)

    def loading(self, loader: Iterable[T]) -> Iterable[T]:
        """Return `loader` to iterate over, with the time of its `next` recorded as waiting for data.

        Torch's own DataLoader is timed without it; this is for every other way of making batches.

        Example:
            for batch in session.loading(my_generator()):
                train(batch)

        """
        return loader if self._step_vitals is None else self._step_vitals.loading(loader)

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened on the run's timeline."""
        self._check_open("event")
        self._packer.put_event(event_type, message, dict(data or {}))

    def epoch(self, number: int) -> None:
        """Say which epoch the following steps belong to."""
        self._check_open("epoch")
        self._packer.begin()
        self._packer.epoch = int(number)
        self._packer.put_event("epoch", f"epoch {number}", {"epoch": int(number)})

    def step(self) -> None:
        """End a step by hand, in a loop without a torch optimizer. With one, steps are found from it."""
        self._check_open("step")
        if self._optimizers.stepped:
            raise OptionError("step() is for loops without a torch optimizer; here every optimizer.step() ends a step.")
        self._packer.begin()
        if self._is_due(self._packer.step):
            self._optimizers.see_orphans()
        self._end_step()

    def save_bundle(self, reason: str = "by hand") -> Path:
        """Save what is needed to repeat the present step in the run; call it after the forward, before the step."""
        self._check_open("save_bundle")
        return self._forensics.save_bundle(reason)

    def subscribe(self, sink: Sink) -> None:
        """Hand everything recorded from now on to `sink` too, in the worker thread."""
        self._check_open("subscribe")
        self._worker.subscribe(sink)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything seen so far can be read from the run; False if that took longer than the timeout."""
        self._check_open("flush")
        self._packer.ship()
        return self._worker.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Detach from the model and finish the run. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self._detach()
            self._guard.wrap("the last step", self._packer.ship_rest)()
            # If a device refused its rows, this has been noted meanwhile; what is left needs no device.
            self._guard.wrap("the last events", self._packer.ship)()
        finally:
            self._finish(timeout_s)

    def _finish(self, timeout_s: float) -> None:
        if not self._worker.close(timeout_s):
            logger.warning(
                "the run %s could not be finished within %g s; its end may be missing.", self.path, timeout_s
            )
        self._pool.clear()
        _live.discard(self)
        self._tell_findings()

    def _tell_findings(self) -> None:
        """Say in one line what was found: whoever forgets to ask is told once, when the run ends."""
        found = [f"{finding.kind} ({finding.severity})" for finding in self.findings if finding.severity != "info"]
        if found and self._writer.rank == 0:
            logger.warning("found in %s: %s. Run: sonde diagnose %s", self.path, ", ".join(found), self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self._note_exception(error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self.current_step}"
        return f"<Session {self.path} ({state})>"

    # ------------------------------------------------------------------ ends

    def _note_exception(self, error: BaseException) -> None:
        self._writer.final_state = "failed"
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._packer.put_event("exception", message, {"traceback": text[-8000:]})

    def _detach(self) -> None:
        self._modules.remove()
        self._optimizers.remove()
        if self._step_vitals is not None:
            self._step_vitals.remove()
        if self._vitals is not None:
            self._vitals.remove()
        if self._scaler is not None:
            self._scaler.remove()
        self._forensics.remove()
        self._reach.remove()
        self._timings.clear()
        self._table.clear()

    def _abandon(self) -> None:
        """Let go in a forked child: the run, its threads and its files belong to the parent."""
        self._closed = True
        self._detach()

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not self._closed:
            self._note_exception(error)
        self.close()

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(f"{verb}() on a closed session ({self.path}). Call sonde.watch again to record more.")

    def _scalar_site(self, name: str) -> int:
        site = self._log_sites.get(name)
        if site is None:
            site = self._log_sites[name] = self._packer.site(name, "scalar")
        return site


def _watched_modules(models: dict[str, nn.Module], chosen: Selector, loss_fn: Any) -> list[WatchedModule]:
    roots = {id(root) for model in models.values() for root in (model, unwrap(model))}
    watched = [
        WatchedModule(
            module, name, type(module).__name__, aliases, chosen(name, type(module).__name__), id(module) in roots
        )
        for name, module, aliases in named_modules(models)
    ]
    if isinstance(loss_fn, nn.Module):
        watched.append(WatchedModule(loss_fn, "loss_fn", type(loss_fn).__name__, (), wanted=True, is_root=False))
    return watched


def _watched_parameters(models: dict[str, nn.Module], chosen: Selector) -> list[WatchedParameter]:
    kinds = {name: type(module).__name__ for name, module, _ in named_modules(models)}
    watched = []
    for name, parameter, aliases in named_parameters(models):
        owner = name.rpartition(".")[0]
        kind = kinds.get(owner, "")
        if chosen(name, kind) or chosen(owner, kind):
            watched.append(WatchedParameter(parameter, name, kind, aliases))
    return watched


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"log({name}=...) takes a number or a tensor with one element; got {value!r:.80}.") from error


def _numbers(site: str, values: Any) -> schema.Rows:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"record({site!r}, ...) takes a tensor, array or list of numbers; got {type(values).__name__}."
        ) from error


def _abandon_in_child() -> None:
    for session in list(_live):
        session._abandon()
    _live.clear()


def _close_at_exit() -> None:
    for session in list(_live):
        session._close_at_exit()


# A forked child (a DataLoader worker) inherits hooks and files but no threads: it must let go of them at once.
os.register_at_fork(after_in_child=_abandon_in_child)
atexit.register(_close_at_exit)
