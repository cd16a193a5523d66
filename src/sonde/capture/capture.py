"""Captures: taken from any thread, written to pages by another, sorted out once their scores are known."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch

from sonde.capture.item import take
from sonde.capture.living import living
from sonde.capture.worker import Worker
from sonde.errors import ClosedError, OptionError, RunError, RunExists
from sonde.store.pages import DebugOutputs, PageWriter
from sonde.store.pages.keep import Keep, copy_datapoints, move_pages
from sonde.store.pages.names import list_pages, rank_folder
from sonde.store.pages.record import Datapoint, check_datapoint

logger = logging.getLogger("sonde")

WAITING_ROOM: Final = "spill"
"""Folders of this name and a rank, inside that of the pages, hold captures that wait for their scores."""


class Capture(Worker):
    """Takes captures from any thread and writes them to pages with a thread of its own.

    Captures that come before a folder is known wait in memory; what exceeds `max_pending_bytes` waits in pages in a
    temporary folder, and moves when `open` names the place. The thread lives only while there is something to write.
    In a forked child every verb does nothing: files and thread belong to the parent.

    Args:
        page_bytes: How large a page grows.
        save_dtype: Floating tensors are stored as this type.
        max_pending_bytes: How many bytes of captures may wait in memory; those on a device wait there.
        on_full: What `add` does when that is reached: wait for up to `block_timeout_s`, or drop the capture. Dropped
            ones are counted.
        block_timeout_s: After waiting this long a capture is dropped as well.
        on_error: What happens to a capture that cannot be written. `"isolate"` reports the first one and counts all;
            `"raise"` also makes the next `flush`, `seal` or `close` raise.
        keep: Which captures stay once scores are known: `"worst:50"`, or `"worst:50+control:5"`. The control is drawn
            from the good ones; without a word on it, it is a tenth. Captures wait in pages until `keep_only` is called.
        seed: For drawing the control.
        rank: The process of a distributed evaluation.
        spill_folder: Where captures go that exceed the memory before a folder is known; the system's temporary one by
            default.
        sync: Force each page to the disk when it is sealed, so that it also survives a loss of power.
        clock: Tells the time.

    """

    def __init__(
        self,
        *,
        page_bytes: int,
        save_dtype: torch.dtype | None = None,
        max_pending_bytes: int = 256 << 20,
        on_full: Literal["block", "drop"] = "block",
        block_timeout_s: float = 30.0,
        on_error: Literal["isolate", "raise"] = "isolate",
        keep: str | None = None,
        seed: int = 0,
        rank: int = 0,
        spill_folder: str | Path | None = None,
        sync: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        _check("on_full", on_full, "block", "drop")
        _check("on_error", on_error, "isolate", "raise")
        if not (page_bytes >= 1 and max_pending_bytes >= 1):
            raise OptionError(f"Sizes are positive; got {page_bytes=}, {max_pending_bytes=}.")
        if save_dtype is not None and not save_dtype.is_floating_point:
            raise OptionError(f"save_dtype is a floating type, such as torch.float16; got {save_dtype!r}.")
        super().__init__(max_pending_bytes)
        self.page_bytes = page_bytes
        self.save_dtype = save_dtype
        self.on_full = on_full
        self.block_timeout_s = block_timeout_s
        self.on_error = on_error
        self.keep = Keep.parse(keep) if keep is not None else None
        self.seed = seed
        self.rank = rank
        self.dropped = 0
        """Captures that found no room in time."""
        self.discarded = 0
        """Captures that `keep_only` let go."""
        self._clock = clock
        self._sync = sync
        self._spill_root = spill_folder
        self._folder: Path | None = None
        self._spill: Path | None = None
        self._verbs = threading.RLock()  # held by what opens, settles or closes; never by the thread
        self._abandoned = False
        living.add(self)

    # What it holds

    @property
    def folder(self) -> Path | None:
        """Where captures go, if that is known."""
        return self._folder

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more captures."""
        return self._closed or self._abandoned

    @property
    def pages_written(self) -> int:
        """Pages sealed in the folder that is open."""
        writer = self._writer
        return writer.pages_written if writer is not None else 0

    @property
    def current_page(self) -> int:
        """The number of the page that is being filled."""
        writer = self._writer
        return writer.current_page if writer is not None else 0

    @property
    def current_page_bytes(self) -> int:
        """Bytes of tensors in the page that is being filled."""
        writer = self._writer
        return writer.current_page_bytes if writer is not None else 0

    @property
    def stored(self) -> frozenset[Datapoint]:
        """Datapoints on disk in the folder that is open, also from an attempt before: no need to capture them again."""
        with self._changed:
            return frozenset(self._writer.datapoints) if self._writer is not None else frozenset()

    # Verbs

    def open(self, folder: str | Path, *, resume: bool = False) -> None:
        """Say where captures go. What waits is written there; a folder that was open before is sealed.

        Raises:
            RunExists: The folder holds pages, and was not to be continued.
            RunInUse: Another process writes it.

        """
        with self._verbs:
            if not self._may_act():
                return
            path = Path(folder)
            if self._folder is not None:
                self.seal()
            if self.keep is not None and list_pages(rank_folder(path, self.rank)) and not resume:
                raise RunExists(f"{path} holds pages already. Pass resume=True to add to them.")
            target = path if self.keep is None else self._waiting_room(path)
            writer = self._make_writer(target, resume=resume)
            with self._taken_back_spill() as spilled:
                if spilled is not None:
                    move_pages(spilled, writer)
            with self._changed:
                self._folder = path
                self._write_to(writer)

    def add(self, datapoint: Datapoint, outputs: Mapping[str, Any], *, info: Mapping[str, Any] | None = None) -> bool:
        """Take what was captured for a datapoint; its tensors belong to this object from now on.

        Returns:
            Whether there was room for it.

        """
        if self._abandoned:
            return False
        item = take(check_datapoint(datapoint), outputs, info or {}, self.save_dtype)
        with self._changed:
            self._may_act()
            if not self._has_room(item.nbytes) and self._writer is None:
                self._begin_spill()
            may_wait = self.on_full == "block" and self._writer is not None
            if self._put(item, self.block_timeout_s if may_wait else 0.0):
                return True
            self.dropped += 1
            if self.dropped == 1:
                logger.warning("Captures are dropped: %s bytes wait to be written.", f"{self._pending_bytes:,}")
            return False

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all captures that were taken are on disk; False if that took too long, or no folder is known.

        Raises:
            RunError: With `on_error="raise"`: it took too long, or something could not be written.

        """
        if not self._may_act():
            return False
        done = self._drain(timeout_s)
        if self.on_error == "raise":
            unraised, self._unraised = self._unraised, []
            if unraised:
                first = f"the first, of datapoint {unraised[0].datapoint!r:.80}: {unraised[0].error}"
                raise RunError(f"{len(unraised)} captures could not be written; {first}")
            if not done and self._writer is not None:
                raise RunError(f"{self.num_pending} captures are not written after {timeout_s:g} s.")
        return done

    def keep_only(
        self, scores: Mapping[Datapoint, float], higher_is_better: bool, timeout_s: float = 60.0
    ) -> frozenset[Datapoint]:
        """Let only the captures stay that `keep` asks for, put them in their place, and finish the folder.

        Args:
            scores: By datapoint. One that is not a number is the worst of all; a capture without a score stays.
            higher_is_better: The direction of the scores.
            timeout_s: How long to wait for captures that are not written yet.

        Returns:
            The datapoints that stay.

        Raises:
            OptionError: There is no `keep`, or no folder was named.

        """
        with self._verbs:
            if not self._may_act():
                return frozenset()
            keep, folder = self.keep, self._folder
            if keep is None or folder is None:
                raise OptionError("keep_only needs keep=... and a folder: call open(folder) first.")
            self.flush(timeout_s)
            writer = self._take_writer(timeout_s)
            if writer is None:
                raise RunError(f"The captures in {folder} are still being written after {timeout_s:g} s; all stay.")
            writer.close()
            captured = DebugOutputs(writer.folder, ranks=False)
            chosen = keep.choose(captured, scores, higher_is_better=higher_is_better, seed=self.seed)
            with self._make_writer(folder, resume=True) as final:
                copy_datapoints(captured, final, [each for each in captured if each in chosen])
            self.discarded += len(captured) - len(chosen)
            self._folder = None
            shutil.rmtree(self._waiting_room(folder), ignore_errors=True)
            return frozenset(chosen)

    def seal(self, timeout_s: float = 60.0) -> bool:
        """Write all that waits and finish the folder; captures that follow wait for the next `open`.

        With `keep`, captures that never met their scores all stay.
        """
        with self._verbs:
            if not self._may_act():
                return False
            folder = self._folder
            if folder is None:
                return not self.num_pending
            try:
                done = self.flush(timeout_s)
            finally:
                self._finish(folder, timeout_s)
            return done

    def discard(self) -> None:
        """Forget the captures that wait for a folder."""
        with self._verbs:
            if not self._may_act() or self._folder is not None:
                return
            self._forget()
            with self._taken_back_spill():
                pass

    def close(self, timeout_s: float = 60.0) -> bool:
        """Seal and end; again is fine. Captures that never got a folder are lost, and counted as dropped."""
        with self._verbs:
            if self._abandoned or self._closed:
                return True
            try:
                return self.seal(timeout_s)
            finally:
                self.dropped += self._forget()
                with self._taken_back_spill():
                    pass
                with self._changed:
                    self._closed = True
                    self.dropped += self._forget()
                living.discard(self)
                self._join(timeout_s)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Before a folder is known

    def _begin_spill(self) -> None:
        """Let captures wait on disk, if that is possible."""
        try:
            self._spill = Path(tempfile.mkdtemp(prefix="sonde-spill-", dir=self._spill_root))
            self._write_to(self._make_writer(self._spill, resume=False))
        except (OSError, RunError) as error:
            logger.warning("Captures that wait for a folder cannot be spilled: %s", error)

    @contextlib.contextmanager
    def _taken_back_spill(self, timeout_s: float = 60.0) -> Iterator[Path | None]:
        """Stop writing to the temporary folder, hand out what it holds, and remove it."""
        spill, self._spill = self._spill, None
        if spill is None:
            yield None
            return
        self._drain(timeout_s)
        writer = self._take_writer(timeout_s)
        if writer is not None:
            writer.close()
        try:
            yield writer.folder if writer is not None else None
        finally:
            shutil.rmtree(spill, ignore_errors=True)

    # Where pages go

    def _make_writer(self, folder: Path, *, resume: bool) -> PageWriter:
        return PageWriter(
            folder, page_bytes=self.page_bytes, rank=self.rank, resume=resume, sync=self._sync, clock=self._clock
        )

    def _waiting_room(self, folder: Path) -> Path:
        return folder / f"{WAITING_ROOM}_{self.rank}"

    def _finish(self, folder: Path, timeout_s: float) -> None:
        writer = self._take_writer(timeout_s)
        self._folder = None
        # What this folder did not get in time must not end up in the next one.
        left = self._forget()
        if left:
            self.dropped += left
            logger.warning("%d captures for %s were dropped: they were not written in time.", left, folder)
        if writer is None:
            logger.warning("The last page of %s stays open: a write has hung for %g s.", folder, timeout_s)
            return
        writer.close()
        if self.keep is not None:
            with self._make_writer(folder, resume=True) as final:
                move_pages(writer.folder, final)
            shutil.rmtree(self._waiting_room(folder), ignore_errors=True)

    # The process

    def _may_act(self) -> bool:
        if self._abandoned:
            return False
        if self._closed:
            raise ClosedError("This capture is closed.")
        return True

    def _abandon(self) -> None:
        self._abandoned = True
        self._folder = self._spill = None
        self._verbs = threading.RLock()
        self._let_go()


def _check(name: str, value: object, *choices: str) -> None:
    if value not in choices:
        raise OptionError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r:.80}.")
