"""The memory scope: how memory changes from step to step and from phase to phase, whether it leaks, what holds it."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

from sonde.core.arguments import whole_number
from sonde.core.robust import WARM_UP_SHARE, Growth
from sonde.errors import OptionError
from sonde.hooks.guard import Guard, Handle, remove_all, warn_of_fault
from sonde.hooks.on_step import on_step
from sonde.probes.memory.device import (
    ALLOCATED,
    ALLOCATED_PEAK,
    RESERVED,
    RESERVED_PEAK,
    MemoryHistory,
    allocator_numbers,
)
from sonde.probes.memory.kept import KeptMemory, KeptWatch
from sonde.probes.memory.leaks import Leak, TensorWatch, find_leak, judge
from sonde.probes.memory.process import available_bytes, resident_bytes, total_bytes
from sonde.probes.profile.phases import LoopPhases, StepPhase
from sonde.probes.profile.scope import Timeline

# --------------------------------------------------------------------------------
# Memory at one moment, as plain numbers, and what changed between two moments.


_BY_NAME: Final = {
    "cuda_allocated": ALLOCATED,
    "cuda_reserved": RESERVED,
    "cuda_max_allocated": ALLOCATED_PEAK,
    "cuda_max_reserved": RESERVED_PEAK,
}


def memory_snapshot(*, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Return what the process, the machine and the current CUDA device hold now, in bytes.

    Keys: `timestamp`, `rss`, `cpu_memory_percent`, `cpu_memory_available`, `cpu_memory_used` and, once CUDA is in use,
    `cuda_allocated`, `cuda_reserved`, `cuda_max_allocated`, `cuda_max_reserved`, `cuda_device_count`,
    `cuda_current_device`. What the system does not report is absent.

    >>> memory_snapshot()["cpu_memory_percent"] <= 100
    True
    """
    resident = resident_bytes()
    found: dict[str, Any] = {"timestamp": clock()} | ({} if resident is None else {"rss": resident})
    return found | _machine() | _device()


