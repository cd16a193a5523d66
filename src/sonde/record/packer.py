"""Collect the measurements of a step in the training thread, without waiting for anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.core import schema
from sonde.core.schema import Bins, Rows
from sonde.hooks.guard import is_capturing
from sonde.parallel.placements import WHOLE, Holding
from sonde.record.packets import ArenaPool, Hold, Packet, PlainSteps, SiteBook
from sonde.records import Event, Phase, Quantity, Site
from sonde.stats.adapt import PLAIN_TYPES
from sonde.stats.cuda.numbers import DeviceNumbers
from sonde.stats.outputs import Outputs
from sonde.stats.protocol import Kernel, LateNumbers, queue_of

# Room for sites that turn up in the middle of a step: the first evaluation, a branch not taken before.
SLACK_ROWS: Final = 64
MAX_STRIDE: Final = 1024
# How many steps with logged numbers only are sent together, and how long the first of them waits at most.
MOST_TOGETHER: Final = 1024
LONGEST_WAIT_S: Final = 0.25
# Numbers and events need no arena; this many may wait in one step before more of them are dropped.
MAX_LOOSE_ITEMS: Final = 100_000


class Packer:
    """The recorder that taps report to: it summarises tensors on their device and packs the step when it ends.

    Steps are numbered from 1; step 0 is the state before the first one. A packet stays open after its step has ended,
    for values logged about it (`session.log` after `optimizer.step()` or after an evaluation), until the next training
    pass begins.

    When the pool has no arena to lend, the step is not recorded: recording then turns to every 2nd, 4th, ... step until
    the worker has caught up. `dropped` counts the steps that were lost that way.
    """

    def __init__(
        self,
        book: SiteBook,
        pool: ArenaPool,
        kernel_for: Callable[[torch.device], Kernel],
        send: Callable[[list[Packet | PlainSteps]], bool],
        *,
        clock: Callable[[], float],
        histogram: bool,
        expected_sites: int,
        first_step: int = 0,
    ) -> None:
        self.dropped = 0
        self.stride = 1
        self.epoch: int | None = None
        self.level = -1
        """How much the step records, by which the cost of packets is kept; -1 for the state before the first step."""
        self.logged_losses: set[str] = set()
        """The names of losses that the program itself has logged in this step."""
        self.before_shipping: Callable[[], None] | None = None
        """Called before a step is sent off, when nothing more is logged about it."""
        self._book = book
        self._pool = pool
        self._kernel_for = kernel_for
        self._send = send
        self._clock = clock
        self._histogram = histogram
        self._expected_sites = expected_sites
        self._packet = Packet(first_step)
        # By where work is queued: if two streams shared an arena, one would have to wait for the other.
        self._holds: dict[Hashable, list[Hold]] = {}
        self._starved: set[torch.device] = set()
        self._unreported = 0
        self._ended = False
        # Sites that were asked about last, and the places of their rows, on the device and on the host.
        self._flagged: tuple[tuple[int, ...], Tensor, Tensor] | None = None
        self._opened: tuple[Outputs, Hold] | None = None
        """What writes outputs by itself, and where it does."""
        self._waiting: list[Packet | PlainSteps] = []
        self._num_waiting = 0
        """How many steps wait."""
        self._waiting_since = 0.0
        self._device_numbers: dict[torch.device, DeviceNumbers] = {}
        self._lock = threading.RLock()

    @property
    def step(self) -> int:
        """The step that is being recorded, or that has just ended."""
        return self._packet.step

    def site(
        self,
        name: str,
        quantity: Quantity,
        *,
        phase: Phase = "train",
        call: int = 0,
        part: str = "",
        kind: str = "",
        tensor: Tensor | None = None,
        aliases: tuple[str, ...] = (),
        same_as: int | None = None,
        held: Holding = WHOLE,
    ) -> int:
        """Return the id of a site, making it known at its first use."""
        shape = held.shape or (tuple(tensor.shape) if tensor is not None else ())
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
        return self._book.number(
            name,
            quantity,
            phase,
            call,
            part,
            kind=kind,
            shape=shape,
            dtype=dtype,
            aliases=aliases,
            same_as=same_as,
            placement=held.placement,
        )

    def see(self, site: int, tensor: Tensor) -> None:
        """Summarise one tensor now."""
        device = tensor.device
        with self._lock:
            chain = self._holds.get(queue_of(device))
            hold = chain[0] if chain else None
            if hold is None or site >= hold.arena.capacity:  # the first one's base is 0
                hold = self._hold(device, site)
            if hold is not None:
                hold.kernel.measure_one(tensor, site - hold.base, hold.arena, histogram=self.has_histogram(site))

    def has_histogram(self, site: int) -> bool:
        """Return whether the histogram of what is seen at a site is recorded."""
        return self._histogram and self._book.has_histogram(site)

    def open_outputs(self, outputs: Outputs, device: torch.device) -> None:
        """Let `outputs` write the rows of this step for a device, until they are shipped."""
        with self._lock:
            chain = self._holds.get(queue_of(device))
            if chain and self._opened != (outputs, chain[0]):
                chain[0].kernel.open_outputs(outputs, chain[0].arena, chain[0].base)
                self._opened = (outputs, chain[0])

    def see_many(self, tensors: Sequence[Tensor], sites: Sequence[int]) -> None:
        """Summarise many tensors of one device in one pass."""
        with self._lock:
            hold = self._hold(tensors[0].device, max(sites), min(sites))
            if hold is not None:
                hold.kernel.measure(tensors, _rows(sites, hold), hold.arena, histogram=self._histogram)
            elif tensors[0].device not in self._starved:
                for tensor, site in zip(tensors, sites, strict=True):
                    self.see(site, tensor)

    def see_changes(
        self, tensors: Sequence[Tensor], shadows: Sequence[Tensor], sites: Sequence[int], changes: Sequence[int]
    ) -> None:
        """Summarise many tensors of one device and how they differ from their shadows; refresh the shadows."""
        with self._lock:
            hold = self._hold(tensors[0].device, max(*sites, *changes), min(*sites, *changes))
            if hold is not None:
                rows, change_rows = _rows(sites, hold), _rows(changes, hold)
                hold.kernel.measure_change(tensors, shadows, rows, change_rows, hold.arena, histogram=self._histogram)
            elif tensors[0].device not in self._starved:
                # Rows in two arenas happen once, when new sites were found in mid-step: take them one by one.
                for index in range(len(tensors)):
                    self._see_change(tensors[index], shadows[index], sites[index], changes[index])

    def put(self, site: int, value: float) -> None:
        """Take one plain number."""
        with self._lock:
            if len(self._packet.numbers) < MAX_LOOSE_ITEMS:
                self._packet.numbers.append((site, value))

    def put_all(self, numbers: list[tuple[int, float]]) -> None:
        """Take plain numbers."""
        with self._lock:
            if len(self._packet.numbers) < MAX_LOOSE_ITEMS:
                self._packet.numbers += numbers

    def put_tensor(self, site: int, number: Tensor) -> None:
        """Take one number that is a tensor; if it lies on a CUDA device, it is brought here without waiting."""
        if number.is_cpu and not number.is_meta:
            try:
                self.put(site, float(number.detach()))  # there is no device to wait for
            except RuntimeError:
                return  # a fake tensor, or one inside a functorch transform, has no value
        elif number.is_cuda and type(number) in PLAIN_TYPES and not number.is_complex() and not is_capturing():
            with self._lock:
                if len(self._packet.arriving) < MAX_LOOSE_ITEMS:
                    numbers = self._device_numbers.get(number.device)
                    if numbers is None:
                        numbers = self._device_numbers[number.device] = DeviceNumbers(number.device)
                    self._packet.arriving.append((site, numbers.put(number)))
        else:
            self.see(site, number.detach())

    def put_late(self, numbers: LateNumbers) -> None:
        """Take plain numbers that are known only when this step's rows have arrived."""
        with self._lock:
            self._packet.late.append(numbers)

    def put_reading(self, site: int, row: Rows, bins: Bins) -> None:
        """Take a summary that was made elsewhere."""
        with self._lock:
            if len(self._packet.readings) < MAX_LOOSE_ITEMS:
                self._packet.readings.append((site, row, bins))

    def put_event(self, event_type: str, message: str, data: dict[str, Any]) -> None:
        """Take an event; its step is the present one."""
        with self._lock:
            if len(self._packet.events) < MAX_LOOSE_ITEMS:
                event = Event(
                    event_type=event_type, message=message, step=self.step, timestamp=self._clock(), data=data
                )
                self._packet.events.append(event)

    def unscale(self, sites: Sequence[int], scale: int) -> None:
        """Divide what was seen at `sites` in this step by the number seen at the site `scale`, once it has arrived."""
        with self._lock:
            self._packet.unscale.append((list(sites), scale))

    def mark_skipped_if(self, flag: int) -> None:
        """Mark this step as skipped if the number seen at the site `flag` turns out to be non-zero."""
        with self._lock:
            self._packet.skip_flags.append(flag)

    def nonfinite(self, quantity: Quantity) -> list[Site] | None:
        """Return the training sites of a quantity that are not finite in the present step.

        None if that is not known yet, because rows are on a device.
        """
        with self._lock:
            found: list[Site] = []
            for hold in (hold for chain in self._holds.values() for hold in chain):
                rows = getattr(hold.arena, "rows", None)
                if not isinstance(rows, np.ndarray):
                    return None
                bad = rows[:, schema.NAN : schema.NEG_INF + 1]
                if bad.any():
                    ids = (hold.base + int(row) for row in np.flatnonzero(bad.any(axis=1)))
                    found += [site for site in map(self._book.__getitem__, ids) if site.quantity == quantity]
            return [site for site in found if site.phase == "train"]

    def nonfinite_flag(self, sites: Sequence[int]) -> Tensor | None:
        """Return 1 if anything seen at `sites` in this step is not finite, else 0, as a number on their CUDA device.

        None if their rows are not together on one.
        """
        with self._lock:
            chains = [chain for chain in self._holds.values() if chain[0].device.type == "cuda"]
            holds = [chain[0] for chain in chains if self._holds.get(queue_of(chain[0].device)) is chain]
            if len(holds) != 1 or not sites:
                return None
            rows, base = getattr(holds[0].arena, "rows", None), holds[0].base
            if not isinstance(rows, Tensor) or min(sites) < base or max(sites) >= base + len(rows):
                return None
            if self._flagged is None or self._flagged[0] != (base, *sites):
                # From pinned memory, since a copy from any other would wait for the device; only when sites change.
                places = torch.tensor([site - base for site in sites]).pin_memory()
                self._flagged = ((base, *sites), places.to(rows.device, non_blocking=True), places)
            with torch.no_grad():
                chosen = rows.index_select(0, self._flagged[1])
                return chosen[:, schema.NAN : schema.NEG_INF + 1].any().to(torch.float32)

    def begin(self) -> None:
        """Open the next step if the last one has ended. Called whenever a training pass or an optimizer step begins."""
        if self._packet.stepped and not is_capturing():
            with self._lock:
                if self._packet.stepped:
                    self._ship(self._packet.step + 1)

    def end_step(self, *, skipped: bool = False) -> None:
        """Mark the present step as ended."""
        with self._lock:
            self._ended = True
            self._packet.stepped = True
            self._packet.skipped = skipped
            self._packet.time = self._clock()

    @property
    def has_ended(self) -> bool:
        """Whether the present step has ended and the next has not begun."""
        return self._packet.stepped

    @property
    def has_readings(self) -> bool:
        """Whether anything has been recorded of the present step, which has not ended."""
        return not self._packet.stepped and bool(self._packet.numbers or self._packet.readings or self._holds)

    def renumber(self, step: int) -> None:
        """Give the present step a later number, as the program itself counts."""
        with self._lock:
            if step > self._packet.step:
                self._packet.events = [replace(event, step=step) for event in self._packet.events]
                self._packet.step = step

    def reopen(self) -> None:
        """Continue the step that ended last; if a pass has begun since, what it has recorded belongs to that step."""
        with self._lock:
            if not self._packet.stepped and self._ended:
                self._packet.step -= 1
            self._packet.stepped = False

    def ship(self) -> None:
        """Send the present step, ended or not; readers merge later values of the same step with it."""
        with self._lock:
            self._ship(self._packet.step, reopened=self._packet.stepped)
            self._send_all()

    def forget_passes(self) -> None:
        """Drop what the training passes of the present step have recorded so far: nothing came of them."""
        with self._lock:
            if not self._packet.stepped:
                self._packet.is_unused = True
                self._ship(self._packet.step)
                self._packet.is_unused = False  # if there was nothing to send

    def ship_rest(self) -> None:
        """Send values that arrived after the last step ended (a last evaluation) as a part of that step."""
        with self._lock:
            self._flagged = None
            if self._ended and not self._packet.stepped:
                self._packet.step -= 1
            self._ship(self._packet.step)
            if self._unreported:
                self._packet.events.append(self._dropped_event(self._packet.step))
                self._ship(self._packet.step)
            self._send_all()

    def _ship(self, next_step: int, *, reopened: bool = False) -> None:
        if self.before_shipping is not None and self._packet.stepped:
            self.before_shipping()
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None
        packet = self._packet
        if not (packet.numbers or self._holds or packet.late or self._starved or reopened) and packet.is_empty():
            packet.step, packet.stepped, packet.skipped = next_step, False, False
            return
        # Whether steps have been lost, or are recorded less often because of that.
        is_behind = self._starved or self._unreported or self.stride > 1
        if not (self._holds or reopened or is_behind) and packet.is_plain() and not self._book.unsent:
            self._keep_plain(packet)
            packet.step, packet.stepped = next_step, False
            packet.numbers.clear()
            return
        self._packet = Packet(next_step, stepped=reopened, time=packet.time)
        holds, self._holds = self._holds, {}
        packet.holds = [hold for chain in holds.values() for hold in chain]
        try:
            for hold in packet.holds:
                hold.shipment = hold.kernel.ship(hold.arena)
        finally:
            # A device that failed ships nothing; values logged about its last step still get through.
            packet.holds = [hold for hold in packet.holds if hold.shipment is not None]
            self._dispatch(packet)

    def _dispatch(self, packet: Packet) -> None:
        self._account(packet)
        if packet.is_empty():
            return
        packet.new_sites = self._book.take_new()
        packet.epoch = self.epoch
        packet.level = self.level
        packet.time = packet.time or self._clock()
        self._waiting.append(packet)
        # Each send wakes the worker, which takes Python's lock: steps with logged numbers only go together.
        has_waited = self._have_waited(packet.time)
        if packet.holds or packet.events or packet.new_sites or not packet.stepped or has_waited:
            self._send_all()

    def _keep_plain(self, packet: Packet) -> None:
        """Let a step wait that has nothing but numbers."""
        sites, values = zip(*packet.numbers, strict=True) if packet.numbers else ((), ())
        last = self._waiting[-1] if self._waiting else None
        if not isinstance(last, PlainSteps) or last.sites != sites or last.epoch != self.epoch:
            last = PlainSteps(sites, self.epoch)
            self._waiting.append(last)
        last.steps.append(packet.step)
        last.times.append(packet.time)
        last.values += values
        if self._have_waited(packet.time):
            self._send_all()

    def _have_waited(self, now: float) -> bool:
        """Count a step that waits; return whether all are to be sent."""
        if not self._num_waiting:
            self._waiting_since = now
        self._num_waiting += 1
        return self._num_waiting >= MOST_TOGETHER or not 0 <= now - self._waiting_since < LONGEST_WAIT_S

    def _send_all(self) -> None:
        packets, self._waiting, self._num_waiting = self._waiting, [], 0
        try:
            for numbers in self._device_numbers.values() if packets else ():
                numbers.seal()
        finally:  # a device that failed keeps its numbers; events, such as the error that it raised, still get through
            if packets and not self._send(packets):
                for packet in packets:
                    self._take_back(packet)

    def _account(self, packet: Packet) -> None:
        """Count what was lost, thin out while the worker lags, and recover when it has caught up."""
        if self._starved:
            self._starved.clear()
            self.dropped += 1
            self._unreported += 1
            self.stride = min(self.stride * 2, MAX_STRIDE)
        elif self.stride > 1 and packet.stepped and self._pool.is_slack:
            self.stride //= 2
        if self._unreported and packet.holds:
            packet.events.append(self._dropped_event(packet.step))

    def _dropped_event(self, step: int) -> Event:
        message = f"{self._unreported} step(s) up to step {step} were not recorded: the writer lagged behind"
        data = {"steps": self._unreported, "total": self.dropped, "stride": self.stride}
        self._unreported = 0
        return Event(event_type="steps_dropped", message=message, step=step, timestamp=self._clock(), data=data)

    def _take_back(self, packet: Packet | PlainSteps) -> None:
        lost = len(packet.steps) if isinstance(packet, PlainSteps) else 1
        self.dropped += lost
        self._unreported += lost
        for hold in packet.holds if isinstance(packet, Packet) else ():
            self._pool.give_back(hold.device, hold.arena)

    def _see_change(self, tensor: Tensor, shadow: Tensor, site: int, change: int) -> None:
        self.see(site, tensor)
        with torch.no_grad():
            self.see(change, tensor.detach() - shadow)
            shadow.copy_(tensor)

    def _hold(self, device: torch.device, site: int, lowest: int | None = None) -> Hold | None:
        """Return the hold with room for the sites from `lowest` to `site`, or None if there is none."""
        lowest = site if lowest is None else lowest
        queue = queue_of(device)
        chain = self._holds.get(queue)
        if chain is None:
            if device in self._starved or device.type == "meta":
                return None
            chain = self._holds[queue] = []
        for hold in chain:
            if hold.base <= lowest and site < hold.base + hold.arena.capacity:
                return hold
        top = chain[-1].base + chain[-1].arena.capacity if chain else 0
        if top > lowest:
            return None
        return self._lend(device, chain, top, site)

    def _lend(self, device: torch.device, chain: list[Hold], base: int, site: int) -> Hold | None:
        wanted = max(self._expected_sites, len(self._book), site + 1) - base
        kernel = self._kernel_for(device)
        # An arena made while a graph is captured would lie in the graph's own memory.
        capturing = is_capturing()
        arena = None if capturing else self._pool.lend(device, kernel, wanted + SLACK_ROWS)
        if arena is None:
            if not capturing:
                self._starved.add(device)
            if not chain:
                del self._holds[queue_of(device)]
            return None
        hold = Hold(kernel, arena, base, device)
        chain.append(hold)
        return hold


def _rows(sites: Sequence[int], hold: Hold) -> Sequence[int]:
    return sites if not hold.base else [site - hold.base for site in sites]
