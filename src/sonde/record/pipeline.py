"""Wire a recording together: taps see, kernels measure, the packer packs, the worker writes and judges.

This is the only module that knows all of them. Sensors, forensics and the judge are passed in and known by protocol.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from sonde.core.outcome import what_to_log
from sonde.errors import OptionError
from sonde.hooks.guard import Guard, remove_all
from sonde.hooks.names import named_modules, named_parameters, unwrap
from sonde.hooks.on_backward import Reach
from sonde.hooks.stack_room import StackRoom
from sonde.probes.memory.device import DeviceMemory
from sonde.probes.profile.cuda_timing import CudaTiming, StepClock
from sonde.probes.profile.phases import StepVitals
from sonde.record.doze import Doze
from sonde.record.extensions import Extensions, Watched
from sonde.record.governor import EVERYTHING, NOTHING, Cost, Governor
from sonde.record.kinds import Given
from sonde.record.modules import ModuleTap, WatchedModule, watched_modules
from sonde.record.optimizers import OptimizerTap, Wants
from sonde.record.packer import Packer
from sonde.record.packets import ArenaPool, SiteBook
from sonde.record.parameters import ParameterTable, watched_parameters
from sonde.record.plan import Helpers, Plan
from sonde.record.rank_watch import RankOptions, RankWatch
from sonde.record.scaler import ScalerTap
from sonde.record.unseen_steps import UnseenSteps, WeightChanges
from sonde.record.worker import Worker
from sonde.records import Phase
from sonde.stats import kernel_for
from sonde.stats.protocol import Kernel
from sonde.store import RunWriter

logger = logging.getLogger("sonde")


class Pipeline:
    """Everything between a model that trains and the run that is written."""

    step_vitals: StepVitals | None = None
    rank_watch: RankWatch | None = None

    def __init__(
        self,
        models: dict[str, nn.Module],
        given: Given,
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
        self.before_first_pass: Callable[[], object] | None = None
        """Called once, when the first forward pass of a model begins."""
        self._is_fresh = steps_before is None
        self._scalar_sites: dict[str, int] = {}
        self._plan = plan
        self._helpers = helpers
        self._scheduler_seen_at = -1
        self._eval_passes = self._all_eval_passes = 0
        self.guard = Guard(plan.on_error, self._report_fault)
        modules = watched_modules(models, plan.where, helpers.loss_fn)
        parameters = watched_parameters(models, plan.where)
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
            # Values, gradients and updates; the diagnosis looks at the rows of weights besides. With too few rows the
            # first step would need a second arena, and parameters would be taken one by one.
            expected_sites=(5 if plan.diagnose else 3) * len(parameters) + len(modules),
            first_step=0 if steps_before is None else steps_before + 1,
        )
        self._table = ParameterTable(parameters, self.packer)
        self._reach = Reach(self.guard)
        self._room = StackRoom(self.guard)
        self._timings: list[CudaTiming] = []
        self._memories: list[DeviceMemory] = []
        self._mark = self.guard.wrap("device timing", self._mark_phase)
        self._begin_step: Callable[[], None] = self.packer.begin
        if extensions is not None and extensions.ranks is not None and models:
            self._watch_ranks(extensions.ranks, models)
        roots = [root for model in models.values() for root in {model, unwrap(model)}]
        if roots and (plan.diagnose or self.rank_watch is not None):
            self.step_vitals = StepVitals(
                roots,
                self.packer,
                self.guard,
                own_seconds=self.guard.meter.total,
                own_bytes=self.held_bytes,
                on_change=None if self.rank_watch is None else self.rank_watch.progress.change,
            )
        self._govern = self.guard.wrap("budget", self._end_iteration)
        self._step_clock: StepClock | None = None
        self.governor = Governor(
            plan.budget,
            self._own_seconds,
            self.worker.seconds,
            self._note_cost,
            busy_seconds=lambda: self.worker.busy_seconds,
            aside_seconds=self._aside_seconds,
            rests=lambda: self._step_clock is not None,
        )
        self._doze = Doze(
            self.guard,
            self.governor,
            self.packer,
            self._reach,
            self._own_seconds,
            self.is_due,
            self._pause_what_is_skipped,
        )
        self._see_times = self.guard.wrap("device timing", self._see_device_times)
        self._see_memories = self.guard.wrap("device memory", self._see_device_memories)
        self._given, self._steps_before = given, steps_before or 0
        self._ours = {id(each) for model in models.values() for each in model.parameters()}
        self._extend(self._watched(models, modules, given.optimizers, clock), extensions or Extensions())

    # ------------------------------------------------------------------ wiring

    def _watch_ranks(self, options: RankOptions, models: dict[str, nn.Module]) -> None:
        watch = RankWatch(options, self.writer.folder, lambda: self.packer.step, self.worker.publish)
        modules = [(name or "(model)", module) for name, module, _ in named_modules(models)]
        parameters: list[torch.Tensor] = [parameter for _, parameter, _ in named_parameters(models)]
        note_step = self.guard.wrap("step phases", watch.progress.begin_step)

        def begin_step() -> None:
            self.packer.begin()
            note_step()

        self._begin_step = begin_step
        self._end_rank_step = self.guard.wrap("step phases", watch.progress.end_step)
        self._attach_ranks = self.guard.wrap("heartbeat", lambda: watch.attach(self.guard, parameters, modules))
        self.rank_watch = watch

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
            is_due=lambda phase: self._step_level() >= EVERYTHING if phase == "train" else self._modules.is_observed,
            is_skipped=lambda: self.governor.skips,
            affords=self.governor.affords,
            scaler=lambda: self._scaler.scaler,
            raise_alarm=self._raise_alarm,
            measured=self._measured_gradients,
            publish=self.worker.publish,
            later=self.worker.do,
            records_loss=isinstance(self._helpers.loss_fn, nn.Module) and "outputs" in self._plan.what,
            clock=clock,
        )

    def _measured_gradients(self, optimizer: Optimizer) -> list[int] | None:
        return self.optimizers.measured_gradients(optimizer)

    def _extend(self, watched: Watched, extensions: Extensions) -> None:
        self._observer = extensions.sensors(watched) if extensions.sensors is not None else None
        self._make_taps(watched.modules)
        self.forensics = extensions.forensics(watched) if extensions.forensics is not None else None
        if self.forensics is not None and self.forensics.sink is not None:
            self.worker.subscribe(self.forensics.sink)
        self.judge = extensions.judge(self.worker.publish) if extensions.judge is not None else None
        if self.judge is not None:
            self.worker.subscribe(self.judge)
            judge = self.judge
            self.worker.judging_seconds = lambda: judge.seconds
        self.tape = extensions.tape(watched) if extensions.tape is not None else None
        if self.tape is not None:
            self.worker.subscribe(self.tape)

    def _make_taps(self, modules: list[WatchedModule]) -> None:
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
            forget_passes=self._forget_passes,
            observer=self._observer,
            doze=self._doze,
        )
        self._doze.modules = self._modules
        self.optimizers = OptimizerTap(
            self._given.optimizers,
            self._given.wrappers,
            self._table,
            packer,
            guard,
            ours=self._ours,
            wants=Wants(
                parameters=bool({"parameters", "updates"} & what),
                gradients="gradients" in what,
                updates="updates" in what,
                state="optimizer_state" in what,
            ),
            level=self.level,
            iterations=self,
            mark=self._mark,
            steps_before=self._steps_before,
            observer=self._observer,
        )
        self.optimizers.rhythm.by_hand = self._plan.steps_by_hand
        self._unseen = UnseenSteps(self._given, self.optimizers, self._modules, packer, self.is_due, self.end_step)
        self._given = Given()  # a program may drop its optimizers
        self._scaler = ScalerTap(self._helpers.scaler, self.optimizers, packer, guard)

    def attach(self) -> None:
        """Start the worker and, if there is a model, to listen to it."""
        self.worker.start()
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
        self._room.attach()
        self._prepare_devices()
        if "updates" in self._plan.what:
            self._make_shadows()
        if self._observer is not None:
            self._observer.attach()
        elif {"outputs", "output_gradients"} & self._plan.what:
            self._reach.listen("", (entry.parameter for entry in self._table if entry.is_ready()))
        if self._observer is not None or {"outputs", "output_gradients"} & self._plan.what:
            self._modules.attach()
            self._unseen.attach(WeightChanges(self._table, self._reach), self.guard)
        if self.tape is not None:
            self.tape.attach()
        self.optimizers.attach()
        self._scaler.attach()
        if self.step_vitals is not None:
            self.step_vitals.attach()
        if self.rank_watch is not None:
            self._attach_ranks()
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
        """Return the kernel of a device at its first use, which may be in the middle of a run."""
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
        # The tape first: what the others do while they detach is not part of the step.
        taps = (self.tape, self._modules, self.optimizers, self.step_vitals, self._observer, self._scaler)
        parts = (*taps, self.forensics, self.rank_watch)
        remove_all([*(part for part in parts if part is not None), self._reach, self._room, self._unseen])
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
        if self.before_first_pass is not None:
            call, self.before_first_pass = self.before_first_pass, None
            call()
        if phase == "train":
            self.governor.begin()
        self.optimizers.settle()
        if phase == "train":
            self._unseen.look()
            self.packer.begin()
            self._eval_passes = 0
            level = self._step_level()
            if level:
                self._mark("forward")
            return level
        # An evaluation between two steps belongs to the earlier one, whose weights it uses; so do values logged then.
        self._eval_passes += 1
        if not self.is_due(self._eval_passes - 1):
            return NOTHING
        self._all_eval_passes += 1
        return self.governor.evaluation_level(self._all_eval_passes - 1)

    def _step_level(self) -> int:
        return self.level(self.packer.step)

    def _after_pass(self, phase: Phase) -> None:
        if phase == "train":
            self._mark("backward")

    def _forget_passes(self) -> None:
        self.packer.forget_passes()
        if self._observer is not None:
            self._observer.forget_passes()
        if self.forensics is not None:
            self.forensics.forget_passes()

    def _mark_phase(self, phase: str) -> None:
        if self.step_vitals is not None:
            self.step_vitals.mark(phase)
        for timing in self._timings:
            timing.mark(phase)

    def held_bytes(self) -> int:
        """Return what Sonde holds and grows within its bounds, so that it is not taken for a leak of the program."""
        return self.pool.used_bytes + (0 if self.judge is None else self.judge.nbytes)

    def begin_step(self) -> None:
        """Begin the next iteration if the last one is over."""
        self._unseen.take_back()
        self._begin_step()

    def continue_step(self) -> None:
        """Handle an optimizer step that does not end the iteration: another optimizer is expected to step."""
        self._see_scheduler()
        self._modules.continue_step()
        if self._observer is not None:
            self._observer.continue_step()

    def reopen_step(self) -> None:
        """Continue the iteration that ended last."""
        self.packer.reopen()

    def end_dozed_step(self) -> None:
        """End an iteration that is only counted, which no pass of a model may have begun."""
        if self.packer.has_ended:
            self.packer.begin()
        if self._observer is not None:
            self._observer.end_dozed_step()
        self._doze.end_step()

    def wake_up(self) -> None:
        """Look at the present iteration after all."""
        self._doze.end()

    def _may_doze(self) -> bool:
        watches_all = self.rank_watch is not None or self._unseen.is_looking
        return not watches_all and self._modules.saw_model and self.optimizers.is_simple

    def _raise_alarm(self) -> None:
        self._doze.end()
        self.governor.raise_alarm()

    # ------------------------------------------------------------------ ends of iterations

    def end_by_hand(self, number: int | None) -> None:
        """End the iteration because the program says so; from now on nothing else ends one."""
        self._doze.end()
        rhythm = self.optimizers.rhythm
        is_first, rhythm.by_hand = not rhythm.by_hand, True
        if not (is_first and self.optimizers.stepped and self.packer.has_ended):
            self.packer.begin()
            if not self.optimizers.stepped and self.is_due(self.packer.step):
                self.optimizers.see_orphans()
            if rhythm.has_stepped:
                self.optimizers.end_iteration()
            else:
                self.end_step()
        if number is not None:
            self.packer.renumber(number)

    def finish(self) -> None:
        """End the iteration in which the program ends."""
        self._doze.end()
        self.optimizers.end_iteration()
        self._unseen.look()

    def is_held_back(self) -> bool:
        """Return whether the present optimizer step is held back."""
        return self.forensics is not None and self.forensics.is_holding

    def skip_step(self) -> None:
        """Handle an optimizer step that a gradient scaler has skipped."""
        if self.forensics is not None and not self.governor.skips:
            self.forensics.after_skip()

    def end_step(self, *, skipped: bool = False) -> None:
        """End a training iteration: collect what is known only now, and send the step."""
        self._end_step(skipped=skipped)
        if self.tape is not None:
            self.tape.end_round(self.packer.step, self.packer.step)
            if self.tape.is_taping:
                self._doze.end()  # nothing would end the tape of a step that is only counted

    def _end_step(self, *, skipped: bool) -> None:
        if self.rank_watch is not None:
            self._end_rank_step()
        if self.governor.skips:
            self._see_scheduler()
            if self.rank_watch is not None and self.step_vitals is not None:
                self.step_vitals.end_step(False)
            self._modules.end_step()
            self._govern()
            self.packer.end_step(skipped=skipped)
            return
        self._unscale_output_gradients()
        self._see_scheduler()
        if self._observer is not None:
            self._observer.end_step()
        if self._timings:
            self._see_times(bool(self._step_level()))
            self._see_memories(bool(self._step_level()))
        if self.step_vitals is not None:
            self.step_vitals.end_step(self._plan.diagnose and bool(self._step_level()))
        self._modules.end_step()
        self._govern()
        self.packer.end_step(skipped=skipped)

    def _own_seconds(self) -> float:
        return self.guard.meter.total() + self._modules.seconds_in_c

    def _aside_seconds(self) -> float:
        """Return what judging and taping have taken so far."""
        return sum(part.seconds for part in (self.judge, self.tape) if part is not None)

    def _end_iteration(self) -> None:
        """Let the governor decide, once per iteration."""
        self.packer.level = self._step_level()
        if self._step_clock is not None and self.governor.wants_duration:
            self._step_clock.end_step(self._step_level(), self.governor.take_duration)
        elif self._step_clock is not None:
            self._step_clock.forget()
        now = self.packer.step
        due, *next_due = (self.is_due(each) for each in (now, now + 1, now + 2))
        self.governor.end_step(due=due, next_due=(next_due[0], next_due[1]), timed=self._step_clock is not None)
        self._pause_what_is_skipped()
        if self.governor.skips and self._may_doze():
            self._doze.begin()
            if self._doze.is_on and self._step_clock is not None:
                self._step_clock.forget()

    def _pause_what_is_skipped(self) -> None:
        if self.step_vitals is not None and self.rank_watch is None:  # ranks are compared over every step
            self.step_vitals.pause(self.governor.skips)
        if self._observer is not None:
            self._observer.pause(self.governor.skips)

    def _note_cost(self, cost: Cost) -> None:
        self.packer.put_event("budget", f"recording is adapted to the budget: {cost}", cost.to_json())

    def note_final_cost(self) -> None:
        """Write into the run what recording has cost."""
        cost = self.governor.cost() if self._plan.budget is not None and self._has_models else None
        if cost is not None:
            self.packer.put_event("cost", str(cost), cost.to_json())

    def request_tape(self) -> None:
        """Tape the next round of the loop.

        Raises:
            OptionError: Nothing is taped in this session.

        """
        if self.tape is None:
            raise OptionError("tape() needs a session that watches a model, with diagnose and tape left on.")
        self._doze.end()
        self.tape.request()

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
        if self._scaler.site >= 0 and self._modules.gradient_sites:
            self.packer.unscale(self._modules.gradient_sites, self._scaler.site)

    def _see_scheduler(self) -> None:
        """Record the scheduler's count once per iteration, after its first optimizer step.

        The scheduler may be stepped before the iteration ends, if several optimizers step or it is ended by hand.
        """
        if self._scheduler_seen_at == self.packer.step:
            return
        self._scheduler_seen_at = self.packer.step
        last_epoch = getattr(self._helpers.scheduler, "last_epoch", None)
        if isinstance(last_epoch, int | float):
            self.packer.put(self.scalar_site("scheduler.last_epoch"), float(last_epoch))

    def _report_fault(self, part: str, what: str) -> None:
        # What the program calls itself is tried again when it is called again.
        fate = "failed" if part.startswith("session.") else "failed and is switched off"
        message = f"{part} {fate}; training continues without it"
        self.packer.put_event("fault", message, {"traceback": what})  # first: a logging handler of the user's may raise
        logger.warning("%s.\n%s", message, what_to_log(what))

    def scalar_site(self, name: str) -> int:
        """Return the site of a single number, made at its first use."""
        site = self._scalar_sites.get(name)
        if site is None:
            site = self._scalar_sites[name] = self.packer.site(name, "scalar")
        return site
