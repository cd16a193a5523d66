"""Seal journals into segments, merge small segments and thin old ones, in a background thread."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sonde.errors import RunDamaged
from sonde.records import Event, Site
from sonde.store import layout
from sonde.store.log import attempts, retention, table
from sonde.store.log.journal import JournalSource
from sonde.store.log.retention import MAX_SEGMENT_BYTES, Entry, Room, plan_windows, to_compact, to_join, to_thin
from sonde.store.log.segment import Segment
from sonde.store.log.segment_format import Origin, write_segment
from sonde.store.log.table import Table

_MAX_KNOWN_SITES: Final = 8  # parsed lists of sites that are kept; most segments have the same


class Sealer:
    """Seals the journals it is given, in order, on a thread of its own. The thread starts with the first journal.

    Whatever fails there is reported in the run and tried again: journals stay, and are read as they are.
    """

    def __init__(
        self,
        folder: Path,
        *,
        room: Room,
        report: Callable[[Event], None],
        clock: Callable[[], float],
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
    ) -> None:
        self._folder = folder
        self._room = room
        self._budget = room.target
        self._report = report
        self._clock = clock
        self._max_segment_bytes = max_segment_bytes
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._waiting: list[int] = []
        self._shelf: list[Entry] = []
        self._known_sites: dict[str, list[Site]] = {}
        self._bad: set[str] = set()
        self._has_failed = self._is_over = self._is_working = False

    def submit(self, number: int) -> None:
        """Seal a journal that is written no more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sonde-sealer", daemon=True)
            self._thread.start()
        self._queue.put(number)

    def close(self, deadline: float) -> bool:
        """Wait at most `deadline` seconds for the thread to finish its work; return whether it did.

        Past the deadline it puts no further file in its place. Journals that are not sealed are read as they are.
        """
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(max(deadline, 0.0))
        self._hurry.set()
        return not self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        """Whether there is work that may yet free room."""
        return self._is_working or not self._queue.empty()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            taken = self._take_all()
            self._is_working = True
            is_last = None in taken
            self._waiting += [number for number in taken if number is not None]
            if self._waiting and not self._hurry.is_set():
                self._work()
            self._is_working = False
            self._room.note_change()

    def _take_all(self) -> list[int | None]:
        """Wait for a journal, and take all that came meanwhile: together they cost less."""
        taken = [self._queue.get()]
        while not self._queue.empty():
            taken.append(self._queue.get())
        return taken

    def _work(self) -> None:
        """Do what there is to do, each part even if another fails. What fails is tried again with the next journal."""
        failures: list[Exception] = []
        for part in (self._seal_all, self._look, self._compact_all, self._thin_all, _give_memory_back):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - the edge of this thread: no fault may end it
                failures.append(error)
        if failures and not self._has_failed:
            try:
                self._report_failure(failures[0])
            except Exception:  # noqa: BLE001 - as above: a clock or an encoder may fail too
                failures.append(failures[0])
        self._has_failed = bool(failures)

    def _report_failure(self, error: Exception) -> None:
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        data = {"error": what}
        if not isinstance(error, OSError):
            data["traceback"] = "".join(traceback.format_exception(error))[-8000:]
        self._say("seal_failed", f"Could not seal a journal in {self._folder}: {what}", **data)

    def _seal_all(self) -> None:
        """Seal what waits. A journal that cannot be sealed does not hold up those after it."""
        left, failure = [], None
        while self._waiting and not self._hurry.is_set():
            try:
                self._seal()
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
                left.append(self._waiting.pop(0))
                if isinstance(error, OSError):
                    break  # the disk refuses the others, too
        self._waiting = [*left, *self._waiting]
        if failure is not None:
            raise failure

    def _compact_all(self) -> None:
        while self._compact():
            pass

    def _thin_all(self) -> None:
        while self._thin():
            pass

    def _may_finish(self) -> bool:
        return not self._hurry.is_set()

    def _seal(self) -> None:
        """Seal the first of the waiting journals, with as many of the next ones as fit in a segment."""
        group = self._read_group()
        if group:
            numbers, sources = list(group), list(group.values())
            known = {number: site for source in sources for number, site in source.sites.items()}
            origin = Origin(
                sites=[known[number] for number in sorted(known)],
                attempts=attempts.merge(attempt for source in sources for attempt in source.attempts),
            )
            target = self._folder / layout.segment_name(numbers[0], numbers[-1])
            rows = table.merge([part for source in sources for part in source.tables])
            if not write_segment(target, rows, origin, may_finish=self._may_finish):
                return
            for source in sources:
                self._finish(source)
        del self._waiting[: max(1, len(group))]

    def _read_group(self) -> dict[int, JournalSource]:
        """Read neighbouring journals of one attempt, at most as much as a segment may hold."""
        group: dict[int, JournalSource] = {}
        total = 0
        for number in self._waiting:
            source = JournalSource(self._folder / layout.journal_name(number))
            try:
                total += source.path.stat().st_size
                if group and (total > self._max_segment_bytes or number - 1 not in group):
                    break
                source.refresh()
            except FileNotFoundError:
                break  # sealed already
            if group and {a.number for a in source.attempts} != {a.number for a in group[number - 1].attempts}:
                break
            group[number] = source
        return group

    def _finish(self, source: JournalSource) -> None:
        """Delete a journal that was sealed; one with damage in it is kept for inspection."""
        if source.problems:
            source.path.replace(source.path.with_name(source.path.name + layout.DAMAGED))
            message = f"{source.path} was sealed without its damaged parts."
            self._say("damaged", message, problems=source.problems[:20])
        else:
            source.path.unlink(missing_ok=True)

    def _look(self) -> None:
        """Bring the shelf up to date with the folder, and delete what a crash left behind."""
        listing = layout.list_folder(self._folder)
        known = {entry.name: entry for entry in self._shelf}
        self._shelf = []
        for first, last, name in listing.segments:
            entry = known.get(name)
            if entry is None or entry.nbytes != (self._folder / name).stat().st_size:
                entry = self._open(first, last, name)
            if entry is not None:
                self._shelf.append(entry)
        # What a damaged segment was made from is the only good copy.
        done = [name for name in listing.obsolete if any(_covers(entry, name) for entry in self._shelf)]
        for name in (*done, *self._leftovers()):
            (self._folder / name).unlink(missing_ok=True)

    def _leftovers(self) -> list[str]:
        """Return the half-written files of earlier writers; this writer is the only one in the folder."""
        names = (entry.name for entry in os.scandir(self._folder))
        mine = f".{os.getpid()}.tmp"
        return [name for name in names if name.startswith(".") and name.endswith(".tmp") and not name.endswith(mine)]

    def _open(self, first: int, last: int, name: str) -> Entry | None:
        if name in self._bad:
            return None
        if len(self._known_sites) > _MAX_KNOWN_SITES:
            self._known_sites.clear()
        try:
            return Entry.of(first, last, Segment(self._folder / name, known_sites=self._known_sites))
        except RunDamaged as error:
            self._set_aside(name, error)
            return None

    def _set_aside(self, name: str, error: RunDamaged) -> None:
        # A damaged segment stays as it is: rewriting it would give wrong readings a right checksum.
        self._bad.add(name)
        self._shelf = [entry for entry in self._shelf if entry.name != name]
        self._say("damaged", str(error))

    def _read(self, entry: Entry) -> tuple[Segment, Table] | None:
        opened = Segment(self._folder / entry.name, known_sites=self._known_sites)
        try:
            rows = opened.read()
            opened.check_all(rows)
        except RunDamaged as error:
            self._set_aside(entry.name, error)
            return None
        return opened, rows

    def _compact(self) -> bool:
        """Merge one group of neighbours; return whether there may be more to do."""
        chosen = to_compact(self._shelf, self._max_segment_bytes)
        return bool(chosen) and not self._hurry.is_set() and self._rewrite(chosen, chosen[0].window) is not None

    def _thin(self) -> bool:
        """Thin the segments if the folder is over its budget; return whether there may be more to do."""
        nbytes = self._room.used()
        if nbytes <= self._budget:
            return False
        others = nbytes - sum(entry.nbytes for entry in self._shelf)
        # A little more than needed, so that the next journal does not bring the next thinning. Journals that wait to
        # be sealed have their turn when they are: what is old must not make room for all of them at once.
        budget = int(self._budget * 0.9) - min(others, self._budget // 8)
        windows = plan_windows(self._shelf, budget, self._max_segment_bytes)
        groups = to_thin(self._shelf, windows, self._max_segment_bytes)
        for group, window in groups:
            if self._hurry.is_set():
                return False
            self._thin_group(group, window)
        if groups:
            return True
        joined = to_join(self._shelf, self._max_segment_bytes)
        if joined and not self._hurry.is_set():
            return self._rewrite(joined, joined[0].window) is not None
        if not self._is_over:
            self._is_over = True
            budget = self._room.budget
            message = f"{self._folder} holds {nbytes:,} bytes of {budget:,}, and cannot be thinned."
            self._say("over_budget", message, bytes=nbytes, budget=budget)
        return False

    def _thin_group(self, group: list[Entry], window: int) -> None:
        after = self._rewrite(group, window)
        if after is None:
            return
        first, last = group[0].first_step, max(entry.end_step for entry in group) - 1
        self._say(
            "thinned",
            f"Merged steps {first} to {last} into windows of {window}, to keep to {self._room.budget:,} bytes.",
            first_step=first,
            last_step=last,
            window=window,
            blocks_before=sum(entry.num_blocks for entry in group),
            blocks_after=after.num_blocks,
            bytes_before=sum(entry.nbytes for entry in group),
            bytes_after=after.nbytes,
        )

    def _rewrite(self, group: list[Entry], window: int) -> Entry | None:
        """Put segments together in one, thinned to a window; return it, or None where nothing was done."""
        read = [self._read(entry) for entry in group]
        whole = [item for item in read if item is not None]
        if len(whole) < len(read):
            return None  # the damaged one is off the shelf now; the others have their turn again
        known = {site.id: site for opened, _ in whole for site in opened.sites}
        origin = Origin(
            sites=[known[number] for number in sorted(known)],
            attempts=attempts.merge(attempt for opened, _ in whole for attempt in opened.attempts),
            window=window,
        )
        rows = whole[0][1] if len(whole) == 1 else table.merge([rows for _, rows in whole])
        if window > min(entry.window for entry in group):
            rows = retention.thin(rows, window)
        name = layout.segment_name(group[0].first, group[-1].last)
        if not write_segment(self._folder / name, rows, origin, may_finish=self._may_finish):
            return None
        for entry in group:
            if entry.name != name:
                (self._folder / entry.name).unlink(missing_ok=True)
        self._room.note_change()
        after = self._open(group[0].first, group[-1].last, name)
        at = self._shelf.index(group[0])
        self._shelf[at : at + len(group)] = [after] if after is not None else []
        return after

    def _say(self, event_type: str, message: str, **data: object) -> None:
        self._report(Event(event_type=event_type, message=message, timestamp=self._clock(), data=data))


def _covers(entry: Entry, name: str) -> bool:
    number = layout.journal_number(name)
    span = layout.segment_range(name) if number is None else (number, number)
    return span is not None and entry.name != name and entry.first <= span[0] and span[1] <= entry.last


def _give_memory_back() -> None:
    """Return freed memory to the system, where the C library can.

    Sealing needs several times a journal for a moment. Without this the C library keeps it (measured: 65 MB after the
    first journal, 160 MB after 20,000 steps), and the training process would seem to leak.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
