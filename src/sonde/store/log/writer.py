"""Write a run: append what a session records, and survive faults of the disk or the process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Any, Final, Literal

from sonde.core import files, schema, statistics
from sonde.core.outcome import Outcome
from sonde.errors import ClosedError, OptionError, RunError, RunInUse
from sonde.records import Block, Event, Finding, Numbers, RunHeader, Site
from sonde.store import contents, framing, layout, lease, timeline
from sonde.store.lines import Appender, LineWriter
from sonde.store.log import codec, retention, sites, table
from sonde.store.log.attempts import Attempt
from sonde.store.log.claim import Past, claim
from sonde.store.log.codec import Kind
from sonde.store.log.retention import MAX_SEGMENT_BYTES, Room
from sonde.store.log.sealer import Sealer

# Kept while the disk refuses them; older ones are dropped.
_MAX_WAITING_EVENTS: Final = 1000
_MAX_WAITING_FINDINGS: Final = 256
_LASTING: Final = frozenset({"exception", "interrupted", "fault", "dropped", "resumed", "over_budget", "seal_failed"})
"""Events that are written even where others are dropped for want of room."""

Health = Literal["well", "failing", "lost", "closed"]


class RunWriter:
    """Writes one rank's part of a run; a `Sink`.

    A step is safe from the death of the process once `take_block` has returned. When the disk refuses, the first
    refusal raises a `RunError`; later ones are counted in `dropped_blocks`, and writing goes on by itself once the
    disk accepts again. In a process forked from the one that opened it, every verb does nothing.

    Args:
        path: The folder of the run. It may exist and hold other things.
        header: The description of the run; written once, by rank 0.
        rank: Which rank's part to write. Each rank has a writer and a folder of its own.
        resume: Whether to continue a run that is there already.
        start_step: Where a continued run begins again; earlier attempts count only before it. None: at its first block.
        max_disk_bytes: Beyond this, old steps are merged into windows. None: a tenth of the free space, at most 16 GiB.
        journal_bytes: A journal of this size is sealed.
        num_ranks: How many ranks share the budget.
        sync: `"always"` forces every block to the disk: safe from a loss of power, and slow.
        clock: Returns the time in seconds since the epoch.

    Raises:
        RunExists: A run is there, and `resume` was not asked for.
        RunInUse: Another process writes it.
        RunError: The path cannot hold a run.

    """

    def __init__(
        self,
        path: str | Path,
        header: RunHeader,
        *,
        rank: int = 0,
        resume: bool = False,
        start_step: int | None = None,
        max_disk_bytes: int | None = None,
        journal_bytes: int = 32 << 20,
        num_ranks: int = 1,
        sync: Literal["never", "always"] = "never",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_disk_bytes is not None and max_disk_bytes < retention.MIN_BYTES:
            raise OptionError(f"max_disk_bytes is {max_disk_bytes}; a run needs at least {retention.MIN_BYTES:,}.")
        self.path = Path(path).absolute()  # the program may change its folder
        self.rank = rank
        self.folder = layout.rank_folder(self.path, rank)
        self.health: Health = "well"
        self.final_state: Outcome = "finished"
        """The status that `close` will write."""
        self.dropped_blocks = 0
        """How many blocks could not be written."""
        self._clock = clock
        self._pid = os.getpid()
        self._sync = sync
        above = (self.folder, *self.folder.parents)
        new = [each for each in above if not os.path.exists(each)]  # noqa: PTH110 - raises nothing
        with contextlib.suppress(OSError):  # claiming it reports what is wrong with it
            self.folder.mkdir(parents=True, exist_ok=True)
        with lease.claiming(self.folder):
            past = claim(self.path, rank, header, resume=resume, start_step=start_step, now=clock())
            budget = (max_disk_bytes or retention.default_budget(self.folder)) // max(1, num_ranks)
            self._prepare(past, start_step, budget, journal_bytes)
            self._journal = self._begin_writing()
            lease.OPEN.add(self._lease.token)
        # A segment that survives a loss of power is of no use if the folders above it, or run.json, do not.
        for folder in {self.path, *(each.parent for each in new)}:
            files.sync_folder(folder)
        try:
            self._take_over(past, start_step)
        except BaseException:  # nobody has this writer yet: what it started ends here
            self.final_state = "failed"
            with contextlib.suppress(Exception):
                self.close()
            raise

    def _take_over(self, past: Past, start_step: int | None) -> None:
        """Have the journals sealed that earlier attempts left open, and report that the run goes on."""
        for number in past.journals:
            self._sealer.submit(number)
        if past.attempt:
            self._report_resumed(start_step, past.last_step)

    def _prepare(self, past: Past, start_step: int | None, budget: int, journal_bytes: int) -> None:
        """Set up what continues the past of a folder, without writing to it."""
        self._room = Room(self.folder, budget, lambda: self._events.nbytes + self._findings.nbytes)
        self._journal_bytes = max(1 << 12, min(journal_bytes, self._room.share))
        self.attempt = past.attempt
        self.last_step: int | None = past.last_step
        """The last step written, also by earlier attempts."""
        self._sites = dict(past.sites)
        self._unsaved: list[Site] = []
        self._attempt = Attempt(past.attempt, start_step, self._clock())
        events = layout.events_file(self.path, self.rank)
        self._events = LineWriter(events, _MAX_WAITING_EVENTS, self._room.events_bytes)
        self._events_refused = False
        findings = layout.findings_file(self.path, self.rank)
        self._findings = LineWriter(findings, _MAX_WAITING_FINDINGS, self._room.findings_bytes)
        self._reported = 0
        self._reason = ""
        self._loss = LatestLoss()
        self._loss.meet(past.sites.values())
        self._sealer = Sealer(
            self.folder,
            room=self._room,
            report=self._report,
            clock=self._clock,
            max_segment_bytes=min(MAX_SEGMENT_BYTES, self._room.share),
        )
        self._number = past.number
        self._lease = replace(
            lease.mine("live", past.attempt, self._clock()),
            journal=past.number,
            blocks=past.num_blocks,
            last_step=past.last_step,
        )
        self._num_blocks = past.num_blocks

    @property
    def sites(self) -> list[Site]:
        """The sites known so far, also those of earlier attempts, in order of their ids."""
        return [self._sites[number] for number in sorted(self._sites)]

    def take_sites(self, new: list[Site]) -> None:
        """Take sites that are new."""
        if not self._may_write():
            return
        self._sites.update((site.id, site) for site in new)
        self._unsaved.extend(new)
        self._loss.meet(new)
        if self.health != "lost":
            try:
                self._save_sites()
            except OSError as error:
                self._refused(error)

    def take_block(self, block: Block) -> None:
        """Take the readings of one step; once this returns they survive the death of the process.

        Raises:
            RunError: They could not be written, for the first time in a row; the message names the reason.

        """
        if self._may_write():
            _check(block)
            self._take(lambda: codec.encode_block(self._sequence, codec.pack(block)), 1, block)

    def take_numbers(self, numbers: Numbers) -> None:
        """Take single numbers of many steps; once this returns they survive the death of the process.

        Raises:
            RunError: They could not be written, for the first time in a row; the message names the reason.

        """
        if self._may_write():
            self._take(lambda: codec.encode_numbers(self._sequence, numbers), len(numbers), numbers.last)

    def _take(self, encode: Callable[[], bytes], num_blocks: int, last: Block) -> None:
        if self.health == "lost":
            self.dropped_blocks += num_blocks
            return
        try:
            if self.health == "failing":
                self._replace_lost_journal()
            self._save_sites()
            self._append(encode(), num_blocks)
            if self._journal.is_lost():
                raise FileNotFoundError("its journal was deleted")
            if self._sync == "always":
                self._journal.sync()
        except OSError as error:
            self.dropped_blocks += num_blocks
            self._refused(error)
            return
        self._accepted(num_blocks, last)

    def take_event(self, event: Event) -> None:
        """Take an event. While the disk refuses, it waits."""
        if not self._may_write():
            return
        error = self._events.put(timeline.encode_event(event), last=event.event_type in _LASTING)
        was_refused, self._events_refused = self._events_refused, error is not None
        if error is not None and not was_refused and self.health == "well":
            reason = error.strerror or str(error)
            raise RunError(f"{self._events.path} could not be written: {reason}.") from error

    def take_finding(self, finding: Finding) -> None:
        """Take a finding. While the disk refuses, it waits."""
        if not self._may_write():
            return
        error = self._findings.put(timeline.encode_finding(finding))
        if error is not None and self.health == "well":
            reason = error.strerror or str(error)
            raise RunError(f"{self._findings.path} could not be written: {reason}.") from error

    def flush(self) -> None:
        """Make everything taken so far visible to others: it is, as soon as it was taken."""

    def sync(self) -> None:
        """Force everything taken so far to the disk, so that it survives a loss of power."""
        if self._may_write() and self.health == "well":
            self._journal.sync()
            self._events.sync()
            files.sync_folder(self.folder)

    def close(self, deadline: float = 10.0) -> None:
        """Finish: seal the journal, wait for the sealer at most `deadline` seconds, and write how the run ended.

        How it ended is `final_state`. Calling it again does nothing.
        """
        if self.health == "closed" or os.getpid() != self._pid:
            return
        health, self.health = self.health, "closed"
        lease.OPEN.discard(self._lease.token)
        try:
            self._journal.close()
            if health != "lost":
                self._report_dropped()
                self._sealer.submit(self._number)
        finally:  # its thread ends whatever failed
            deadline = 0.0 if health == "lost" else deadline
            try:
                self._sealer.close(deadline)
            except Exception:  # for want of memory or stack
                self._sealer.close(deadline)
                raise
        self._events.close()
        self._findings.close()
        if health == "lost":
            return
        try:
            self._beat(self.final_state)
        except OSError as error:
            if health == "well":
                raise RunError(f"{self.path} could not be finished: {error.strerror or error}.") from error

    def _may_write(self) -> bool:
        if os.getpid() != self._pid:
            return False  # a forked child: the file belongs to its parent
        if self.health == "closed":
            raise ClosedError(f"The writer of {self.path} is closed.")
        return True

    def _begin_writing(self) -> Appender:
        """Make the files that every run has, and write that it is live."""
        try:
            self._events.open()
            journal = self._begin_journal(self._number)
            lease.write(self.folder, self._lease)
        except FileExistsError:
            raise RunInUse(f"Another process has just begun to write {self.path}. Choose another path.") from None
        except OSError as error:
            raise RunError(f"A run cannot be written to {self.path}: {error.strerror or error}.") from error
        return journal

    def _begin_journal(self, number: int) -> Appender:
        """Open a new journal that can be read without those before it: it names the attempt and all sites."""
        appender = Appender(self.folder / layout.journal_name(number), new=True)
        unsaved = {site.id for site in self._unsaved}
        saved = [site for site in self.sites if site.id not in unsaved]
        records = [framing.encode_json(Kind.START, 0, self._attempt.to_json())]
        if saved:
            records.append(framing.encode_json(Kind.SITES, 1, sites.to_json(saved)))
        try:
            for record in records:
                self._take_room(record, begins=True)
                appender.append(record)
        except OSError:
            appender.close()
            appender.path.unlink(missing_ok=True)
            raise
        if self._sync == "always":
            files.sync_folder(self.folder)
        self._sequence = len(records)
        return appender

    def _take_room(self, record: bytes, *, begins: bool = False) -> None:
        """Raise OSError if a record would take more bytes than the run may have."""
        if not self._room.take(len(record), lambda: self._sealer.is_busy, begins=begins):
            raise OSError(ENOSPC, f"there is no room within {self._room.budget:,} bytes (max_disk_mb)")

    def _append(self, records: bytes, count: int = 1) -> None:
        self._take_room(records)
        self._journal.append(records)
        self._sequence += count

    def _save_sites(self) -> None:
        if self._unsaved:
            self._append(framing.encode_json(Kind.SITES, self._sequence, sites.to_json(self._unsaved)))
            self._unsaved.clear()

    def _accepted(self, num_blocks: int, last: Block) -> None:
        self._num_blocks += num_blocks
        self.last_step = int(last.step)
        self._loss.see(last)
        if self.health == "failing":
            self.health = "well"
            self._report_dropped()
        if self._journal.size >= self._journal_bytes:
            self._rotate()
        elif self._clock() - self._lease.beat >= lease.BEAT_S:
            self._keep_lease()

    def _rotate(self) -> None:
        try:
            self._turn_to(self._begin_journal(self._number + 1))
        except OSError:
            return  # the old one still works; the next block tries again
        self._sealer.submit(self._number - 1)
        self._keep_lease()

    def _replace_lost_journal(self) -> None:
        if self._journal.is_lost():
            self._turn_to(self._begin_journal(self._number + 1))

    def _turn_to(self, fresh: Appender) -> None:
        self._journal.close()
        self._journal, self._number = fresh, self._number + 1
        self._lease = replace(self._lease, journal=self._number, blocks=self._num_blocks)

    def _keep_lease(self) -> None:
        """Write a heartbeat, unless another process has taken the folder."""
        try:
            holder = lease.read(self.folder)
            if holder is not None and holder.token != self._lease.token:
                self.health = "lost"
                raise RunInUse(f"Process {holder.pid} on {holder.host} has taken over {self.path}; writing stops here.")
            self._beat("live")
        except OSError as error:
            self._refused(error)

    def _beat(self, state: lease.State) -> None:
        self._lease = replace(
            self._lease,
            state=state,
            beat=self._clock(),
            blocks=self._lease.blocks if state == "live" else self._num_blocks,
            last_step=self.last_step,
            loss=self._loss.value(),
            dropped_blocks=self.dropped_blocks,
            journal_bytes=self._journal.size if state == "live" else 0,
            events_bytes=self._events.nbytes,
            contents=None if state == "live" else self._list_contents(),
        )
        lease.write(self.folder, self._lease)

    def _list_contents(self) -> int | None:
        try:
            return contents.write(self.path, self.rank)
        except OSError:
            return None

    def _refused(self, error: OSError) -> None:
        """Note a refusal; raise if it is the first in a row."""
        is_gone = not self.folder.exists()
        before, self.health = self.health, "lost" if is_gone else "failing"
        self._reason = "the folder was deleted" if is_gone else (error.strerror or str(error))
        if self.health != before:
            cure = "Nothing more is written." if is_gone else "Blocks are dropped and counted until it works again."
            raise RunError(f"{self.path} could not be written: {self._reason}. {cure}") from error

    def _report(self, event: Event) -> None:
        """Take an event of the store's own; what cannot be written waits, without an error."""
        self._events.put(timeline.encode_event(event), last=event.event_type in _LASTING)

    def _report_dropped(self) -> None:
        missing = self.dropped_blocks - self._reported
        if missing:
            self._reported = self.dropped_blocks
            message = f"{missing} blocks were not written: {self._reason}."
            self._report(self._event("dropped", message, blocks=missing, reason=self._reason))

    def _report_resumed(self, start_step: int | None, last_step: int | None) -> None:
        message = f"Attempt {self.attempt} continues the run, whose last step was {last_step}."
        data = {"attempt": self.attempt, "start_step": start_step, "last_step": last_step}
        self._report(self._event("resumed", message, **data))

    def _event(self, event_type: str, message: str, **data: Any) -> Event:
        return Event(event_type=event_type, message=message, step=self.last_step, timestamp=self._clock(), data=data)


