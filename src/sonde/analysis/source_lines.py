"""Find the line of the user's program that a finding points to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.analysis.overview import Ending, is_users_file
from sonde.core import tape
from sonde.errors import SondeError
from sonde.records import Finding
from sonde.store import Run

_CITED: Final = re.compile(r"(?<![\w.+-])([\w.+-]+\.py):(\d{1,9})\b")
"""How a finding cites a line in its text: `train.py:12`. A long word is tried from its beginning only."""
_MOST_TAPES: Final = 4


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's program; `line` is None where only the file is known."""

    file: str
    line: int | None = None
    text: str = ""

    @property
    def place(self) -> str:
        """The name of the file and the line, as findings cite it: `train.py:12`."""
        return f"{Path(self.file).name}:{'' if self.line is None else self.line}"


def line_of(finding: Finding) -> SourceLine | None:
    """Return the line of the operation that a finding names in its data, or None where it has none."""
    origin = finding.data.get("origin")
    line = origin.get("line") if isinstance(origin, Mapping) else None
    if not isinstance(line, Mapping) or not line.get("file"):
        return None
    number = line.get("line")
    text = next((str(line[name]) for name in ("text", "code", "source") if line.get(name)), "")
    return SourceLine(str(line["file"]), number if isinstance(number, int) else None, text)


def locate(run: Run, finding: Finding) -> SourceLine | None:
    """Return where in the user's program to look for a finding.

    That is the line that its text cites, the operation that it names, or else the script that was run, without a line.
    None where the run does not record a script.
    """
    cited = next((found for text in (finding.cause, finding.fix) for found in _CITED.findall(text)), None)
    if cited is None:
        return line_of(finding) or script_of(run)
    name, number = cited[0], int(cited[1])
    for known in _known_lines(run, finding):
        if Path(known.file).name == name:
            return SourceLine(known.file, number, known.text if known.line == number else "")
    return SourceLine(name, number)


def locate_ending(run: Run, ending: Ending) -> SourceLine | None:
    """Return the user's line that raised the exception which ended a training, or else the script."""
    found = ending.innermost
    return script_of(run) if found is None else SourceLine(found.file, found.line, found.code)


def script_of(run: Run) -> SourceLine | None:
    """Return the script that was run, or None where that is not known: in a notebook, or with `python -c`."""
    about = run.header.environment
    argv, directory = about.get("argv"), about.get("directory")
    first = argv[0] if isinstance(argv, list) and argv else None
    if not isinstance(first, str) or not first.endswith(".py") or not is_users_file(first):
        return None
    return SourceLine(str(Path(directory, first)) if isinstance(directory, str) else first)


def relative_to_checkout(run: Run, file: str, root: Path) -> str:
    """Return the path of a file below `root`, or below the folder in which the training ran; else as it is.

    The second is for a run that was recorded on another machine from a checkout of the same repository.
    """
    directory: Any = run.header.environment.get("directory")
    for folder in (root, Path(directory)) if isinstance(directory, str) and directory else (root,):
        if Path(file).is_relative_to(folder):
            return Path(file).relative_to(folder).as_posix()
    return file


def _known_lines(run: Run, finding: Finding) -> Iterator[SourceLine]:
    """Yield lines whose files are known by their full path, the nearest to the finding first."""
    for own in (line_of(finding), script_of(run)):
        if own is not None:
            yield own
    for folder in list(tape.folders(run.path).values())[-_MOST_TAPES:]:
        try:
            lines = tape.read(folder).lines
        except (SondeError, OSError):
            continue
        for line in lines:
            yield SourceLine(line.file, line.line, line.text)
