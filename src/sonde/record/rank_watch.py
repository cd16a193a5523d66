"""Connect a rank's heartbeat to its recording: phases, steps, gradients and collectives. Only for several ranks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sonde.core.outcome import Outcome
from sonde.hooks.guard import Guard
from sonde.probes.memory.device import ALLOCATED, allocator_numbers
from sonde.probes.memory.process import resident_bytes
from sonde.record.heart import About, Heart
from sonde.record.rank_progress import Progress
from sonde.records import Finding

Look = Callable[[bool], None]
"""Judges all ranks; takes whether this is the last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Which rank this process is, and how it looks after the others."""

    rank: int
    world: int
    stuck_after: float | None = None
    interval: float | None = None
    monitor: Callable[[Callable[[Finding], None]], Look] | None = None


class RankWatch:
    """What a rank of several runs beside its recording. It adds no collective, and waits for no other rank."""

    def __init__(
        self, options: RankOptions, folder: Path, step: Callable[[], int], publish: Callable[[Finding], None]
    ) -> None:
        self.progress = Progress(step)
        self._options = options
        self._folder = folder
        self._look = None if options.monitor is None else options.monitor(publish)
        self._heart: Heart | None = None

    def attach(self, guard: Guard, parameters: list[Tensor], modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Start listening, and start the heartbeat."""
        self.progress.attach(guard, parameters)
        device = next((each.device for each in parameters if each.device.type != "meta"), torch.device("cpu"))
        names = {id(module): (weakref.ref(module), name) for name, module in modules}
        about = About(
            rank=self._options.rank,
            world=self._options.world,
            folder=self._folder,
            device=str(device),
            stuck_after=self._options.stuck_after,
            memory=resident_bytes,
            device_memory=functools.partial(_allocated, device),
            module_names=functools.partial(_name_of, names),
        )
        self._heart = Heart(about, self.progress, self._look, interval=self._options.interval)
        self._heart.start()

    def remove(self) -> None:
        """Stop listening; the heartbeat goes on until `close`."""
        self.progress.remove()

    def close(self, state: Outcome) -> None:
        """Report how the training ended, and stop."""
        if self._heart is not None:
            self._heart.close(state)
        self._heart = None


def _allocated(device: torch.device) -> int | None:
    return allocator_numbers(device, [ALLOCATED]).get(ALLOCATED) if device.type == "cuda" else None


def _name_of(names: dict[int, tuple[weakref.ref[nn.Module], str]], module: Any) -> str:
    known = names.get(id(module))
    return known[1] if known is not None and known[0]() is module else ""