def _check(block: Block) -> None:
    num_rows = len(block.sites)
    shapes = (block.rows.shape, block.bins.shape, block.binned.shape)
    if shapes != ((num_rows, schema.NUM_COLUMNS), (num_rows, schema.NUM_BINS), (num_rows,)):
        raise ValueError(f"The block of step {block.step} has {num_rows} sites and arrays of shapes {shapes}.")
    if num_rows > 1 and not bool((block.sites[1:] > block.sites[:-1]).all()):
        raise ValueError(f"The sites of the block of step {block.step} are not in rising order.")
    if not 1 <= block.span <= codec.MAX_SPAN:
        raise ValueError(f"The block of step {block.step} spans {block.span} steps.")


def is_loss(site: Site) -> bool:
    """Return whether a site sounds like the loss."""
    return site.quantity == "scalar" and "loss" in site.name.lower()


class LatestLoss:
    """Remembers which scalar is the loss and the last block that has it. It is read only when it is asked for."""

    def __init__(self) -> None:
        self._site: int | None = None
        self._block: Block | None = None

    def meet(self, new: Iterable[Site]) -> None:
        """Look for the loss among new sites; the first that sounds like one counts."""
        for site in new:
            if self._site is None and is_loss(site):
                self._site = site.id

    def see(self, block: Block) -> None:
        """Keep a block that has the loss."""
        if self._site is not None and table.find_site(block.sites, self._site) is not None:
            self._block = block

    def value(self) -> float | str | None:
        """Return the loss, as `"nan"`, `"inf"` or `"-inf"` if it is not finite; None if none was written."""
        at = None if self._site is None or self._block is None else table.find_site(self._block.sites, self._site)
        if self._block is None or at is None:
            return None
        value: float | str = files.plain(float(statistics.value(self._block.rows[at])))
        return value
