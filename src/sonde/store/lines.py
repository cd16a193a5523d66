"""Files with one JSON object a line: appended while a run goes on, followed by whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
