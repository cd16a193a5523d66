"""Write pages: one datapoint after another into one folder, by one writer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Final
from weakref import WeakSet

from sonde.errors import ClosedError, OptionError, RunDamaged, RunError, RunExists, RunInUse
from sonde.store import lease
from sonde.store.pages import names
from sonde.store.pages.open_page import OpenPage, header_bytes, repair
from sonde.store.pages.reader import DebugOutputs
from sonde.store.pages.record import Datapoint, Draft, make

_MIN_RESERVED: Final = 16 << 10
_MAX_RESERVED: Final = 16 << 20
_FIRST_RESERVED: Final = 1 << 20

# A writer that was garbage-collected without `close` is dead, though its process lives.
_living: WeakSet[PageWriter] = WeakSet()


class PageWriter:
    """Writes captures of datapoints to a folder, as pages of bounded size.

    A datapoint is safe once `add` returns: it survives the death of the process. Nothing is ever overwritten. Any
    number of threads may add. In a process forked from the one that opened it, every verb does nothing.

    Args:
        folder: Where the pages go. Rank 1 and up write to a folder of their own inside it.
        page_bytes: A page is sealed when its tensors reach this size, and before it would exceed it; only a datapoint
            that is larger by itself makes a larger page.
        rank: The process of a distributed evaluation.
        resume: Continue a folder that holds pages already. A page that a killed process left open is finished first.
        sync: Force each page to the disk when it is sealed, so that it also survives a loss of power.
        clock: Returns the time in seconds since the epoch.

    Raises:
        RunExists: The folder holds pages, and was not to be continued.
        RunInUse: Another process writes it.
        RunError: The folder cannot hold pages.

    """

    def __init__(
        self,
        folder: str | Path,
        *,
        page_bytes: int,
        rank: int = 0,
        resume: bool = False,
        sync: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not page_bytes >= 1:
            raise OptionError(f"A page holds at least one byte; got page_bytes={page_bytes!r}.")
        page_bytes = int(page_bytes)
        self.folder = names.rank_folder(Path(folder), rank)
        self.page_bytes = page_bytes
        self.rank = rank
        self.pages_written = 0
        """Pages that this writer has sealed."""
        self.bytes_written = 0
        """Bytes of all tensors that this writer has written."""
        self.damaged: list[str] = []
        """What is wrong with pages that were left here; they stay as they are."""
        self._sync = sync
        self._clock = clock
        self._lock = RLock()
        self._page: OpenPage | None = None
        self._reserve = max(_MIN_RESERVED, min(page_bytes // 64, _FIRST_RESERVED)) // 8 * 8
        self._pid = os.getpid()
        self._closed = False
        try:
            self.datapoints = self._claim(resume=resume)
        except OSError as error:
            raise RunError(f"Pages cannot be written to {self.folder}: {error.strerror or error}.") from error
        _living.add(self)

    @property
    def current_page(self) -> int:
        """The number of the page that the next datapoint goes to, unless it is too large for that."""
        return self._next

    @property
    def current_page_bytes(self) -> int:
        """Bytes of tensors in the page that is open."""
        page = self._page
        return page.num_bytes if page is not None else 0

    def add(
        self, datapoint: Datapoint, outputs: Mapping[str, object], *, info: Mapping[str, object] | None = None
    ) -> None:
        """Write what was captured for a datapoint. Of two writes for the same datapoint, the later one counts.

        Args:
            datapoint: Its number or name.
            outputs: By debugger; nested as they came.
            info: Anything to know about the datapoint: its score, its label.

        Raises:
            OSError: It could not be written; the folder is as it was before.

        """
        self.add_draft(make(datapoint, outputs, info, self._clock()))

    def add_draft(self, draft: Draft) -> None:
        """Write a datapoint that is ready."""
        if not self._may_write():
            return
        with self._lock:
            self._may_write()
            self._page_for(draft).add(draft)
            self.bytes_written += draft.nbytes
            self.datapoints.add(draft.datapoint)
            if self.current_page_bytes >= self.page_bytes:
                self._seal()
            self._beat("live", due=True)

    def seal(self) -> None:
        """Finish the page that is open; the next datapoint begins another."""
        if self._may_write():
            with self._lock:
                self._seal()

    def take_number(self) -> int:
        """Finish the page that is open, and return the number of a page that comes from elsewhere."""
        with self._lock:
            self._seal()
            self._next += 1
            self.pages_written += 1
            return self._next - 1

    def close(self) -> None:
        """Seal the open page and release the folder; further calls do nothing."""
        if os.getpid() != self._pid:
            return  # nor touch the lock: a thread of the parent may have held it when it forked
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _living.discard(self)
            try:
                self._seal()
            finally:
                if self._page is not None:
                    self._page.close()
                self._beat("finished")

    def __enter__(self) -> PageWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self, *, resume: bool) -> set[Datapoint]:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._refuse_live_writer()
        left = names.list_pages(self.folder)
        if left and not resume:
            raise RunExists(f"{self.folder} holds {len(left)} pages already. Pass resume=True to add to them.")
        self._lease = lease.mine("live", 0, self._clock())
        lease.write(self.folder, self._lease)
        self._next = 0
        for page in left:
            if self._repair(page):
                self._next = page.number + 1
        return set(DebugOutputs(self.folder, ranks=False)) if left else set()

    def _repair(self, page: names.Page) -> bool:
        try:
            return repair(self.folder, page, rank=self.rank, sync=self._sync)
        except RunDamaged as error:
            self.damaged.append(str(error))
            return True

    def _refuse_live_writer(self) -> None:
        try:
            holder = lease.read(self.folder)
        except RunDamaged:
            return
        if holder is None or not lease.is_alive(holder, self._clock()):
            return
        if holder.pid == os.getpid() and all(writer._lease.token != holder.token for writer in _living):
            return
        raise RunInUse(
            f"{self.folder} is being written by process {holder.pid} on {holder.host}. "
            "Close that writer or choose another folder."
        )

    def _may_write(self) -> bool:
        if os.getpid() != self._pid:
            return False  # a forked child: the files belong to its parent
        if self._closed:
            raise ClosedError(f"The writer of {self.folder} is closed.")
        return True

    def _page_for(self, draft: Draft) -> OpenPage:
        page = self._page
        if page is not None and page.num_datapoints:
            has_room = page.has_room(draft)
            if not has_room:
                # Its header filled up before its data did: let the next one have a larger header.
                self._reserve = min(self._reserve * 2, _MAX_RESERVED, max(self.page_bytes, _MIN_RESERVED)) // 8 * 8
            if not has_room or page.num_bytes + draft.nbytes > self.page_bytes:
                self._seal()
                page = None
        if page is None:
            page = self._page = self._begin(draft)
        return page

    def _begin(self, draft: Draft) -> OpenPage:
        needed = 1024 + header_bytes(draft)
        reserved = max(self._reserve, needed + (-needed % 8))
        return OpenPage(self.folder, self._next, reserved=reserved, rank=self.rank, created=self._clock())

    def _seal(self) -> None:
        page = self._page
        if page is None:
            return
        page.seal(sync=self._sync)
        self._page = None
        self._next += 1
        self.pages_written += 1

    def _beat(self, state: lease.State, *, due: bool = False) -> None:
        now = self._clock()
        if due and now - self._lease.beat < lease.BEAT_S:
            return
        self._lease = replace(self._lease, state=state, beat=now, journal=self._next, blocks=len(self.datapoints))
        lease.write(self.folder, self._lease)
