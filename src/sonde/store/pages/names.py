"""Paths and file names of pages.

debugger/
  writer.json             the writer's heartbeat and status
  page_0.safetensors      sealed: an ordinary safetensors file
  page_0.index            its records: structure, places, previews
  page_1.open             in progress: room for the header, then raw tensors
  page_1.journal          in progress: one record a datapoint, written after its tensors
  r00001/                 the same, of rank 1

Sealing renames `open` to `safetensors`, then `journal` to `index`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.store.layout import epoch_of

SEALED: Final = "safetensors"
INDEX: Final = "index"
OPEN: Final = "open"
JOURNAL: Final = "journal"

_FILE = re.compile(r"page_(0|[1-9]\d{0,8})\.(safetensors|index|open|journal)")
_PICKLED = re.compile(r"page_\d{1,9}\.pkl")
_RANK = re.compile(r"r(\d{5,9})")


def page_file(folder: Path, number: int, suffix: str) -> Path:
    """Return the path of one file of a page."""
    return folder / f"page_{number}.{suffix}"


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder that a rank writes; rank 0's is the folder itself, where people look first."""
    return folder if rank == 0 else folder / f"r{rank:05d}"


@dataclass(frozen=True, slots=True)
class Page:
    """The files of one page that are there."""

    number: int
    suffixes: frozenset[str]

    @property
    def is_sealed(self) -> bool:
        """Whether the page is finished."""
        return SEALED in self.suffixes

    @property
    def records(self) -> str | None:
        """The suffix of the file that holds its records, or None if it was lost."""
        return INDEX if INDEX in self.suffixes else JOURNAL if JOURNAL in self.suffixes else None


def arrange(files: Iterable[str]) -> list[Page]:
    """Return the pages that files belong to, in order."""
    found: dict[int, set[str]] = {}
    for name in files:
        match = _FILE.fullmatch(name)
        if match:
            found.setdefault(int(match[1]), set()).add(match[2])
    return [Page(number, frozenset(suffixes)) for number, suffixes in sorted(found.items())]


def list_pages(folder: Path) -> list[Page]:
    """Return the pages of a folder, in order; none if there is no folder."""
    try:
        return arrange(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return []


def rank_folders(folder: Path) -> list[Path]:
    """Return the folders of all ranks that have one, in order; the folder itself is rank 0's."""
    try:
        inside = sorted(entry.name for entry in folder.iterdir() if _RANK.fullmatch(entry.name))
    except NotADirectoryError:
        return [folder]
    return [folder, *(folder / name for name in inside)]


def pickled_pages(folder: Path) -> list[str]:
    """Return the names of pages that an older tool pickled; Sonde never opens them."""
    return sorted(entry.name for entry in folder.iterdir() if _PICKLED.fullmatch(entry.name)) if folder.is_dir() else []


def page_folders(run: Path) -> list[Path]:
    """Return the folders of a run that hold pages: those of the evaluation, then those of the epochs in order."""
    epochs = sorted((epoch, entry) for entry in run.iterdir() if (epoch := epoch_of(entry.name)) is not None)
    inside = [entry for parent in (run, *(entry for _, entry in epochs)) for entry in _folders(parent)]
    return [folder for folder in inside if any(list_pages(each) for each in rank_folders(folder))]


def _folders(parent: Path) -> list[Path]:
    return sorted(entry for entry in parent.iterdir() if entry.is_dir()) if parent.is_dir() else []
