"""A file of JSON lines that are written some at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sonde import strict_json
from sonde.errors import OptionError


class JsonLines:
    """Appends objects to a file; without a path it swallows them."""

    def __init__(self, path: Path | None, flush_interval: int) -> None:
        if flush_interval < 1:
            raise OptionError(f"flush_interval takes a whole number of at least 1; got {flush_interval!r}.")
        self._path = path
        self._interval = flush_interval
        self._waiting: list[bytes] = []

    def put(self, line: dict[str, Any]) -> None:
        """Take a line; every so many of them are written together."""
        if self._path is None:
            return
        self._waiting.append(strict_json.dumps(line) + b"\n")
        if len(self._waiting) >= self._interval:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        if self._path is None or not self._waiting:
            return
        with self._path.open("ab") as file:
            file.write(b"".join(self._waiting))
        self._waiting.clear()

    def close(self) -> None:
        """Write the lines that wait."""
        self.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a last line that was cut short is left out."""
    if not path.is_file():
        return []
    whole = path.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1].splitlines()
    found = (strict_json.loads(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip())
    return [line for line in found if isinstance(line, dict)]
