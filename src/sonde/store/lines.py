"""Files with one JSON object a line: appended while a run goes on, followed by whoever reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final, Generic, TypeVar

from sonde import strict_json
from sonde.errors import RunDamaged
from sonde.store.appender import Appender

_CHUNK: Final = 64 << 10

T = TypeVar("T")


def open_for_append(path: Path) -> Appender:
    """Open a file of lines, without the line that a crash cut short: it was never acknowledged."""
    appender = Appender(path, new=False)
    if appender.size:
        with path.open("rb") as file:
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

    At most `max_waiting` lines wait; older ones are dropped and counted. Any thread may put a line.
    """

    def __init__(self, path: Path, max_waiting: int) -> None:
        self.path = path
        self.dropped = 0
        """Lines that waited in vain."""
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

    def put(self, line: bytes) -> OSError | None:
        """Write a line, after those that wait; return why it has to wait as well. Once closed, it does nothing."""
        with self._lock:
            if self._closed:
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
        """Write what waits, if it can be, and close the file; again is fine."""
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


class LineFile(Generic[T]):
    """Follows a file of lines: each `refresh` reads what was added since the last."""

    def __init__(self, path: Path, decode: Callable[[bytes, str], T]) -> None:
        self.path = path
        self.items: list[T] = []
        self.bad_lines: list[tuple[int, str]] = []
        """Offset of each line that cannot be read, and why."""
        self.end = 0
        """Where the last whole line ends; what follows is still being written, or was cut short."""
        self._decode = decode

    def refresh(self) -> bool:
        """Read what is new; say whether there was anything."""
        before = self.end
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.end:  # replaced by a shorter file
                    self.items, self.bad_lines, self.end = [], [], 0
                while self._read(file):
                    pass
        except FileNotFoundError:
            return False
        return self.end != before

    def _read(self, file: BinaryIO) -> bool:
        """Read a piece; say whether there is more."""
        file.seek(self.end)
        fresh = file.read(strict_json.MAX_BYTES)
        whole = fresh[: fresh.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._take(line)
            self.end += len(line) + 1
        return bool(whole) and len(fresh) == strict_json.MAX_BYTES

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self.items.append(self._decode(line, f"{self.path} at byte {self.end}"))
        except RunDamaged as error:
            self.bad_lines.append((self.end, str(error)))