def compare_snapshots(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much each number of two snapshots changed; what only one of them has is left out."""
    same_device = before.get("cuda_current_device") == after.get("cuda_current_device")
    return {
        name: after[name] - value
        for name, value in before.items()
        if name in after and isinstance(value, int | float) and (same_device or not name.startswith("cuda_"))
    }


def used_devices() -> list[int]:
    """Return the CUDA devices on which torch holds memory, according to its allocator."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch
        return []
    devices = range(torch.cuda.device_count())
    return [index for index in devices if allocator_numbers(index, [RESERVED]).get(RESERVED)]


def _machine() -> dict[str, Any]:
    total, available = total_bytes(), available_bytes()
    if not total or available is None:
        return {}
    used = max(total - available, 0)
    return {
        "cpu_memory_percent": round(100 * used / total, 1),
        "cpu_memory_available": available,
        "cpu_memory_used": used,
    }


def _device() -> dict[str, Any]:
    # Asking for more would start CUDA in a process that only uses the CPU.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch
        return {}
    current = torch.cuda.current_device()
    numbers = allocator_numbers(current, _BY_NAME.values())
    found = {name: numbers[place] for name, place in _BY_NAME.items() if place in numbers}
    return found | {"cuda_device_count": torch.cuda.device_count(), "cuda_current_device": current}


# --------------------------------------------------------------------------------


logger = logging.getLogger("sonde")

# The first step at which leaks are searched for; then at half as many again, and so on.
_FIRST_LOOK: Final = 24
_EARLY_LOOKS: Final = 6
"""Before that, memory is compared every this many steps, so that a leak in few steps is found as well."""
_NEXT_LOOK: Final = 1.5
# Growth from one look to the next for which tensors are counted, whatever share of the time that takes.
_SUSPICIOUS_BYTES: Final = 1 << 20
# A device may come into use later.
_DEVICES_EVERY: Final = 16
_MOST_SAMPLES: Final = 2000
"""Beyond this many, every other sample is dropped and sampling slows down."""


class MemoryScope:
    """A context that watches the memory of the process and of CUDA devices. Entering it collects garbage once.

    Its methods answer inside the context and after it.

    Args:
        every: Sample at every n-th step.
        session: The session to note what was found in.
        history: A file for the CUDA allocator's history, written if memory runs out inside the scope, or on demand by
            `dump_history`. Without CUDA it has no effect.
        max_share: The share of the time that counting living tensors may take while memory does not grow. Each count
            walks all Python objects, which takes some ten milliseconds; entering the scope takes the first.
        clock: Where the time stamps of snapshots come from.
        resident: Returns the bytes this process holds.
        own_bytes: Returns the bytes that a recorder of this process holds, which are not the program's.

    """

    def __init__(
        self,
        *,
        every: int = 1,
        session: Timeline | None = None,
        history: str | os.PathLike[str] | None = None,
        max_share: float = 0.01,
        clock: Callable[[], float] = time.time,
        resident: Callable[[], int | None] = resident_bytes,
        own_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self.steps = 0
        self._every = whole_number("every", every)
        self._session = session
        self._history = MemoryHistory(Path(history)) if history is not None and torch.cuda.is_available() else None
        self._clock = clock
        self._resident = resident
        self._guard = Guard("isolate", warn_of_fault)
        self._phases = LoopPhases(None, clock=time.perf_counter, guard=self._guard, on_change=self._change_phase)
        self._devices: list[int] = []
        self._held: dict[str, int] = {}
        self._first_held: dict[str, int] = {}
        self._by_phase: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._samples: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._tensors = TensorWatch(time.perf_counter, max_share=max_share)
        self._leaks: list[Leak] | None = None
        self._found: dict[str, Leak] = {}
        self._next_look = _EARLY_LOOKS
        self._held_at_look: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._own_bytes = own_bytes
        self._kept_watch: KeptWatch | None = None
        self._kept: list[KeptMemory] = []
        self._marks: list[tuple[int, dict[str, dict[str, int]]]] = []
        self._by_hand = False
        self._handles: list[Handle] = []

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> Self:
        if self.before:
            raise OptionError("this memory scope was used already; make another with memory_scope(...).")
        gc.collect()  # what is garbage already would look like memory given back
        self.before = memory_snapshot(clock=self._clock)
        if self._history is not None:
            self._history.start()
        self._devices = used_devices()
        self._tensors.weigh()
        self._held = self._first_held = self._read()
        self._guard.wrap("looking for memory that is kept", self._watch_kept)()
        self._look()
        self._phases.attach()
        wrap = self._guard.wrap
        self._handles = on_step(
            wrap("memory tracking", self._before_optimizer), wrap("memory tracking", self._after_optimizer)
        )
        return self

    @property
    def own_seconds(self) -> float:
        """How long the scope itself has worked inside the steps."""
        return self._guard.meter.total()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases.remove()
        remove_all(self._handles)
        if self._history is not None:
            self._history.stop(error)
        self.after = memory_snapshot(clock=self._clock)
        if error is None:
            self._guard.wrap("memory tracking", self._conclude)()
        if self._leaks is None:
            self._leaks = list(self._found.values())

    def _conclude(self) -> None:
        # Now, since the variables that hold things are still there.
        self._held = self._read()
        if self.steps:
            self._look()
        self._leaks = self.leaks()
        self._kept = self._find_kept()
        if self._kept:
            gc.collect()  # only what is left after this is kept
            self._kept = self._find_kept()
        self._note()

    def _watch_kept(self) -> None:
        self._kept_watch = KeptWatch(self._held, self._own_bytes)

    def _find_kept(self) -> list[KeptMemory]:
        leaking = {leak.place for leak in self._leaks or ()}
        found = [] if self._kept_watch is None else self._kept_watch.find(self._read())
        return [each for each in found if each.place not in leaking]

    def step(self) -> None:
        """End a step by hand, for loops without a torch optimizer; from then on optimizer steps are not counted."""
        self._by_hand = True
        self._end_step()

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        if self._kept_watch is not None:
            self._kept_watch.see(optimizer)
        self._phases.begin("optimizer")

    def _after_optimizer(self, *_: Any) -> None:
        self._phases.end("optimizer")
        if not self._by_hand:
            self._end_step()

    # ------------------------------------------------------------------ samples

    def _read(self) -> dict[str, int]:
        """Return bytes held now, by place: `process` and the CUDA devices in use. Does not wait for a device."""
        found = {}
        resident = self._resident()
        if resident is not None:
            found["process"] = resident
        for index in self._devices:
            numbers = allocator_numbers(index, [ALLOCATED])
            found |= {f"cuda:{index}": held for held in numbers.values()}
        for place, value in found.items():
            self._peaks[place] = max(value, self._peaks.get(place, 0))
        return found

    def _change_phase(self, going: StepPhase, coming: StepPhase) -> None:
        now = self._read()
        for place, value in now.items():
            self._by_phase[going][place] += value - self._held.get(place, value)
        self._held = now

    def _end_step(self) -> None:
        self._phases.end_step()
        self.steps += 1
        if self.steps % _DEVICES_EVERY == 1:
            self._devices = used_devices()
        if self.steps % self._every == 0:
            self._sample()
        self._tensors.see(self.steps)
        if self.steps >= self._next_look:
            # Search while the functions that hold the memory still run, less and less often.
            early = self.steps < _FIRST_LOOK
            self._next_look = self.steps + _EARLY_LOOKS if early else int(self.steps * _NEXT_LOOK)
            self._look()
            self._marks.append((self.steps, self.phases()))
            self.leaks()

    def _look(self) -> None:
        """Count tensors if memory has grown since the last look: a healthy program is not held up by it."""
        heap = self._tensors.read_heap(self.steps)
        before, now = self._held_at_look, self._held | ({} if heap is None else {"heap": heap})
        self._held_at_look = now
        grown = [now[place] - held for place, held in before.items() if place in now]
        self._tensors.suspected = max(grown, default=0) >= _SUSPICIOUS_BYTES
        if self._tensors.suspected:
            self._tensors.count(self.steps)

    def _sample(self) -> None:
        for place, value in self._held.items():
            self._samples[place].append((self.steps, value))
        if max(map(len, self._samples.values()), default=0) >= _MOST_SAMPLES:
            self._every *= 2
            for place, series in self._samples.items():
                self._samples[place] = [sample for sample in series if sample[0] % self._every == 0]

    # ------------------------------------------------------------------ answers

    def snapshot(self) -> dict[str, Any]:
        """Return the current memory; see `memory_snapshot`."""
        return memory_snapshot(clock=self._clock)

    def change(self) -> dict[str, float]:
        """Return what changed from the beginning to the end of the scope, or to now while inside it."""
        return compare_snapshots(self.before, self.after or self.snapshot())

    def phases(self) -> dict[str, dict[str, int]]:
        """Return by how many bytes memory grew in each phase, over all steps, by place: `process`, `cuda:0`."""
        return {phase: dict(places) for phase, places in self._by_phase.items()}

    def growth(self) -> dict[str, Growth]:
        """Return how memory moves per step, by place."""
        return {place: judge(series) for place, series in self._samples.items()}

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return by place (`process`, `cuda:0`) the bytes held now or at the end, their peak and their growth.

        `peak_bytes` is the largest value at the borders of steps and phases. `growth_bytes_per_step` is absent where
        there were too few steps to tell.
        """
        now = self._held if self.after else self._read()
        growth = self.growth()
        found: dict[str, dict[str, float]] = {}
        for place, held in now.items():
            first = self._first_held.get(place, 0)
            found[place] = {"bytes": held, "peak_bytes": self._peaks[place], "growth_bytes": held - first}
            if place in growth and math.isfinite(growth[place].per_step):
                found[place]["growth_bytes_per_step"] = growth[place].per_step
        return found

    def kept(self) -> list[KeptMemory]:
        """Return the places that hold excessive memory after the scope, unless `leaks` has them; empty inside it."""
        return list(self._kept)

    def leaks(self) -> list[Leak]:
        """Return what leaks, by place; empty for a healthy program. After the scope, what was found when it ended."""
        if self._leaks is not None:
            return self._leaks
        phases, steps = self._late_phases(), self.steps
        for place, samples in sorted(self._samples.items()):
            leak = find_leak(place, list(samples), self._tensors, phases, steps)
            if leak is None:
                self._found.pop(place, None)
            else:
                self._found[place] = leak.explained_by(self._found.get(place))
        return list(self._found.values())

    def _late_phases(self) -> dict[str, dict[str, int]]:
        """Return what each phase grew by since warming up."""
        early = next((phases for step, phases in self._marks if step >= WARM_UP_SHARE * self.steps), {})
        return {
            phase: {place: grown - early.get(phase, {}).get(place, 0) for place, grown in places.items()}
            for phase, places in self._by_phase.items()
        }

    def _note(self) -> None:
        if self._session is not None:
            for leak in self._leaks or ():
                data = {"place": leak.place, "bytes_per_step": leak.growth.per_step, "phase": leak.phase}
                self._session.event("leak", leak.text, data | {"lines": [str(line) for line in leak.lines]})

    def dump_history(self, path: str | os.PathLike[str]) -> Path:
        """Write the CUDA allocator's history so far, for pytorch.org/memory_viz."""
        if self._history is None:
            raise OptionError("no history is recorded; open the scope with history='memory.pickle' on a CUDA machine.")
        return self._history.dump(Path(path))


memory_scope = MemoryScope  # as it reads in a `with` statement
