"""Run torch's profiler in bounded windows of steps, and note which DataLoaders are used meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import torch
from torch.profiler import ProfilerActivity
from torch.utils.data import dataloader

from sonde.core.arguments import whole_number
from sonde.errors import OptionError
from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.replace_function import LOADING

# --------------------------------------------------------------------------------
# Which steps a profile holds, so that its size stays bounded however long the run is.


# Without a schedule a profile stops by itself after this many steps: every step may add tens of megabytes.
MOST_STEPS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSchedule:
    """Wait some steps, warm the profiler up, record, and do it all again `repeat` times."""

    wait: int = 1
    warmup: int = 1
    active: int = 3
    repeat: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 1 if each.name in ("active", "repeat") else 0
            object.__setattr__(self, each.name, whole_number(f"schedule: {each.name}", value, least=least))

    @property
    def cycle(self) -> int:
        """How many steps one repeat takes."""
        return self.wait + self.warmup + self.active

    @property
    def steps(self) -> int:
        """How many steps it needs in all."""
        return self.cycle * self.repeat


def profile_schedule(given: ProfileSchedule | Mapping[str, int] | None) -> ProfileSchedule | None:
    """Read a schedule as users write it.

    >>> profile_schedule({"wait": 2, "active": 5}).steps
    8
    """
    if given is None or isinstance(given, ProfileSchedule):
        return given
    known = {each.name for each in fields(ProfileSchedule)}
    if set(given) - known:
        raise OptionError(
            f"schedule={given!r}: give a ProfileSchedule, or a dict with any of {', '.join(sorted(known))}."
        )
    return ProfileSchedule(**given)


# --------------------------------------------------------------------------------
# Turns torch's profiler on and off along a schedule. Every recorded window is a profiler of its own, kept whole.


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
        """Switch to the state of the first step."""
        self._turn(self._planned())

    def advance(self) -> None:
        """Switch to the state of the next step."""
        self.count_step()
        planned = self._planned()
        # A window that directly follows another is one of its own.
        if self.is_recording and planned == "recording" and self._at_window_start():
            self._turn("waiting")
        self._turn(planned)

    def count_step(self) -> None:
        """Count a step that has ended."""
        self._step += 1
        self.recorded_steps += self.is_recording

    def finish(self) -> None:
        """Stop for good, from any state."""
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


# --------------------------------------------------------------------------------
# Which DataLoaders are iterated inside a scope, and with how many workers.


class LoaderWatch:
    """Remembers the smallest number of workers of any DataLoader that an iteration was begun or continued on."""

    def __init__(self, guard: Guard) -> None:
        self.workers: int | None = None
        self._see = guard.wrap("data loaders", self._note_workers)
        self._handles: list[Handle] = []

    def attach(self) -> None:
        """Begin to listen."""
        self._handles.append(LOADING.listen(before=self._see))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def _note_workers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        iterator = args[0] if args else None
        if isinstance(iterator, dataloader._BaseDataLoaderIter):
            workers = int(iterator._num_workers)
            self.workers = workers if self.workers is None else min(self.workers, workers)
