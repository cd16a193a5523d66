"""Writing a run: appends what a session records, and survives whatever happens to the disk or the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sonde.errors import RunExists, RunInUse
from sonde.records import Block, Event, RunHeader, Site
from sonde.store import codec, events, header, layout, lease, sites
from sonde.store.appender import Appender
from sonde.store.codec import Kind
from sonde.store.folder import RankFolder


class RunWriter:
    """Writes one rank's part of a run; a `Sink`."""

    def __init__(
        self,
        path: str | Path,
        run_header: RunHeader,
        *,
        rank: int = 0,
        resume: bool = False,
        start_step: int | None = None,
        max_disk_bytes: int | None = None,
        journal_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.folder = layout.rank_folder(self.path, rank)
        self.dropped_blocks = 0
        self._clock = clock
        self._sites: dict[int, Site] = {}
        self.last_step: int | None = None
        self.attempt, number = 0, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        old = lease.read(self.folder)
        if old is not None:
            if lease.is_alive(old, clock()):
                raise RunInUse(f"{self.path} is being written by process {old.pid} on {old.host}.")
            if not resume:
                raise RunExists(f"{self.path} holds a run already. Pass resume=True or choose another name.")
            number = self._recall()
        if rank == 0 and not (self.path / layout.HEADER).exists():
            header.write(self.path, run_header)
        self._lease = lease.mine("live", self.attempt, clock())
        self._journal = Appender(self.folder / layout.journal_name(number), new=True)
        self._events = events.open_for_append(layout.events_file(self.path, rank))
        self._sequence = 0
        start = {"attempt": self.attempt, "start_step": start_step, "time": clock()}
        self._append(codec.encode_json(Kind.START, self._sequence, start))
        lease.write(self.folder, self._lease)

    def _recall(self) -> int:
        folder = RankFolder(self.folder)
        folder.refresh()
        self._sites = folder.sites
        self.attempt = max((attempt.number for attempt in folder.attempts), default=-1) + 1
        blocks = folder.blocks()
        self.last_step = int(blocks.step[-1]) if len(blocks) else None
        return len(folder.sources)

    @property
    def next_site_id(self) -> int:
        """The id that the next new site gets."""
        return max(self._sites, default=-1) + 1

    @property
    def sites(self) -> list[Site]:
        """The sites known so far, also those of earlier attempts."""
        return list(self._sites.values())

    def take_sites(self, new: list[Site]) -> None:
        """Take sites that are new."""
        self._sites.update((site.id, site) for site in new)
        self._append(codec.encode_json(Kind.SITES, self._sequence, sites.to_json(new)))

    def take_block(self, block: Block) -> None:
        """Take the readings of one step."""
        self._append(codec.encode_block(self._sequence, codec.pack(block)))
        self.last_step = block.step

    def take_event(self, event: Event) -> None:
        """Take an event."""
        self._events.append(events.encode(event))

    def flush(self) -> None:
        """Make everything taken so far visible to others: it already is."""

    def close(self, deadline: float = 10.0, *, state: lease.State = "finished") -> None:
        """Finish."""
        self._journal.close()
        self._events.close()
        lease.write(self.folder, replace(self._lease, state=state, beat=self._clock()))

    def _append(self, record: bytes) -> None:
        self._journal.append(record)
        self._sequence += 1
