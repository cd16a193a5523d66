"""Tags and a note that a user gives a run, in `labels.json` beside its description; they may change at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.errors import RunDamaged

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
