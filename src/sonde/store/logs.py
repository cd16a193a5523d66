"""What a program printed and the code that it ran, beside a run: bounded files in `logs/`.

logs/
  code.json          the user's own source files as they were when recording began
  output.jsonl       the first lines that were printed, a JSON object a line
  output-old.jsonl   of a longer output: the lines before the last ones
  output-new.jsonl   and the last lines
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.errors import RunDamaged

LOGS: Final = "logs"
CODE: Final = "code.json"
FIRST, OLD, NEW = "output.jsonl", "output-old.jsonl", "output-new.jsonl"
FIRST_BYTES: Final = 512 << 10
"""How much of the start of an output is kept."""
LAST_BYTES: Final = 256 << 10
"""How much each of the two files holds that follow the end of a longer output."""
_MOST_READ: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One printed line."""

    text: str
    stream: str
    """`out` or `err`."""
    time: float | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What was printed. Where lines were left out, `cut` is the number of lines before the gap."""

    lines: tuple[Line, ...]
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file as it was when recording began."""

    path: str
    text: str
    is_cut: bool = False


def read_output(run: Path) -> Output | None:
    """Return what the program printed; None where that was not kept."""
    folder = run / LOGS
    if not (folder / FIRST).is_file():
        return None
    first = _lines(folder / FIRST)
    last = [*_lines(folder / OLD), *_lines(folder / NEW)]
    # The third file appears when the second was full once: then lines may be missing before it.
    return Output((*first, *last), len(first) if (folder / OLD).is_file() else None)


def _lines(path: Path) -> list[Line]:
    try:
        with files.open_file(path) as file:
            content = file.read(_MOST_READ)
    except (OSError, RunDamaged):
        return []
    found = []
    for number, line in enumerate(content.splitlines()):
        try:
            plain: Any = files.loads(line, f"{path}:{number + 1}")
        except RunDamaged:
            continue  # torn by a crash
        if isinstance(plain, dict) and isinstance(plain.get("text"), str):
            time, step = plain.get("time"), plain.get("step")
            stream = "err" if plain.get("stream") == "err" else "out"
            known_time = float(time) if isinstance(time, int | float) else None
            found.append(Line(plain["text"], stream, known_time, step if type(step) is int else None))
    return found


def read_code(run: Path) -> list[SourceFile]:
    """Return the source files that were kept."""
    try:
        plain = files.read_object(run / LOGS / CODE)
    except (OSError, RunDamaged):
        return []
    listed = plain.get("files")
    known = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return [
        SourceFile(each["path"], each["text"], each.get("is_cut") is True)
        for each in known
        if isinstance(each.get("path"), str) and isinstance(each.get("text"), str)
    ]
