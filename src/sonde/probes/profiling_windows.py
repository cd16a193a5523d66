"""Turns torch's profiler on and off along a schedule. Every recorded window is a profiler of its own, kept whole."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity

from sonde.probes.profiling_schedule import ProfileSchedule

State = Literal["waiting", "warming up", "recording"]


class Windows:
    """Runs the profiler in the windows of a schedule; without one, from beginning to end."""

    def __init__(self, schedule: ProfileSchedule | None, options: dict[str, Any]) -> None:
        self.recordings: list[Any] = []
        """Torch's finished recordings, one per window."""
        self.recorded_steps = 0
        self._schedule = schedule
        self._options = options
        self._step = 0
        self._is_over = False
        self._profiler: torch.profiler.profile | None = None
        self._state: State = "waiting"

    @property
    def is_recording(self) -> bool:
        """Whether the profiler records now."""
        return self._state == "recording"

    def begin(self) -> None:
        """Turn to what the first step is to be."""
        self._turn(self._planned())

    def advance(self) -> None:
        """Turn to what the next step is to be."""
        self.count_step()
        planned = self._planned()
        # A window that directly follows another is one of its own.
        if self.is_recording and planned == "recording" and self._at_window_start():
            self._turn("waiting")
        self._turn(planned)

    def count_step(self) -> None:
        """Say that a step has ended."""
        self._step += 1
        self.recorded_steps += self.is_recording

    def finish(self) -> None:
        """Stop, in whatever state it is, and do not begin again."""
        self._is_over = True
        self._turn("waiting")

    def _at_window_start(self) -> bool:
        plan = self._schedule
        return plan is not None and self._step % plan.cycle == 0

    def _planned(self) -> State:
        plan = self._schedule
        if self._is_over:
            return "waiting"
        if plan is None:
            return "recording"
        if self._step >= plan.steps:
            return "waiting"
        within = self._step % plan.cycle
        return "waiting" if within < plan.wait else "warming up" if within < plan.wait + plan.warmup else "recording"

    def _turn(self, state: State) -> None:
        before, self._state = self._state, state
        if before == state:
            return
        if before == "recording" or state == "waiting":
            self._stop(before)
        if state != "waiting" and self._profiler is None:
            self._profiler = self._make()
            with warnings.catch_warnings():
                # Some versions of torch warn of what we do on purpose: every window is a profiler of its own.
                warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
                self._profiler.prepare_trace()
        if state == "recording" and self._profiler is not None:
            self._profiler.start_trace()

    def _stop(self, before: State) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if before == "warming up":
            profiler.start_trace()  # torch can stop only what was started
        profiler.stop_trace()
        if before == "recording":
            self.recordings.append(profiler.profiler)

    def _make(self) -> torch.profiler.profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=activities, **self._options)
