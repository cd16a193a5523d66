"""`run.json`, the description of a run, and `labels.json`, the tags and the note that a user gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.core.schema import SCHEMA_VERSION
from sonde.errors import RunDamaged, RunNotFound
from sonde.records import RunHeader
from sonde.store import layout
from sonde.store.remote import mirror

FORMAT: Final = "sonde-run"


def write_header(run: Path, header: RunHeader, *, replace: bool = True) -> None:
    """Write `run.json` in one step; without `replace` only if there is none."""
    write = files.write if replace else files.create
    write(run / layout.HEADER, {"format": FORMAT, **asdict(header)}, indent=1)


def read_header(run: Path) -> RunHeader:
    """Read `run.json`.

    Raises:
        RunNotFound: There is none.
        RunDamaged: It is something else, or of a later version.

    """
    path = run / layout.HEADER
    try:
        plain = files.read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        if mirror.is_mirrored(run):
            raise RunNotFound(f"There is no run at {mirror.shown(run)}.") from None
        raise RunNotFound(f"There is no run at {run}. {instead_of(run)}".rstrip()) from None
    if plain.get("format") != FORMAT:
        raise RunDamaged(f"{path} was not written by Sonde (its format is {plain.get('format')!r}, not {FORMAT!r}).")
    version = plain.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        known = "1" if SCHEMA_VERSION == 1 else f"1 to {SCHEMA_VERSION}"
        raise RunDamaged(f"{path} has schema version {version!r}; this Sonde reads {known}. Update Sonde.")
    return files.convert(plain, RunHeader, str(path), "the description of a run")


_MOST: Final = 4


def instead_of(path: Path) -> str:
    """Describe what is at a path that is not a run, or beside it, in a sentence or two."""
    if path.is_dir():
        inside = _runs_in(path)
        if inside:
            return f"It holds runs: {_listed(inside)}."
        return f"The folder has no {layout.HEADER}; a run is made by sonde.watch(model, run=...)."
    if not path.parent.is_dir():
        return f"There is no folder {path.parent} either."
    beside = _runs_in(path.parent)
    near = get_close_matches(path.name, beside, n=3)
    if near:
        return f"Nearest: {', '.join(str(path.parent / name) for name in near)}."
    return f"Runs beside it: {_listed(beside)}." if beside else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"


def _runs_in(folder: Path) -> list[str]:
    try:
        return sorted(child.name for child in folder.iterdir() if (child / layout.HEADER).is_file())
    except OSError:  # a folder that may not be listed has no hints to give
        return []


# --------------------------------------------------------------------------------
# Labels, which may change at any time.

LABELS: Final = "labels.json"
_MOST_TAGS: Final = 64
_MOST_SIGNS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Labels:
    """What a user wrote about a run."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(run: Path, config: Mapping[str, Any]) -> Labels:
    """Return the tags and the note of a run: from its file, else `tags` and `note` of the user's config."""
    plain = config
    if (run / LABELS).is_file():
        try:
            plain = files.read_object(run / LABELS)
        except (OSError, RunDamaged):
            return Labels()
    tags, note = plain.get("tags"), plain.get("note")
    listed = [each for each in tags if isinstance(each, str)] if isinstance(tags, list) else []
    return Labels(tuple(listed[:_MOST_TAGS]), note[:_MOST_SIGNS] if isinstance(note, str) else "")


def write_labels(run: Path, labels: Labels) -> None:
    """Replace the tags and the note of a run."""
    files.write(run / LABELS, {"tags": list(labels.tags), "note": labels.note})
