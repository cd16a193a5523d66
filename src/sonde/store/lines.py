"""Append whole lines to a file, and read them while it grows."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from errno import EIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final, Generic, TypeVar

from sonde.core import files
from sonde.errors import RunDamaged


class Appender:
    """Appends to a file so that a failed write leaves no part of itself behind.

    Each append is one `os.write`: what it returned from survives the death of the process.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0) | getattr(os, "O_BINARY", 0)
        self._fd: int | None = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o644)
        self.size = os.fstat(self._fd).st_size
        self._torn = False

    def append(self, record: bytes) -> None:
        """Write `record` whole.

        Raises:
            OSError: It was not written; the file is as it was before.

        """
        fd = self._open_fd()
        self._mend(fd)
        try:
            written = os.write(fd, record)
            if written != len(record):
                # The rest may be refused for a reason (a full disk, a size limit): ask for that reason.
                written += os.write(fd, memoryview(record)[written:])
            if written != len(record):
                raise OSError(EIO, f"only {written} of {len(record)} bytes were written")
        except OSError:
            self._torn = True
            self._mend(fd)
            raise
        self.size += written

    def cut(self, size: int) -> None:
        """Drop what follows the first `size` bytes."""
        os.ftruncate(self._open_fd(), size)
        self.size = size

    def is_lost(self) -> bool:
        """Return whether the file was deleted while open; writes to it still succeed, but are lost."""
        return os.fstat(self._open_fd()).st_nlink == 0

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._open_fd())

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _mend(self, fd: int) -> None:
        if self._torn:
            os.ftruncate(fd, self.size)
            self._torn = False

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        return self._fd


_CHUNK: Final = 64 << 10
_LAST_SHARE: Final = 4
"""One in this many bytes is reserved for the lines that matter most."""

MOST_MEMORY: Final = 2 * files.MAX_MEMORY
"""Bytes that the parsed lines of all files of a run may take; estimated, they take half as many."""

T = TypeVar("T")


def open_for_append(path: Path) -> Appender:
    """Open a file of lines, without the line that a crash cut short: it was never acknowledged."""
    appender = Appender(path, new=False)
    if appender.size:
        with files.open_file(path) as file:
            end = _end_of_last_line(file, appender.size)
        if end < appender.size:
            appender.cut(end)
    return appender


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    while size:
        start = max(0, size - _CHUNK)
        file.seek(start)
        found = file.read(size - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0


class LineWriter:
    """Appends lines to a file that is made with the first of them. What the disk refuses waits for the next.

    At most `max_waiting` lines wait; older ones are dropped and counted. So are lines beyond `max_bytes` of the file,
    where those put as `last` may take a little more. Any thread may put a line.
    """

    def __init__(self, path: Path, max_waiting: int, max_bytes: int | None = None) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.dropped = 0
        """Lines that were dropped because too many waited, or the file is full."""
        self._waiting: deque[bytes] = deque(maxlen=max_waiting)
        self._appender: Appender | None = None
        self._closed = False
        self._lock = Lock()

    def open(self) -> None:
        """Make the file now.

        Raises:
            OSError: It cannot be.

        """
        self._appender = open_for_append(self.path)

    @property
    def nbytes(self) -> int:
        """The size of the file, as far as this writer knows."""
        return 0 if self._appender is None else self._appender.size

    def put(self, line: bytes, *, last: bool = False) -> OSError | None:
        """Write a line, after those that wait; return why it has to wait as well. Once closed, it does nothing."""
        with self._lock:
            if self._closed:
                return None
            if self.max_bytes is not None and self.nbytes + len(line) > self.max_bytes * (1 + last / _LAST_SHARE):
                self.dropped += 1
                return None
            if len(self._waiting) == self._waiting.maxlen:
                self.dropped += 1
            self._waiting.append(line)
            return self._write()

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._appender is not None:
            self._appender.sync()

    def close(self) -> None:
        """Write what waits, if possible, and close the file; further calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._write()
            if self._appender is not None:
                self._appender.close()

    def _write(self) -> OSError | None:
        try:
            if self._waiting and self._appender is None:
                self._appender = open_for_append(self.path)
            while self._waiting and self._appender is not None:
                self._appender.append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            return error
        return None


class Memory:
    """Counts what the parsed lines of several files take."""

    def __init__(self, most: int = MOST_MEMORY) -> None:
        self.left = most


class LineFile(Generic[T]):
    """Follows a file of JSON lines: each `refresh` reads what was added since the last, while there is memory left."""

    def __init__(self, path: Path, decode: Callable[[bytes, str], T], memory: Memory | None = None) -> None:
        self.path = path
        self.items: list[T] = []
        self.bad_lines: list[tuple[int, str]] = []
        """Offset of each line that cannot be read, and why."""
        self.end = 0
        """Where the last whole line ends; what follows is still being written, or was cut short."""
        self._decode = decode
        self._memory = memory or Memory()
        self._taken = 0

    def refresh(self) -> bool:
        """Read what is new; return whether there was anything."""
        before = self.end
        try:
            with files.open_file(self.path) as file:
                if file.seek(0, 2) < self.end:  # replaced by a shorter file
                    self._begin_anew()
                while self._read(file):
                    pass
        except FileNotFoundError:
            return False
        except RunDamaged as error:  # not a file of lines at all
            self.bad_lines = [(0, str(error))]
        return self.end != before

    def _read(self, file: BinaryIO) -> bool:
        """Read a piece; return whether there is more."""
        if self._memory.left < 0:
            return False
        file.seek(self.end)
        fresh = file.read(files.MAX_BYTES)
        whole = fresh[: fresh.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            if not self._has_memory(line):
                return False
            self._take(line)
            self.end += len(line) + 1
        return bool(whole) and len(fresh) == files.MAX_BYTES

    def _begin_anew(self) -> None:
        self._memory.left += self._taken
        self.items, self.bad_lines, self.end, self._taken = [], [], 0, 0

    def _has_memory(self, line: bytes) -> bool:
        size = files.memory_of(line)
        self._memory.left -= size
        self._taken += size
        if self._memory.left < 0:
            why = "more would take too much memory. The rest is left out."
            self.bad_lines.append((self.end, f"{self.path} is read up to byte {self.end:,}: {why}"))
        return self._memory.left >= 0

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self.items.append(self._decode(line, f"{self.path} at byte {self.end}"))
        except RunDamaged as error:
            self.bad_lines.append((self.end, str(error)))
