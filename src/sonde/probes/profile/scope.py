"""The profiler scope: run torch's profiler for some steps, within bounds, and summarise its results."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import torch

from sonde.errors import OptionError
from sonde.hooks.guard import Guard, Handle, remove_all, warn_of_fault
from sonde.hooks.on_step import on_step
from sonde.hooks.replace_function import BACKWARD
from sonde.probes.profile.advice import (
    HostSync,
    TorchPattern,
    Utilisation,
    Verdict,
    host_syncs,
    judge_copies,
    judge_patterns,
    judge_phases,
    judge_syncs,
    torch_patterns,
    utilisation,
)
from sonde.probes.profile.calls import (
    Copies,
    Operator,
    ProfileTree,
    copy_table,
    module_weights,
    operator_table,
    read_tree,
    stack_weights,
)
from sonde.probes.profile.module_times import ModuleTime, ModuleTimes
from sonde.probes.profile.phases import LoopPhases, StepPhase
from sonde.probes.profile.trace_file import folded_lines, numbered, speedscope, write_json, write_text, write_trace
from sonde.probes.profile.windows import MOST_STEPS, LoaderWatch, ProfileSchedule, Windows, profile_schedule

logger = logging.getLogger("sonde")

ANNOTATION: Final = "sonde: "
"""What the names of our phases begin with in a trace."""
# What torch's matcher calls the things that our own verdicts say with numbers.
_SAID_BY_US: Final = ("Synchronized DataLoader Pattern", "Optimizer Single Tensor Pattern")


class Timeline(Protocol):
    """Where a scope notes that it was there: a session."""

    path: Path

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened."""


