"""Wire a recording together: taps see, kernels measure, the packer packs, the worker writes and judges.

This is the only module that knows all of them. Sensors, forensics and the judge are handed in and known by protocol.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from sonde.errors import OptionError
from sonde.hooks.guard import Guard, remove_all
from sonde.hooks.names import named_modules, named_parameters, unwrap
from sonde.hooks.on_backward import Reach
from sonde.probes.memory.device import DeviceMemory
from sonde.probes.profile.cuda_timing import CudaTiming, StepClock
from sonde.probes.profile.phases import StepVitals
from sonde.record.governor import EVERYTHING, NOTHING, Cost, Governor
from sonde.record.modules import ModuleTap, PassObserver, WatchedModule
from sonde.record.optimizers import OptimizerTap, StepObserver, Wants
from sonde.record.packer import Packer
from sonde.record.packets import ArenaPool, SiteBook
from sonde.record.parameters import ParameterTable, WatchedParameter
from sonde.record.plan import Helpers, Plan
from sonde.record.scaler import ScalerTap
from sonde.record.worker import Worker
from sonde.records import Finding, Judge, Phase, Sink
from sonde.select import Selector
from sonde.stats import kernel_for
from sonde.stats.protocol import Kernel
from sonde.store import RunWriter

logger = logging.getLogger("sonde")


class Observer(PassObserver, StepObserver, Protocol):
    """Looks at passes and steps beyond the tensors that taps record."""

    def see_initial(self) -> None:
        """Record what belongs to the state before the first step."""

    def attach(self) -> None:
        """Start listening."""

    def end_step(self) -> None:
        """Take the end of a step."""

    def remove(self) -> None:
        """Stop listening and forget the models."""


class Incidents(Protocol):
    """Looks for what is not finite, and holds the optimizer back if asked to."""

    @property
    def is_holding(self) -> bool:
        """Whether the present optimizer step is held back."""

    @property
    def sink(self) -> Sink | None:
        """What takes the run's readings, if it needs them."""

    def attach(self) -> None:
        """Start listening, after the optimizers' own tap."""

    def after_skip(self) -> None:
        """Take a step that a gradient scaler has held back."""

    def save_bundle(self, reason: str) -> Path:
        """Save what is needed to repeat the present step."""

    def remove(self) -> None:
        """Stop listening and forget the models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a session watches, and what those who take part in the recording may use."""

    path: Path
    models: dict[str, nn.Module]
    modules: list[WatchedModule]
    table: ParameterTable
    optimizers: list[tuple[str, Optimizer]]
    """Those handed in, with their names."""
    helpers: Helpers
    packer: Packer
    guard: Guard
    reach: Reach
    is_due: Callable[[Phase], bool]
    """Returns whether the present step is recorded in full, in a phase."""
    is_skipped: Callable[[], bool]
    """Returns whether the present step is to cost nothing; see `Governor.skips`."""
    raise_alarm: Callable[[], None]
    """Has the present step recorded in full, though it was to be skipped."""
    measured: Callable[[Optimizer], list[int] | None]
    """Returns the sites of all gradients of an optimizer that is about to step; None if not all were recorded."""
    publish: Callable[[Finding], None]
    records_loss: bool
    """Whether the output of the loss function is recorded as that of a module."""
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """What takes part in a recording beside the taps."""

    sensors: Callable[[Watched], Observer] | None = None
    forensics: Callable[[Watched], Incidents] | None = None
    judge: Callable[[Callable[[Finding], None]], Judge] | None = None


