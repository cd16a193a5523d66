"""Paths and names of the files of a run.

run/
  run.json                      description of the run
  events.jsonl                  what happened, as rank 0 saw it
  findings.jsonl                what was found wrong, by rank 0
  telemetry/r00000/             one folder and one writer a rank
    writer.json                 the writer's heartbeat and status
    events.jsonl, findings.jsonl   (rank 1 and up)
    journal-000003.bin          open: appended step by step
    fingerprints.bin            hashes by which ranks are compared
    seg-000002.safetensors      sealed from journal-000002
    seg-000000-000001.safetensors   sealed from journals 0 to 1, compacted

A segment takes the place of the journals it was sealed from, and a segment over more journals that of those over fewer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.errors import RunDamaged

HEADER: Final = "run.json"
EVENTS: Final = "events.jsonl"
FINDINGS: Final = "findings.jsonl"
TELEMETRY: Final = "telemetry"
WRITER: Final = "writer.json"
DAMAGED: Final = ".damaged"  # appended to the name of a journal that was sealed without its unreadable parts

MAX_MISSING: Final = 1000

_RANK = re.compile(r"r(\d{5,9})")
_JOURNAL = re.compile(r"journal-(\d{6,12})\.bin")
_SEGMENT = re.compile(r"seg-(\d{6,12})(?:-(\d{6,12}))?\.safetensors")


def rank_folder(run: Path, rank: int) -> Path:
    """Return the folder that rank `rank` writes."""
    return run / TELEMETRY / f"r{rank:05d}"


def events_file(run: Path, rank: int) -> Path:
    """Return the file of rank `rank`'s events; rank 0's lies at the top, where people look first."""
    return run / EVENTS if rank == 0 else rank_folder(run, rank) / EVENTS


def findings_file(run: Path, rank: int) -> Path:
    """Return the file of what rank `rank` found wrong."""
    return run / FINDINGS if rank == 0 else rank_folder(run, rank) / FINDINGS


def rank_of(folder_name: str) -> int | None:
    """Return the rank that a folder is named after, or None."""
    match = _RANK.fullmatch(folder_name)
    return int(match[1]) if match else None


def ranks(run: Path) -> list[int]:
    """Return the ranks that have a folder, in order."""
    try:
        names = [entry.name for entry in (run / TELEMETRY).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(rank for name in names if (rank := rank_of(name)) is not None)


def journal_name(number: int) -> str:
    """Return the name of a journal."""
    return f"journal-{number:06d}.bin"


def journal_number(name: str) -> int | None:
    """Return the number in a journal's name, or None for another file."""
    match = _JOURNAL.fullmatch(name)
    return int(match[1]) if match else None


def segment_name(first: int, last: int) -> str:
    """Return the name of the segment that holds journals `first` to `last`."""
    return f"seg-{first:06d}.safetensors" if first == last else f"seg-{first:06d}-{last:06d}.safetensors"


def segment_range(name: str) -> tuple[int, int] | None:
    """Return the first and last journal that a segment holds, or None for another file."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    return (first, last) if first <= last else None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder that count, in order of what they hold."""

    segments: list[tuple[int, int, str]]
    """First and last journal, and name."""
    journals: list[tuple[int, str]]
    obsolete: list[str]
    """Files whose content is in another one already; a crash kept them from being deleted."""

    @property
    def next_number(self) -> int:
        """The number that the next journal gets."""
        return max([last + 1 for _, last, _ in self.segments] + [number + 1 for number, _ in self.journals], default=0)

    @property
    def missing(self) -> list[int]:
        """The journals, of those before the last, that neither a journal nor a segment accounts for."""
        spans = sorted([(first, last) for first, last, _ in self.segments] + [(n, n) for n, _ in self.journals])
        found: list[int] = []
        end = 0
        for first, last in spans:
            found.extend(range(end, min(first, end + MAX_MISSING)))
            end = last + 1
        return found[:MAX_MISSING]


def describe_missing(numbers: list[int]) -> str:
    """Describe which files are missing."""
    names = ", ".join(journal_name(number) for number in numbers[:3])
    more = ", ..." if len(numbers) > 3 else ""
    return f"{names}{more} or the segment made from it is missing"


def arrange(names: Iterable[str]) -> Listing:
    """Work out which files of a folder count."""
    names = list(names)
    found = sorted(((*span, name) for name in names if (span := segment_range(name))), key=lambda s: (s[0], -s[1]))
    segments: list[tuple[int, int, str]] = []
    obsolete: list[str] = []
    covered = -1  # the last journal that a segment so far holds
    for first, last, name in found:
        if first > covered:
            segments.append((first, last, name))
            covered = last
        else:
            obsolete.append(name)
    journals = []
    for number, name in sorted((n, name) for name in names if (n := journal_number(name)) is not None):
        if any(first <= number <= last for first, last, _ in segments):
            obsolete.append(name)
        else:
            journals.append((number, name))
    return Listing(segments, journals, obsolete)


def list_folder(folder: Path) -> Listing:
    """List a rank's folder.

    Raises:
        FileNotFoundError: There is none.
        RunDamaged: It is a link.

    """
    if folder.is_symlink():
        raise RunDamaged(f"{folder} is a link; links inside a run are not followed.")
    return arrange(entry.name for entry in folder.iterdir())


CAPTURES: Final = "debugger"
KEPT: Final = "samples"
VALIDATION_SCORES: Final = "validation_scores.json"
TEST: Final = "test"
TEST_SCORES: Final = "test_results.json"
EVALUATION_SCORES: Final = "evaluation_scores.json"

_EPOCH: Final = re.compile(r"epoch_(\d{1,9})")


def epoch_folder(run: Path, epoch: int) -> Path:
    """Return the folder of an epoch."""
    return run / f"epoch_{epoch}"


def epoch_of(folder_name: str) -> int | None:
    """Return the epoch that a folder is named after, or None.

    >>> epoch_of("epoch_4"), epoch_of("epochs")
    (4, None)
    """
    match = _EPOCH.fullmatch(folder_name)
    return int(match[1]) if match else None
