"""Off the recording thread: journals become segments, small segments become larger ones, old ones become thinner."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sonde.errors import RunDamaged
from sonde.records import Event, Site
from sonde.store import attempts, layout, retention, segment, table
from sonde.store.folder import JournalSource
from sonde.store.segment import Maps, Origin, Segment
from sonde.store.shelf import Entry, to_compact, to_thin
from sonde.store.table import Table

MAX_SEGMENT_BYTES: Final = 96 << 20
"""Larger segments would be fewer, and slower to read all sites of one step from."""


def folder_bytes(folder: Path) -> int:
    """Return how many bytes the files of a folder hold."""
    total = 0
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


class Sealer:
    """Seals the journals it is given, in order, on a thread of its own. The thread starts with the first journal."""

    def __init__(
        self,
        folder: Path,
        *,
        budget: int,
        report: Callable[[Event], None],
        clock: Callable[[], float],
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
    ) -> None:
        self._folder = folder
        self._budget = budget
        self._report = report
        self._clock = clock
        self._max_segment_bytes = max_segment_bytes
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._waiting: list[int] = []
        self._entries: dict[str, Entry] = {}
        self._bad: set[str] = set()
        self._has_failed = self._is_over = False

    def submit(self, number: int) -> None:
        """Seal a journal that is written no more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sonde-sealer", daemon=True)
            self._thread.start()
        self._queue.put(number)

    def close(self, deadline: float) -> bool:
        """Wait for the thread to finish what it was given, at most `deadline` seconds; say whether it did.

        Past the deadline it puts no further file in its place. Journals that are not sealed are read as they are.
        """
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(max(deadline, 0.0))
        self._hurry.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (number := self._queue.get()) is not None:
            self._waiting.append(number)
            if not self._hurry.is_set():
                self._work()

    def _work(self) -> None:
        try:
            while self._waiting:
                self._seal(self._waiting[0])
                self._waiting.pop(0)
            while self._compact():
                pass
            while self._thin():
                pass
            self._has_failed = False
        except OSError as error:
            # Nothing is lost: the journals stay, are read as they are, and are tried again with the next one.
            if not self._has_failed:
                self._say("seal_failed", f"Could not seal a journal in {self._folder}: {error}", error=str(error))
            self._has_failed = True

    def _may_finish(self) -> bool:
        return not self._hurry.is_set()

    def _seal(self, number: int) -> None:
        path = self._folder / layout.journal_name(number)
        source = JournalSource(path)
        try:
            source.refresh()
        except FileNotFoundError:
            return  # sealed already
        rows = source.tables[0] if len(source.tables) == 1 else table.merge(source.tables)
        known = [source.sites[key] for key in sorted(source.sites)]
        target = self._folder / layout.segment_name(number, number)
        done = segment.write(target, rows, Origin(sites=known, attempts=source.attempts), may_finish=self._may_finish)
        if not done:
            return
        if source.problems:
            path.replace(path.with_name(path.name + layout.DAMAGED))
            self._say("damaged", f"{path} was sealed without its damaged parts.", problems=source.problems[:20])
        else:
            path.unlink(missing_ok=True)

    def _look(self) -> list[Entry]:
        """Bring the entries up to date with the folder, and delete what a crash left behind."""
        listing = layout.list_folder(self._folder)
        for name in (*listing.obsolete, *self._leftovers()):
            (self._folder / name).unlink(missing_ok=True)
        entries: dict[str, Entry] = {}
        known_sites: dict[str, list[Site]] = {}
        for first, last, name in listing.segments:
            nbytes = (self._folder / name).stat().st_size
            known = self._entries.get(name)
            if known is not None and known.nbytes == nbytes:
                entries[name] = known
            elif name not in self._bad:
                self._open(first, last, name, entries, known_sites)
        self._entries = entries
        return list(entries.values())

    def _leftovers(self) -> list[str]:
        """Name the half-written files of writers that are no more: this one has the folder for itself."""
        names = (entry.name for entry in os.scandir(self._folder))
        mine = f".{os.getpid()}.tmp"
        return [name for name in names if name.startswith(".") and name.endswith(".tmp") and not name.endswith(mine)]

    def _open(
        self, first: int, last: int, name: str, entries: dict[str, Entry], known_sites: dict[str, list[Site]]
    ) -> None:
        try:
            entries[name] = Entry.of(first, last, Segment(self._folder / name, Maps(), known_sites))
        except RunDamaged as error:
            self._set_aside(name, error)

    def _set_aside(self, name: str, error: RunDamaged) -> None:
        # A damaged segment stays as it is: rewriting it would give wrong readings a right checksum.
        self._bad.add(name)
        self._entries.pop(name, None)
        self._say("damaged", str(error))

    def _read(self, entry: Entry) -> tuple[Segment, Table] | None:
        opened = Segment(self._folder / entry.name, Maps())
        rows = opened.table()
        try:
            opened.check_all(rows)
        except RunDamaged as error:
            self._set_aside(entry.name, error)
            return None
        return opened, rows

    def _compact(self) -> bool:
        """Put one group of neighbours together; say whether there may be more to do."""
        chosen = to_compact(self._look(), self._max_segment_bytes)
        if not chosen or self._hurry.is_set():
            return False
        read = [self._read(entry) for entry in chosen]
        whole = [item for item in read if item is not None]
        if len(whole) < len(read):
            return True  # without the damaged one, others may fit
        known = {site.id: site for opened, _ in whole for site in opened.sites}
        origin = Origin(
            sites=[known[number] for number in sorted(known)],
            attempts=attempts.merge(attempt for opened, _ in whole for attempt in opened.attempts),
            window=chosen[0].window,
        )
        target = self._folder / layout.segment_name(chosen[0].first, chosen[-1].last)
        if not segment.write(target, table.merge([rows for _, rows in whole]), origin, may_finish=self._may_finish):
            return False
        for entry in chosen:
            (self._folder / entry.name).unlink(missing_ok=True)
        return True

    def _thin(self) -> bool:
        """Thin one segment if the folder is over its budget; say whether there may be more to do."""
        entries = self._look()
        nbytes = folder_bytes(self._folder)
        if nbytes <= self._budget or self._hurry.is_set():
            return False
        chosen = to_thin(entries)
        if chosen is None:
            if not self._is_over:
                self._is_over = True
                message = (
                    f"{self._folder} holds {nbytes:,} bytes, more than its {self._budget:,}, and cannot be thinned."
                )
                self._say("over_budget", message, bytes=nbytes, budget=self._budget)
            return False
        found = self._read(chosen)
        return found is None or self._thin_segment(chosen, *found)

    def _thin_segment(self, entry: Entry, opened: Segment, rows: Table) -> bool:
        window = retention.next_window(rows.blocks.step, entry.window)
        thinned = retention.thin(rows, window)
        origin = Origin(sites=opened.sites, attempts=opened.attempts, window=window)
        if not segment.write(opened.path, thinned, origin, may_finish=self._may_finish):
            return False
        self._entries.pop(entry.name, None)
        after = opened.path.stat().st_size
        last = entry.end_step - 1
        self._say(
            "thinned",
            f"Merged steps {entry.first_step} to {last} into windows of {window}, to keep to {self._budget:,} bytes.",
            first_step=entry.first_step,
            last_step=last,
            window=window,
            blocks_before=len(rows.blocks),
            blocks_after=len(thinned.blocks),
            bytes_before=entry.nbytes,
            bytes_after=after,
        )
        return True

    def _say(self, event_type: str, message: str, **data: object) -> None:
        self._report(Event(event_type=event_type, message=message, timestamp=self._clock(), data=data))
