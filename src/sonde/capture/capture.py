"""Captures: added by any thread, written to pages by another, and selected once their scores are known."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch

from sonde.capture.values import take
from sonde.capture.worker import Failure, Worker, living
from sonde.errors import ClosedError, OptionError, RunError, RunExists
from sonde.store.pages import DebugOutputs, PageWriter
from sonde.store.pages.keep import Keep, copy_datapoints, move_pages
from sonde.store.pages.names import list_pages, rank_folder
from sonde.store.pages.record import Datapoint, check_datapoint

logger = logging.getLogger("sonde")

UNSCORED: Final = "spill"
"""Folders of this name and a rank, inside that of the pages, hold captures that wait for their scores."""


class Capture(Worker):
    """Take captures from any thread and write them to pages with a thread of its own.

    Captures that come before a folder is known wait in memory; what exceeds `max_pending_bytes` waits in pages in a
    temporary folder, and moves when `open` names the folder. A full queue slows the caller down; nothing is dropped
    while captures reach the disk. The thread runs only while there is something to write. In a forked child every
    method does nothing: files and thread belong to the parent.

    Args:
        page_bytes: How large a page grows.
        save_dtype: Floating tensors are stored as this type.
        max_pending_bytes: How many bytes of captures may wait in memory; those on a device wait there.
        on_full: What `add` does when that is reached: wait until the thread has made room, or drop the capture.
        stall_timeout_s: How long the thread may go without writing a single capture before it counts as stalled.
            Captures that wait for room then are dropped and counted.
        on_error: What happens to a capture that cannot be written. `"isolate"` logs the first one and counts all;
            `"raise"` also makes the next `flush`, `seal` or `close` raise.
        keep: Which captures stay once scores are known: `"worst:50"`, or `"worst:50+control:5"`. The control is drawn
            from the good ones; by default it is a tenth. Captures wait in pages until `keep_only` is called.
        seed: For drawing the control.
        rank: The process of a distributed evaluation.
        spill_folder: Where captures go that exceed the memory before a folder is known; by default the system's
            temporary folder.
        sync: Force each page to the disk when it is sealed, so that it also survives a loss of power.
        clock: Returns the time of a capture.
        monotonic: Returns the time by which stalls are measured.

    """

    def __init__(
        self,
        *,
        page_bytes: int,
        save_dtype: torch.dtype | None = None,
        max_pending_bytes: int = 256 << 20,
        on_full: Literal["block", "drop"] = "block",
        stall_timeout_s: float = 60.0,
        on_error: Literal["isolate", "raise"] = "isolate",
        keep: str | None = None,
        seed: int = 0,
        rank: int = 0,
        spill_folder: str | Path | None = None,
        sync: bool = True,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        _check("on_full", on_full, "block", "drop")
        _check("on_error", on_error, "isolate", "raise")
        if not (page_bytes >= 1 and max_pending_bytes >= 1):
            raise OptionError(f"Sizes are positive; got {page_bytes=}, {max_pending_bytes=}.")
        if save_dtype is not None and not save_dtype.is_floating_point:
            raise OptionError(f"save_dtype is a floating type, such as torch.float16; got {save_dtype!r}.")
        if not stall_timeout_s >= 0:
            raise OptionError(f"stall_timeout_s is a number of seconds, or math.inf; got {stall_timeout_s!r:.80}.")
        super().__init__(max_pending_bytes, stall_timeout_s, monotonic)
        self.page_bytes = page_bytes
        self.save_dtype = save_dtype
        self.on_full = on_full
        self.on_error = on_error
        self.keep = Keep.parse(keep) if keep is not None else None
        self.seed = seed
        self.rank = rank
        self.dropped = 0
        """Captures that were given up: there was no room for them, or the thread stalled."""
        self.discarded = 0
        """Captures that `keep_only` removed."""
        self._clock = clock
        self._sync = sync
        self._spill_root = spill_folder
        self._folder: Path | None = None
        self._spill: Path | None = None
        self._verbs = threading.RLock()  # held by what opens, settles or closes; never by the thread
        self._abandoned = False
        living.add(self)

    # State

    @property
    def folder(self) -> Path | None:
        """The folder that captures go to; None if none was set."""
        return self._folder

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
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
        """Datapoints on disk in the open folder, including those of an earlier process."""
        with self._changed:
            return frozenset(self._writer.datapoints) if self._writer is not None else frozenset()

    # Methods

    def open(self, folder: str | Path, *, resume: bool = False) -> None:
        """Set the folder that captures go to. What waits is written there; a folder that was open before is sealed.

        Raises:
            RunExists: The folder holds pages, and `resume` is not set.
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
            target = path if self.keep is None else self._unscored_folder(path)
            writer = self._make_writer(target, resume=resume)
            with self._changed:  # `add` waits meanwhile, so that the order of captures stays
                with self._taken_back_spill() as spilled:
                    if spilled is not None:
                        move_pages(spilled, writer)
                self._folder = path
                self._write_to(writer)

    def add(self, datapoint: Datapoint, outputs: Mapping[str, Any], *, info: Mapping[str, Any] | None = None) -> bool:
        """Take what was captured for a datapoint; its tensors belong to this object from now on.

        Waits while there is no room, as long as the thread makes progress.

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
            if self._put(item, self.stall_timeout_s if may_wait else 0.0):
                return True
            why = f"there is no room: {self._pending_bytes:,} bytes wait"
            self._drop([item.datapoint], why)
            self._note(Failure(item.datapoint, why, ""))
            return False

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all captures that were taken are on disk; False if the thread stalls, or no folder is known.

        Args:
            timeout_s: How long the thread may go without writing a capture; `stall_timeout_s` by default.

        Raises:
            RunError: With `on_error="raise"`: the thread stalled, or something could not be written.

        """
        if not self._may_act():
            return False
        limit = self._limit(timeout_s)
        done = self._drain(limit)
        if self.on_error == "raise":
            unraised, self._unraised = self._unraised, []
            if unraised:
                first = f"the first, of datapoint {unraised[0].datapoint!r:.80}: {unraised[0].error}"
                raise RunError(f"{len(unraised)} captures could not be written; {first}")
            if not done and self._writer is not None:
                raise RunError(f"{self.num_pending} captures wait, and none was written for {limit:g} s.")
        return done

    def take_lost(self) -> dict[Datapoint, str]:
        """Return the datapoints whose captures were lost since this was last called, each with the reason."""
        with self._changed:
            lost, self._lost = self._lost, {}
        return lost

    def keep_only(
        self, scores: Mapping[Datapoint, float], higher_is_better: bool, timeout_s: float | None = None
    ) -> frozenset[Datapoint]:
        """Keep only the captures that `keep` asks for, put them in their place, and finish the folder.

        Args:
            scores: By datapoint. One that is not a number is the worst of all; a capture without a score stays.
            higher_is_better: The direction of the scores.
            timeout_s: How long the thread may go without writing a capture; `stall_timeout_s` by default.

        Returns:
            The datapoints that stay.

        Raises:
            OptionError: `keep` is not set, or no folder is open.

        """
        with self._verbs:
            if not self._may_act():
                return frozenset()
            keep, folder = self.keep, self._folder
            if keep is None or folder is None:
                raise OptionError("keep_only needs keep=... and a folder: call open(folder) first.")
            self.flush(timeout_s)
            writer = self._take_writer(self._limit(timeout_s))
            if writer is None:
                raise RunError(f"The thread that writes {folder} has stalled; all captures stay.")
            writer.close()
            captured = DebugOutputs(writer.folder, ranks=False)
            chosen = keep.choose(captured, scores, higher_is_better=higher_is_better, seed=self.seed)
            with self._make_writer(folder, resume=True) as final:
                copy_datapoints(captured, final, [each for each in captured if each in chosen])
            self.discarded += len(captured) - len(chosen)
            self._folder = None
            shutil.rmtree(self._unscored_folder(folder), ignore_errors=True)
            return frozenset(chosen)

    def seal(self, timeout_s: float | None = None) -> bool:
        """Write all that waits and finish the folder; captures that follow wait for the next `open`.

        With `keep` and no call of `keep_only`, all captures stay.

        Args:
            timeout_s: How long the thread may go without writing a capture; `stall_timeout_s` by default.

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
                self._finish(folder, self._limit(timeout_s))
            return done

    def discard(self) -> None:
        """Discard the captures that wait for a folder."""
        with self._verbs:
            if not self._may_act() or self._folder is not None:
                return
            self._forget()
            with self._taken_back_spill():
                pass

    def close(self, timeout_s: float | None = None) -> bool:
        """Seal and end; closing twice is fine. Captures that never got a folder are lost, and counted as dropped."""
        with self._verbs:
            if self._abandoned or self._closed:
                return True
            try:
                return self.seal(timeout_s)
            finally:
                self._drop(self._forget(), "no folder was set")
                with self._taken_back_spill():
                    pass
                with self._changed:
                    self._closed = True
                    self._drop(self._forget(), "no folder was set")
                living.discard(self)
                self._join(min(self._limit(timeout_s), threading.TIMEOUT_MAX))

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Before a folder is known

    def _begin_spill(self) -> None:
        """Let captures wait in a temporary folder, if that is possible."""
        try:
            self._spill = Path(tempfile.mkdtemp(prefix="sonde-spill-", dir=self._spill_root))
            self._write_to(self._make_writer(self._spill, resume=False))
        except (OSError, RunError) as error:
            logger.warning("Captures that wait for a folder cannot be spilled: %s", error)

    @contextlib.contextmanager
    def _taken_back_spill(self) -> Iterator[Path | None]:
        """Stop writing to the temporary folder, yield what it holds, and remove it."""
        spill = self._spill
        if spill is None:
            yield None
            return
        spilling = self._writer
        writer = self._take_writer(self.stall_timeout_s)
        self._spill = None
        if writer is not None:
            writer.close()
        elif spilling is not None:
            self._drop(list(spilling.datapoints), "the writer of the temporary folder has stalled")
            logger.warning("%d captures are lost: the thread that writes %s has stalled.", self.dropped, spill)
        try:
            yield writer.folder if writer is not None else None
        finally:
            shutil.rmtree(spill, ignore_errors=True)

    # Where pages go

    def _make_writer(self, folder: Path, *, resume: bool) -> PageWriter:
        return PageWriter(
            folder, page_bytes=self.page_bytes, rank=self.rank, resume=resume, sync=self._sync, clock=self._clock
        )

    def _unscored_folder(self, folder: Path) -> Path:
        return folder / f"{UNSCORED}_{self.rank}"

    def _finish(self, folder: Path, stall_timeout_s: float) -> None:
        writer = self._take_writer(stall_timeout_s)
        self._folder = None
        # What did not reach this folder must not end up in the next one.
        left = self._forget()
        if left:
            self._drop(left, f"nothing was written for {stall_timeout_s:g} s")
            logger.warning(
                "%d captures of %s were dropped: none was written for %g s.", len(left), folder, stall_timeout_s
            )
        if writer is None:
            logger.warning("The last page of %s stays open: a write has hung for %g s.", folder, stall_timeout_s)
            return
        try:
            writer.close()
            if self.keep is not None:
                with self._make_writer(folder, resume=True) as final:
                    move_pages(writer.folder, final)
                shutil.rmtree(self._unscored_folder(folder), ignore_errors=True)
        except (OSError, RunError) as error:
            if self.on_error == "raise":
                raise
            logger.warning(
                "The last page of %s could not be finished; it stays open, and can be read: %s", folder, error
            )

    def _limit(self, timeout_s: float | None) -> float:
        return self.stall_timeout_s if timeout_s is None else timeout_s

    def _drop(self, datapoints: Sequence[Datapoint], why: str) -> None:
        """Count captures that are given up."""
        with self._changed:
            self.dropped += len(datapoints)
            self._lost |= dict.fromkeys(datapoints, why)

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
        self._reset_after_fork()


def _check(name: str, value: object, *choices: str) -> None:
    if value not in choices:
        raise OptionError(f"{name} is one of {', '.join(map(repr, choices))}; got {value!r:.80}.")
