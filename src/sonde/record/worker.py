"""The worker thread: takes packets, waits for their data, turns them into blocks and passes those to the sinks."""

from __future__ import annotations

import functools
import logging
import math
import queue
import statistics
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

from sonde.core.outcome import what_to_log
from sonde.hooks.guard import attempt
from sonde.record.blocks import continue_block, to_block, to_numbers
from sonde.record.packets import ArenaPool, Packet, PlainSteps, SiteBook
from sonde.records import Block, Event, Finding, Numbers, NumberSink, Sink, Site

logger = logging.getLogger("sonde")

# Packets without an arena (only numbers or events) are not bounded by the pool, so their number is.
MAX_WAITING: Final = 2048
_STORE: Final = "writing the run"
_Job = list[Packet | PlainSteps] | Callable[[], None] | None

_COSTS: Final = 64  # packets of a level whose cost is averaged


class Worker:
    """Owns the thread and the sinks.

    A sink that raises is reported once, with its traceback in the run, and is then left out. The store is the
    exception: it is asked again with every block, since a full disk may be emptied.
    """

    def __init__(
        self, store: Sink, pool: ArenaPool, book: SiteBook, *, histogram: bool, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._clock = clock
        self._subscribers: list[Sink] = []
        self._pool = pool
        self._book = book
        self._histogram = histogram
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        # A run that is resumed has sites already; subscribers must get those too.
        self._sites: list[Site] = [book[number] for number in range(len(book))]
        self._last: Block | None = None
        self._reported: set[str] = set()
        self._dropped = 0
        self._costs: dict[int, deque[tuple[int, int, float]]] = defaultdict(functools.partial(deque, maxlen=_COSTS))
        """By level: the first and the last step of what was sent together, and the processor time that it took."""
        self.judging_seconds: Callable[[], float] = lambda: 0.0
        """Returns what judging has taken in this thread, which is not the cost of a step."""
        self.busy_seconds = 0.0
        """Processor time that the thread has needed so far, in what it has finished."""
        self._thread = threading.Thread(target=self._run, name="sonde-worker", daemon=True)

    def start(self) -> None:
        """Start the thread; what was sent before waits. Starting twice is fine."""
        if self._thread.ident is None:
            self._thread.start()

    def send(self, packets: list[Packet | PlainSteps]) -> bool:
        """Queue packets without waiting; False if too many wait already."""
        if self._jobs.qsize() >= MAX_WAITING:
            return False
        self._jobs.put(packets)
        return True

    def seconds(self, level: int) -> float | None:
        """Return the processor time that a usual step of a level takes, without judging it; None if unknown.

        Steps of level 0 send nothing, unless something was logged: what they sent is spread over all of them.
        """
        costs = list(self._costs[level])
        if not costs:
            return None
        if level:
            return statistics.median(cost for _, _, cost in costs)
        return math.fsum(cost for _, _, cost in costs) / max(1, costs[-1][1] - costs[0][0] + 1)

    def subscribe(self, sink: Sink) -> None:
        """Add a sink; it first gets the sites that are known already."""

        def add() -> None:
            self._subscribers.append(sink)
            if self._sites:
                self._offer(sink, lambda: sink.take_sites(list(self._sites)))

        self._jobs.put(add)

    def publish(self, finding: Finding) -> None:
        """Pass a finding to all sinks, after what was sent before; from any thread."""

        def report() -> None:
            for sink in self._sinks():
                self._offer(sink, functools.partial(sink.take_finding, finding))

        self._jobs.put(report)

    def do(self, part: str, job: Callable[[], object]) -> None:
        """Run a function in this thread, after what was sent before; a failure is reported once."""

        def run() -> None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the edge of this thread
                self._report(part, traceback.format_exc())

        self._jobs.put(run)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued so far has reached the sinks.

        False if that took too long, or if the store has dropped something since the last time.
        """
        done = threading.Event()
        kept = False

        def finish() -> None:
            nonlocal kept
            for sink in self._sinks():
                self._offer(sink, sink.flush)
            before, self._dropped = self._dropped, getattr(self._store, "dropped_blocks", 0)
            kept = before == self._dropped

        self._jobs.put(finish)
        self._jobs.put(done.set)  # a job of its own: whatever fails before it, nobody waits in vain
        self.start()
        return done.wait(timeout_s) and kept

    def close(self, timeout_s: float) -> bool:
        """Let the thread finish what is queued, close the sinks and end; False if that took too long."""
        self._jobs.put(None)
        self.start()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Make the thread end when its queue is empty, without waiting for it."""
        if self._thread.is_alive():
            self._jobs.put(None)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._do(job)
            for sink in list(self._subscribers):
                self._offer(sink, sink.close)
                self._drain()  # a monitor may report a last finding as it closes: later sinks and the store take it
            self._drain()
            self._offer(self._store, self._store.close)
        finally:  # a store that was not closed would hold its run, which could not be resumed in this process
            attempt(self._store.close)

    def _drain(self) -> None:
        while not self._jobs.empty():
            self._do(self._jobs.get())

    def _do(self, job: _Job) -> None:
        try:
            self._work(job)
        except Exception:  # noqa: BLE001 - the edge of this thread: no job that fails may end it
            attempt(lambda: self._report("a job of the worker", traceback.format_exc()))

    def _work(self, job: _Job) -> None:
        if isinstance(job, list):
            for packet in job:
                began, judged = time.thread_time(), self.judging_seconds()
                if isinstance(packet, Packet):
                    first = last = packet.step
                    self._handle(packet)
                else:
                    first, last = packet.steps[0], packet.steps[-1]
                    self._handle_plain(packet)
                seconds = time.thread_time() - began
                self.busy_seconds += seconds
                self._costs[packet.level].append((first, last, seconds - (self.judging_seconds() - judged)))
        elif job is not None:
            began = time.thread_time()
            job()
            self.busy_seconds += time.thread_time() - began

    def _sinks(self) -> list[Sink]:
        return [self._store, *self._subscribers]

    def _handle(self, packet: Packet) -> None:
        block = None
        try:
            block = self._block(packet)
        except Exception:  # noqa: BLE001 - the edge of this thread: a packet that cannot be read must not end it
            self._report("packing a step", traceback.format_exc())
        self._give_back(packet)
        self._sites += packet.new_sites
        for sink in self._sinks():
            self._offer(sink, functools.partial(_deliver, sink, packet.new_sites, block, packet.events))

    def _handle_plain(self, plain: PlainSteps) -> None:
        try:
            numbers = to_numbers(plain, -1 if self._last is None else self._last.step)
            if numbers is None:
                for packet in plain.packets():
                    self._handle(packet)
                return
            self._last = numbers.last
            for sink in self._sinks():
                self._offer(sink, functools.partial(_deliver_numbers, sink, numbers))
        except Exception:  # noqa: BLE001 - the edge of this thread
            self._report("packing numbers", traceback.format_exc())

    def _give_back(self, packet: Packet) -> None:
        for hold in packet.holds:
            try:
                self._pool.give_back(hold.device, hold.arena)
            except Exception:  # noqa: BLE001 - the edge of this thread: a device that failed refuses every call
                self._report("emptying an arena", traceback.format_exc())

    def _block(self, packet: Packet) -> Block | None:
        block = to_block(packet, self._book, histogram=self._histogram)
        if block is None:
            return None
        if self._last is not None and self._last.step == block.step:
            block, self._last = continue_block(self._last, block)
        else:
            self._last = block
        return block

    def _offer(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the edge of this thread: no sink's fault may end it
            try:
                self._leave_out(sink, error)
            except Exception:
                logger.warning("a fault of %s could not be reported", type(sink).__name__, exc_info=True)

    def _leave_out(self, sink: Sink, error: Exception) -> None:
        if sink is self._store:
            self._report(_STORE, f"{type(error).__name__}: {error}")
        else:
            self._subscribers = [other for other in self._subscribers if other is not sink]
            self._report(f"sink {type(sink).__name__}", "".join(traceback.format_exception(error)))

    def _report(self, part: str, what: str) -> None:
        if part in self._reported:
            return
        self._reported.add(part)
        message = f"{part} failed; training continues without it"
        logger.warning("%s.\n%s", message, what_to_log(what))
        if part != _STORE:
            fault = Event(event_type="fault", message=message, timestamp=self._clock(), data={"traceback": what})
            self._offer(self._store, functools.partial(self._store.take_event, fault))


def _deliver_numbers(sink: Sink, numbers: Numbers) -> None:
    if isinstance(sink, NumberSink):
        sink.take_numbers(numbers)
    else:
        for block in numbers.blocks():
            sink.take_block(block)


def _deliver(sink: Sink, sites: list[Site], block: Block | None, events: list[Event]) -> None:
    """Pass a step to a sink. If a part is refused, the rest is still passed on: the store counts what it drops."""
    try:
        if sites:
            sink.take_sites(sites)
    finally:
        try:
            if block is not None:
                sink.take_block(block)
        finally:
            for event in events:
                sink.take_event(event)
