"""Packets from the training thread to the worker: numbered sites, one packet per step, arenas from a bounded pool."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sonde.core.schema import Bins, Rows
from sonde.records import QUANTITIES, Event, Phase, Quantity, Site
from sonde.stats.protocol import Arena, Kernel, LateNumbers, Shipment

_Identity = tuple[str, Quantity, Phase, int, str]
_WITHOUT_HISTOGRAM: frozenset[Quantity] = frozenset({"scalar", "vital"})


class SiteBook:
    """Numbers sites in the order of their first use. Sites of a run that is continued keep their numbers."""

    def __init__(self, known: Iterable[Site] = ()) -> None:
        self._lock = threading.Lock()
        self._ids: dict[_Identity, int] = {}
        self._sites: list[Site] = []
        self.unsent: list[Site] = []
        """Those that were not taken yet."""
        self._histograms = bytearray()  # a flag per site
        for site in known:
            self._ids[site.name, site.quantity, site.phase, site.call, site.part] = site.id
            self._append(site)

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, site: int) -> Site:
        return self._sites[site]

    def number(self, name: str, quantity: Quantity, phase: Phase, call: int, part: str, **about: Any) -> int:
        """Return the id of a site, giving it the next number if it is new; `about` is what else a site may say."""
        identity = name, quantity, phase, call, part
        with self._lock:
            known = self._ids.get(identity)
            if known is not None:
                return known
            assert quantity in QUANTITIES
            number = self._ids[identity] = len(self._sites)
            site = Site(id=number, name=name, quantity=quantity, phase=phase, call=call, part=part, **about)
            self._append(site)
            self.unsent.append(site)
            return number

    def _append(self, site: Site) -> None:
        self._sites.append(site)
        self._histograms.append(site.quantity not in _WITHOUT_HISTOGRAM)

    def take_new(self) -> list[Site]:
        """Return the sites that are new since the last call."""
        with self._lock:
            new, self.unsent = self.unsent, []
            return new

    def has_histogram(self, site: int) -> bool:
        """Return whether readings of a site carry a histogram when histograms are on."""
        return bool(self._histograms[site])

    def are_kept(self, sites: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return which sites do not belong to training passes: evaluations and logged numbers."""
        chosen = (self._sites[site] for site in sites)
        return np.array([site.phase == "eval" or site.quantity == "scalar" for site in chosen], np.bool_)

    def have_histograms(self, sites: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return the same for many sites."""
        return np.frombuffer(bytes(self._histograms), dtype=np.bool_)[sites]


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
    arriving: list[tuple[int, Callable[[], float]]] = field(default_factory=list)
    """Numbers that are on their way from a device."""
    late: list[LateNumbers] = field(default_factory=list)
    readings: list[tuple[int, Rows, Bins]] = field(default_factory=list)
    unscale: list[tuple[list[int], int]] = field(default_factory=list)
    skip_flags: list[int] = field(default_factory=list)
    new_sites: list[Site] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    time: float = 0.0
    epoch: int | None = None
    level: int = 0
    """How much of the step is recorded; see `sonde.record.governor`."""
    skipped: bool = False
    stepped: bool = False
    """The step has ended; what still comes in before the next training pass begins is about it."""
    is_unused: bool = False
    """Nothing came of the training passes in it: only evaluations and logged numbers are kept."""

    def is_empty(self) -> bool:
        """Return whether there is nothing to send."""
        return not (self.holds or self.numbers or self.arriving or self.readings or self.events)

    def is_plain(self) -> bool:
        """Return whether it is a step that has ended and has nothing but numbers."""
        others = self.events or self.readings or self.arriving or self.late or self.unscale or self.skip_flags
        return self.stepped and not (others or self.skipped or self.is_unused)


@dataclass(slots=True, eq=False)
class PlainSteps:
    """Steps of which nothing but the same numbers is known: most steps where few are recorded, and steps are short.

    All that is known of a step is at the same place of the lists: objects for each step would keep Python's garbage
    collector busy.
    """

    sites: tuple[int, ...]
    epoch: int | None
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    """The numbers of the first step, one for each site, then those of the second, and so on."""
    level: int = 0

    def packets(self) -> list[Packet]:
        """Return them step by step."""
        width = len(self.sites)
        found = []
        for index, (step, time) in enumerate(zip(self.steps, self.times, strict=True)):
            numbers = list(zip(self.sites, self.values[index * width : (index + 1) * width], strict=True))
            found.append(Packet(step, numbers=numbers, time=time, epoch=self.epoch, stepped=True))
        return found


class ArenaPool:
    """Lends arenas up to a number of bytes; they circulate between the training thread and the worker.

    When all are in use, none is lent: nothing waits and nothing grows.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._free: dict[torch.device, deque[Arena]] = {}
        self._lock = threading.Lock()
        self._lent = 0
        self._bytes_per_row = 0.0

    def lend(self, device: torch.device, kernel: Kernel, capacity: int) -> Arena | None:
        """Return an empty arena with room for `capacity` rows at least, or None if the bytes are used up."""
        with self._lock:
            free = self._free.setdefault(device, deque())
            while free:
                arena = free.popleft()
                if arena.capacity >= capacity:
                    self._lent += 1
                    return arena
                self.used_bytes -= arena.nbytes  # too small since new sites were found: release it
            # The first two are always lent: one to fill while the other is emptied. With less, nothing is recorded.
            if self._lent >= 2 and self.used_bytes + int(self._bytes_per_row * capacity) > self.max_bytes:
                return None
            with torch.inference_mode(False):  # or it could be written to in such evaluations only
                arena = kernel.arena(capacity)
            self._bytes_per_row = arena.nbytes / arena.capacity
            self.used_bytes += arena.nbytes
            self._lent += 1
            return arena

    def give_back(self, device: torch.device, arena: Arena) -> None:
        """Take an arena back, emptied."""
        arena.reset()
        with self._lock:
            self._lent -= 1
            self._free.setdefault(device, deque()).append(arena)

    def clear(self) -> None:
        """Release all arenas that are not in use, and so their memory."""
        with self._lock:
            for arena in (arena for arenas in self._free.values() for arena in arenas):
                self.used_bytes -= arena.nbytes
            self._free.clear()

    @property
    def is_slack(self) -> bool:
        """Return whether at most a quarter of the bytes is in use."""
        with self._lock:
            free = sum(arena.nbytes for arenas in self._free.values() for arena in arenas)
            return self._lent <= 2 or (self.used_bytes - free) * 4 <= self.max_bytes
