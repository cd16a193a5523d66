"""Where a debug session writes: a folder of its own, which the ranks of a distributed training share."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import OptionError
from sonde.ranks import agree, is_connected, num_ranks, this_rank


@dataclass(frozen=True, slots=True)
class Place:
    """A run's folder, and as which rank to write into it."""

    folder: Path
    rank: int = 0
    write_as: int = 0
    """The rank within the run: 0 where ranks could not agree on one run, and each writes a run of its own."""


def take_folder(parent: Path) -> Place:
    """Take the first free `session-N` in a folder.

    Ranks of a training take the same one, in which each has a part of its own. They agree through the store of
    torch.distributed: the first to come makes the folder and leaves its name. A rank may do without a session.
    """
    rank = _rank()
    if rank is None:
        return Place(_make_free(parent, ""))
    name = agree(f"debug-session/{parent}", lambda: _make_free(parent, "").name) if is_connected() else ""
    return Place(parent / name, rank, rank) if name else Place(_make_free(parent, f"-rank{rank}"), rank)


def _make_free(parent: Path, suffix: str) -> Path:
    """Make a folder that was not there; of two processes that try at once only one gets it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise OptionError(f"output_dir={str(parent)!r} cannot be a folder: {reason}. Choose another.") from None
    for number in itertools.count(1):
        folder = parent / f"session-{number}{suffix}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("counting never ends")


def _rank() -> int | None:
    """Return the rank of this process; None if it is the only one."""
    told = is_connected() or (num_ranks() > 1 and "RANK" in os.environ)
    return this_rank() if told else None