class Pipeline:
    """Everything between a model that trains and the run that is written of it."""

    step_vitals: StepVitals | None = None

    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: list[Optimizer],
        writer: RunWriter,
        plan: Plan,
        helpers: Helpers,
        *,
        extensions: Extensions | None = None,
        steps_before: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = writer.path
        self.writer = writer
        self._has_models = bool(models)
        self._is_fresh = steps_before is None
        self._scalar_sites: dict[str, int] = {}
        self._plan = plan
        self._helpers = helpers
        self._eval_passes = self._all_eval_passes = 0
        self.guard = Guard(plan.on_error, self._report_fault)
        modules = _watched_modules(models, plan.where, helpers.loss_fn)
        parameters = _watched_parameters(models, plan.where)
        book = SiteBook(writer.sites)
        self.pool = ArenaPool(plan.ring_bytes)
        self._kernels = functools.cache(self._make_kernel)
        self.worker = Worker(writer, self.pool, book, histogram=plan.histogram, clock=clock)
        self.packer = Packer(
            book,
            self.pool,
            self._kernels,
            self.worker.send,
            clock=clock,
            histogram=plan.histogram,
            expected_sites=3 * len(parameters) + len(modules),
            first_step=0 if steps_before is None else steps_before + 1,
        )
        self._table = ParameterTable(parameters, self.packer)
        self._reach = Reach()
        self._timings: list[CudaTiming] = []
        self._memories: list[DeviceMemory] = []
        self._mark = self.guard.wrap("device timing", self._mark_phase)
        roots = [root for model in models.values() for root in {model, unwrap(model)}] if plan.diagnose else []
        if roots:
            self.step_vitals = StepVitals(
                roots, self.packer, self.guard, own_seconds=self.guard.meter.total, own_bytes=self.held_bytes
            )
        self._govern = self.guard.wrap("budget", self._end_round)
        self._step_clock: StepClock | None = None
        self.governor = Governor(
            plan.budget,
            self._own_seconds,
            self.worker.seconds,
            self._note_cost,
            explores=lambda: self._step_clock is not None,
        )
        self._see_times = self.guard.wrap("device timing", self._see_device_times)
        self._see_memories = self.guard.wrap("device memory", self._see_device_memories)
        self._extend(self._watched(models, modules, optimizers, clock), extensions or Extensions(), steps_before or 0)

    # ------------------------------------------------------------------ wiring

    def _watched(
        self,
        models: dict[str, nn.Module],
        modules: list[WatchedModule],
        optimizers: list[Optimizer],
        clock: Callable[[], float],
    ) -> Watched:
        names = ["optimizer", *(f"optimizer{number}" for number in range(2, len(optimizers) + 1))]
        return Watched(
            path=self.path,
            models=models,
            modules=modules,
            table=self._table,
            optimizers=list(zip(names, optimizers, strict=False)),
            helpers=self._helpers,
            packer=self.packer,
            guard=self.guard,
            reach=self._reach,
            is_due=lambda phase: self._round_level() >= EVERYTHING if phase == "train" else self._modules.is_observed,
            is_skipped=lambda: self.governor.skips,
            raise_alarm=self.governor.raise_alarm,
            measured=self._measured_gradients,
            publish=self.worker.publish,
            records_loss=isinstance(self._helpers.loss_fn, nn.Module) and "outputs" in self._plan.what,
            clock=clock,
        )

    def _measured_gradients(self, optimizer: Optimizer) -> list[int] | None:
        return self.optimizers.measured_gradients(optimizer)

    def _extend(self, watched: Watched, extensions: Extensions, steps_before: int) -> None:
        self._observer = extensions.sensors(watched) if extensions.sensors is not None else None
        self._make_taps(watched.modules, [optimizer for _, optimizer in watched.optimizers], steps_before)
        self.forensics = extensions.forensics(watched) if extensions.forensics is not None else None
        if self.forensics is not None and self.forensics.sink is not None:
            self.worker.subscribe(self.forensics.sink)
        self.judge = extensions.judge(self.worker.publish) if extensions.judge is not None else None
        if self.judge is not None:
            self.worker.subscribe(self.judge)

    def _make_taps(self, modules: list[WatchedModule], optimizers: list[Optimizer], steps_before: int) -> None:
        what, packer, guard = self._plan.what, self.packer, self.guard
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
            observer=self._observer,
        )
        self.optimizers = OptimizerTap(
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
            level=self.level,
            before_step=packer.begin,
            after_step=self.end_step,
            mark=self._mark,
            steps_before=steps_before,
            observer=self._observer,
        )
        self._scaler: ScalerTap | None = None
        if self._helpers.scaler is not None:
            self._scaler = ScalerTap(
                self._helpers.scaler,
                self.optimizers,
                packer,
                guard,
                before_step=packer.begin,
                after_skip=functools.partial(self.end_step, skipped=True),
            )

    def attach(self) -> None:
        """Start listening, if there is a model to listen to."""
        self.guard.wrap("attaching", self._attach)()

    def _attach(self) -> None:
        if self._is_fresh:  # the parameters before the first step are the run's step 0
            self.optimizers.see_initial()
            if self._observer is not None:
                self._observer.see_initial()
            self.packer.end_step()
        if self._has_models:
            self._listen()

    def _listen(self) -> None:
        self._prepare_devices()
        if "updates" in self._plan.what:
            self._make_shadows()
        if self._observer is not None:
            self._observer.attach()
        elif {"outputs", "output_gradients"} & self._plan.what:
            self._reach.listen("", (entry.parameter for entry in self._table if entry.is_ready()))
        if self._observer is not None or {"outputs", "output_gradients"} & self._plan.what:
            self._modules.attach()
        self.optimizers.attach()
        if self._scaler is not None:
            self._scaler.attach()
        if self.step_vitals is not None:
            self.step_vitals.attach()
        if self.forensics is not None:
            self.forensics.attach()

    def _prepare_devices(self) -> None:
        # A program with a scaler runs in float16, even if all parameters are float32.
        dtypes = {torch.float16} if self._helpers.scaler is not None else set()
        dtypes |= {entry.parameter.dtype for entry in self._table}
        devices = {entry.parameter.device for entry in self._table if entry.parameter.device.type != "meta"}
        for device in sorted(devices, key=str):
            self._kernels(device).warm_up(dtypes)

    def _make_kernel(self, device: torch.device) -> Kernel:
        """Return the kernel of a device that is met for the first time, perhaps in the middle of a run."""
        kernel = kernel_for(device)
        if device.type == "cuda":
            self._timings.append(CudaTiming(device, self.packer))
            self._step_clock = self._step_clock or StepClock(device)
            self._memories.append(DeviceMemory(device, self.packer))
        return kernel

    def _make_shadows(self) -> None:
        left_out = self._table.make_shadows(self._plan.max_memory_bytes - self._plan.ring_bytes)
        if left_out:
            names = ", ".join(entry.name for entry in left_out[:3]) + (", ..." if len(left_out) > 3 else "")
            message = (
                f"updates of {len(left_out)} parameter(s) are not recorded ({names}): a copy of them does not fit into "
                f"max_memory_mb={self._plan.max_memory_bytes >> 20}. Raise it, or leave 'updates' out of what."
            )
            logger.warning("%s", message)
            self.packer.put_event("updates_left_out", message, {"parameters": [entry.name for entry in left_out]})

    def detach(self) -> None:
        """Stop listening and forget the models."""
        parts = (self._modules, self.optimizers, self.step_vitals, self._observer, self._scaler, self.forensics)
        remove_all([*(part for part in parts if part is not None), self._reach])
        self._timings.clear()
        self._step_clock = None
        self._table.clear()

    # ------------------------------------------------------------------ what taps call

    def is_due(self, step: int) -> bool:
        """Return whether a step is recorded by the user's schedule, as far as the worker keeps up."""
        return self._plan.when(step) and step % self.packer.stride == 0

    def level(self, step: int) -> int:
        """Return how much of a step is recorded: a level of `sonde.record.governor`."""
        return self.governor.level if self.is_due(step) else NOTHING

    def _before_pass(self, phase: Phase) -> int:
        self.packer.begin()
        if phase == "train":
            self._eval_passes = 0
            level = self._round_level()
            if level:
                self._mark("forward")
            return level
        self._eval_passes += 1
        if not self.is_due(self._eval_passes - 1):
            return NOTHING
        self._all_eval_passes += 1
        return self.governor.evaluation_level(self._all_eval_passes - 1)

    def _round_level(self) -> int:
        return self.level(self._round())

    def _round(self) -> int:
        # With several optimizers one round of the loop is several steps; sample rounds, so that all are seen.
        return (self.packer.step - 1) // self.optimizers.number + 1

    def _after_pass(self, phase: Phase) -> None:
        if phase == "train":
            self._mark("backward")

    def _mark_phase(self, phase: str) -> None:
        if self.step_vitals is not None:
            self.step_vitals.mark(phase)
        for timing in self._timings:
            timing.mark(phase)

    def held_bytes(self) -> int:
        """Return what Sonde holds and grows within its bounds, so that it is not taken for a leak of the program."""
        return self.pool.used_bytes + (0 if self.judge is None else self.judge.nbytes)

    def end_step(self, *, skipped: bool = False) -> None:
        """Take what is known at the end of a step, and send it off."""
        if self.governor.skips:
            self._see_helpers()
            self._modules.end_step()
            self._govern()
            self.packer.end_step(skipped=skipped or (self.forensics is not None and self.forensics.is_holding))
            return
        self._unscale_output_gradients()
        self._see_helpers()
        if self._observer is not None:
            self._observer.end_step()
        if self._timings:
            self._see_times(bool(self._round_level()))
            self._see_memories(bool(self._round_level()))
        if self.step_vitals is not None:
            self.step_vitals.end_step(bool(self._round_level()))
        self._modules.end_step()
        if self.forensics is not None:
            if skipped:
                self.forensics.after_skip()
            skipped = skipped or self.forensics.is_holding
        self._govern()
        self.packer.end_step(skipped=skipped)

    def _own_seconds(self) -> float:
        return self.guard.meter.total() + self._modules.seconds_in_c

    def _end_round(self) -> None:
        """Let the governor decide, once per round of the loop."""
        if self.packer.step % self.optimizers.number == 0:
            self.packer.level = self._round_level()
            if self._step_clock is not None:
                self._step_clock.end_step(self._round_level(), self.governor.take_duration)
            now = self._round()
            due, *next_due = (self.is_due(each) for each in (now, now + 1, now + 2))
            self.governor.end_step(due=due, next_due=(next_due[0], next_due[1]), timed=self._step_clock is not None)
            if self.step_vitals is not None:
                self.step_vitals.pause(self.governor.skips)

    def _note_cost(self, cost: Cost) -> None:
        self.packer.put_event("budget", f"recording is adapted to the budget: {cost}", cost.to_json())

    def note_final_cost(self) -> None:
        """Write into the run what recording has cost."""
        cost = self.governor.cost() if self._plan.budget is not None and self._has_models else None
        if cost is not None:
            self.packer.put_event("cost", str(cost), cost.to_json())

    def save_bundle(self, reason: str) -> Path:
        """Save what is needed to repeat the present step.

        Raises:
            OptionError: No pass of this step is kept.

        """
        if self.forensics is None:
            raise OptionError("save_bundle() found no training pass to save: this session watches no model.")
        return self.forensics.save_bundle(reason)

    def _see_device_times(self, due: bool) -> None:
        for timing in self._timings:
            if due:
                timing.end_step()
            else:
                timing.forget()

    def _see_device_memories(self, due: bool) -> None:
        for memory in self._memories if due else ():
            memory.see()

    def _unscale_output_gradients(self) -> None:
        if self._scaler is not None and self._scaler.site >= 0 and self._modules.gradient_sites:
            self.packer.unscale(self._modules.gradient_sites, self._scaler.site)

    def _see_helpers(self) -> None:
        last_epoch = getattr(self._helpers.scheduler, "last_epoch", None)
        if isinstance(last_epoch, int | float):
            self.packer.put(self.scalar_site("scheduler.last_epoch"), float(last_epoch))

    def _report_fault(self, part: str, what: str) -> None:
        message = f"{part} failed and is switched off; training goes on without it"
        self.packer.put_event("fault", message, {"traceback": what})  # first: a logging handler of the user's may raise
        logger.warning("%s.\n%s", message, what.rstrip())

    def scalar_site(self, name: str) -> int:
        """Return the site of a single number, made at its first use."""
        site = self._scalar_sites.get(name)
        if site is None:
            site = self._scalar_sites[name] = self.packer.site(name, "scalar")
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