class ProfileScope:
    """A context that profiles the steps inside it. It has answers once it has been left.

    Args:
        output_file: Where the Chrome trace goes; `.json` or `.json.gz`. With a run or session, `traces/profile.json.gz`
            in its folder; else no file is written. Further repeats of a schedule are numbered.
        schedule: Which steps to record: `ProfileSchedule(wait=1, warmup=1, active=3, repeat=1)` or such a dict. Without
            one everything is recorded, at most 20 steps.
        shapes: Whether operators are distinguished by the shapes of their inputs, and FLOPs counted.
        stacks: Whether the lines of Python are recorded; needed to name the line of a host sync.
        memory: Whether allocations are recorded.
        modules: Whether modules are timed, forward and backward.
        run: Folder of the run that the trace belongs to.
        session: The session to note the profile in.
        clock: Where times come from.

    Example:
        with profile_scope("trace.json.gz", schedule={"wait": 1, "active": 3}) as scope:
            for x, y in loader:
                train_step(x, y)
        for verdict in scope.verdict():
            print(verdict.text)

    """

    def __init__(
        self,
        output_file: str | os.PathLike[str] | None = None,
        *,
        schedule: ProfileSchedule | Mapping[str, int] | None = None,
        shapes: bool = True,
        stacks: bool = True,
        memory: bool = True,
        modules: bool = True,
        run: str | os.PathLike[str] | None = None,
        session: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        folder = Path(run) if run is not None else session.path if session is not None else None
        in_run = None if folder is None else folder / "traces" / "profile.json.gz"
        self.output_file = in_run if output_file is None else Path(output_file)
        self.trace_files: list[Path] = []
        self.notes: list[str] = []
        """What a reader of the answers should know: that recording stopped early, or never began."""
        self.steps = 0
        """Steps that ended inside the scope."""
        self._schedule = profile_schedule(schedule)
        options = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory, "with_flops": shapes}
        self._windows = Windows(self._schedule, options)
        self._session = session
        self._clock = clock
        self._guard = Guard("isolate", warn_of_fault)
        self._phases = LoopPhases(None, clock=clock, guard=self._guard, on_change=self._change_phase)
        self._modules = ModuleTimes(clock=clock, guard=self._guard) if modules else None
        self._loaders = LoaderWatch(self._guard)
        self._handles: list[Handle] = []
        self._annotation: Any = None
        self._entered = False
        self._by_hand = False
        self._step_ended = False
        self._optimizer: dict[str, Any] = {}
        self._spent: dict[str, float] = defaultdict(float)
        self._timed: tuple[int, float] = (0, 0.0)

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> Self:
        if self._entered:
            raise OptionError("this profile scope was used already; make another with profile_scope(...).")
        self._entered = True
        if torch._C._autograd._profiler_enabled():
            raise OptionError(
                "a profiler is running already, and torch can run only one at a time. Leave the other profile scope or "
                "torch.profiler.profile first, or profile only in the outer one."
            )
        self._windows.begin()
        try:
            self._attach()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stop()
            self._write_traces()
            self._note_ends()
        except (OSError, RuntimeError, ValueError):
            if error is None:
                raise
            # The program's own exception matters more than a trace that could not be written.
            logger.warning("the profile could not be finished", exc_info=True)

    def step(self) -> None:
        """End a step by hand, for loops without a torch optimizer; from then on optimizer steps are not counted."""
        self._by_hand = True
        self._end_step()
        self._advance()

    def _attach(self) -> None:
        self._phases.attach()
        if self._modules is not None:
            self._modules.attach()
            self._handles.append(BACKWARD.listen(end=self._guard.wrap("module times", self._end_backward)))
        self._loaders.attach()
        wrap = self._guard.wrap
        self._handles += on_step(wrap("profiling", self._before_optimizer), wrap("profiling", self._after_optimizer))

    def _stop(self) -> None:
        self._phases.remove()
        if self._modules is not None:
            self._modules.remove()
        self._loaders.remove()
        remove_all(self._handles)
        self._annotate(None)
        if self._step_ended:
            self._windows.count_step()
        self._windows.finish()

    def _write_traces(self) -> None:
        if self.output_file is not None:
            for number, recording in enumerate(self._windows.recordings, start=1):
                self.trace_files.append(write_trace(recording, numbered(self.output_file, number)))

    def _note_ends(self) -> None:
        if not self._windows.recordings:
            needed = self._schedule.wait + self._schedule.warmup + 1 if self._schedule else 1
            self.notes.append(
                f"nothing was recorded: {self.steps} step(s) ended inside the scope, and the schedule records from "
                f"step {needed} on. Without a torch optimizer call scope.step() after each step."
            )
        for note in self.notes:
            logger.warning("profile: %s", note)
        if self._session is not None:
            files = [str(path) for path in self.trace_files]
            self._session.event(
                "profile",
                f"profiled {self._windows.recorded_steps} of {self.steps} steps",
                {"traces": files, "verdicts": [verdict.text for verdict in self.verdict()], "notes": self.notes},
            )

    # ------------------------------------------------------------------ what happens inside

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizer = {"optimizer": type(optimizer).__name__} | {
            name: optimizer.defaults.get(name) for name in ("foreach", "fused") if name in optimizer.defaults
        }
        self._phases.begin("optimizer")

    def _after_optimizer(self, *_: Any) -> None:
        self._phases.end("optimizer")
        if not self._by_hand:
            self._end_step()
            # Torch is still inside its own range for this step: the profiler turns when the next thing begins.
            self._step_ended = True

    def _end_backward(self) -> None:
        if self._modules is not None:
            self._modules.end_backward()

    def _end_step(self) -> None:
        seconds, spent = self._phases.end_step()
        self.steps += 1
        if seconds is not None:
            self._timed = (self._timed[0] + 1, self._timed[1] + seconds - spent.get("watching", 0.0))
            for phase, each in spent.items():
                self._spent[phase] += each

    def _change_phase(self, going: StepPhase, coming: StepPhase) -> None:
        self._annotate(None)
        if self._step_ended and coming != "other":
            self._advance()
        self._annotate(None if coming == "other" else coming)

    def _annotate(self, phase: str | None) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)
        if phase is not None and self._windows.is_recording:
            self._annotation = torch.profiler.record_function(f"{ANNOTATION}{phase}")
            self._annotation.__enter__()

    def _advance(self) -> None:
        self._step_ended = False
        self._windows.advance()
        if self._schedule is None and self._windows.is_recording and self._windows.recorded_steps >= MOST_STEPS:
            self._windows.finish()
            self.notes.append(
                f"recording stopped after {MOST_STEPS} steps to keep the trace small; pass a schedule to choose which "
                "steps are recorded. Phases and modules were timed to the end."
            )

    # ------------------------------------------------------------------ answers

    @functools.cached_property
    def _trees(self) -> list[ProfileTree]:
        return [read_tree(recording.kineto_results) for recording in self._windows.recordings]

    def phases(self) -> dict[str, float]:
        """Return the share of each phase in the time of the steps, over all steps but the first. Empty without steps.

        What the scope itself needs at the borders of a recording is left out.
        """
        spent = {phase: each for phase, each in self._spent.items() if phase != "watching"}
        whole = sum(spent.values())
        return {phase: each / whole for phase, each in spent.items()} if whole > 0 else {}

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a step on average, while profiled; None below two steps."""
        count, seconds = self._timed
        return seconds / count * 1e3 if count else None

    def operators(self, *, by_shape: bool = False) -> list[Operator]:
        """Return the table of operators, the most expensive first."""
        return operator_table((call for tree in self._trees for call in tree.calls), by_shape=by_shape)

    def modules(self) -> list[ModuleTime]:
        """Return time per module, the most expensive first, over all steps of the scope."""
        return self._modules.table() if self._modules is not None else []

    def syncs(self) -> list[HostSync]:
        """Return the lines that make the host wait for the device, the most frequent first."""
        whole = ProfileTree()
        for tree in self._trees:
            whole.calls += tree.calls
            whole.waits += tree.waits
        return host_syncs(whole)

    def copies(self) -> list[Copies]:
        """Return copies to, from and on CUDA devices, the longest first."""
        return copy_table(copy for tree in self._trees for copy in tree.copies)

    def patterns(self) -> list[TorchPattern]:
        """Return what torch's own pattern matcher finds. It needs stacks."""
        return [pattern for recording in self._windows.recordings for pattern in torch_patterns(recording)]

    def utilisation(self) -> Utilisation | None:
        """Return FLOPs per second against a measured matrix product; None if torch counted none. Runs that product."""
        return utilisation(self._trees)

    def folded(self, path: str | os.PathLike[str] | None = None) -> list[str]:
        """Return folded stacks in microseconds, for flame graphs; also written to `path` if given."""
        lines = folded_lines(self._weights())
        if path is not None:
            write_text(Path(path), lines)
        return lines

    def speedscope(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return the stacks as a speedscope profile; also written to `path` if given."""
        content = speedscope(self._weights(), name="sonde profile")
        if path is not None:
            write_json(Path(path), content)
        return content

    def _weights(self) -> dict[tuple[str, ...], float]:
        weights = stack_weights(self._trees)
        return weights or module_weights(self.modules())

    def verdict(self) -> list[Verdict]:
        """Return what makes the step slow, worst first; empty for a healthy program."""
        step_ms = self.step_ms
        if step_ms is None:
            return []
        shares = self.phases()
        found = judge_phases(shares, step_ms=step_ms, workers=self._loaders.workers, optimizer=self._optimizer)
        found += judge_syncs(self.syncs(), steps=max(self._windows.recorded_steps, 1), step_ms=step_ms)
        found += judge_copies(self.copies(), steps=max(self._windows.recorded_steps, 1), step_ms=step_ms)
        # What torch's matcher says of a part that takes little time is right and not worth doing.
        found.sort(key=lambda each: -each.evidence.get("share", 0.0))
        return found + judge_patterns(self.patterns(), quiet=_SAID_BY_US)


profile_scope = ProfileScope  # as it reads in a `with` statement
