"""What one step hands to the worker: rows that are still on their way, and plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sonde.records import Event, Site
from sonde.schema import Bins, Rows
from sonde.signals import Arena, Kernel, LateNumbers, Shipment


@dataclass(slots=True, eq=False)
class Hold:
    """An arena in use: rows for the sites from `base` on."""

    kernel: Kernel
    arena: Arena
    base: int
    device: torch.device
    shipment: Shipment | None = None


@dataclass(slots=True, eq=False)
class Packet:
    """One step, as the training thread leaves it."""

    step: int
    holds: list[Hold] = field(default_factory=list)
    numbers: list[tuple[int, float]] = field(default_factory=list)
    late: list[LateNumbers] = field(default_factory=list)
    readings: list[tuple[int, Rows, Bins]] = field(default_factory=list)
    unscale: list[tuple[list[int], int]] = field(default_factory=list)
    skip_flags: list[int] = field(default_factory=list)
    new_sites: list[Site] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    time: float = 0.0
    epoch: int | None = None
    skipped: bool = False
    stepped: bool = False
    """The step has ended; what still comes in before the next pass begins was said about it."""

    def is_empty(self) -> bool:
        """Say whether there is nothing to send."""
        return not (self.holds or self.numbers or self.readings or self.events)
