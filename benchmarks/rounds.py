"""Interleaved timing: every variant runs a few steps in each round, and ratios are taken inside a round."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import watchers
from programs import Program
from watchers import Watcher, clear, folder_bytes


@dataclass
class Timing:
    """Milliseconds of every round, wall and CPU of the whole process, and bytes written per step."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    inside_ms: list[float] = field(default_factory=list)
    bytes_per_step: float = 0.0


def interleave(
    make: Callable[[], Program],
    variants: dict[str, Watcher],
    *,
    rounds: int,
    steps: int | dict[str, int],
    warm_up: int | dict[str, int] = 2,
) -> dict[str, Timing]:
    """Time every variant on the same program. A step's time is the mean of its steps within a round.

    `warm_up` steps of each round are not counted; dictionaries give variants numbers of their own.
    """
    counts = steps if isinstance(steps, dict) else dict.fromkeys(variants, steps)
    warm_ups = warm_up if isinstance(warm_up, dict) else dict.fromkeys(variants, warm_up)
    program = make()
    timings = {name: Timing() for name in variants}
    with tempfile.TemporaryDirectory(prefix="sonde-bench-") as scratch:
        for round_number in range(rounds):
            for name, watcher in variants.items():
                folder = Path(scratch) / f"{round_number}-{abs(hash(name))}"
                _one(program, watcher, folder, timings[name], counts[name], warm_ups.get(name, 2))
                clear(folder)
    return timings


def _one(program: Program, watcher: Watcher, folder: Path, timing: Timing, steps: int, warm_up: int) -> None:
    wall, cpu, inside = [], [], []
    with watcher(program, folder) as after:
        for index in range(warm_up + steps):
            begin, begin_cpu, before = time.perf_counter(), time.process_time(), watchers.inside
            after(program.step())
            if index >= warm_up:
                wall.append((time.perf_counter() - begin) * 1e3)
                cpu.append((time.process_time() - begin_cpu) * 1e3)
                inside.append((watchers.inside - before) * 1e3)
    # Means, not medians, within a round: a watcher that samples one step in ten must pay for that step.
    timing.wall_ms.append(statistics.fmean(wall))
    timing.cpu_ms.append(statistics.fmean(cpu))
    timing.inside_ms.append(statistics.fmean(inside))
    if folder.exists():
        timing.bytes_per_step = folder_bytes(folder) / (warm_up + steps)


def inside_ratio(timing: Timing, base: Timing) -> float | None:
    """Return 1 plus the time inside Sonde's hooks over the bare step, or None for what is not Sonde."""
    share = statistics.median(timing.inside_ms) / statistics.median(base.wall_ms)
    return 1 + share if share else None


def ratio(timing: Timing, base: Timing, *, cpu: bool = False) -> tuple[float, float, float]:
    """Return the median ratio to the base, and the first and third quartile."""
    ours, theirs = (timing.cpu_ms, base.cpu_ms) if cpu else (timing.wall_ms, base.wall_ms)
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    if len(ratios) < 4:
        return statistics.median(ratios), ratios[0], ratios[-1]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high
