"""Where a debug session writes: a folder of its own, which the ranks of a distributed training share."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sonde.ranks import is_connected, num_ranks, this_rank

_opened: Final[Counter[str]] = Counter()
"""How many sessions this process has opened in each folder; ranks agree on the n-th of theirs."""


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
    rank, store = _rank(), _store()
    if rank is None:
        return Place(_make_free(parent, ""))
    if store is None:
        return Place(_make_free(parent, f"-rank{rank}"), rank)
    _opened[str(parent)] += 1
    name = _agree(store, f"sonde/debug-session/{parent}/{_opened[str(parent)]}", parent)
    return Place(parent / name, rank, rank) if name else Place(_make_free(parent, f"-rank{rank}"), rank)


def _agree(store: Any, key: str, parent: Path) -> str:
    """Return the name of the folder that ranks share; empty if the first of them could not make it."""
    if store.add(f"{key}/turn", 1) > 1:
        return str(store.get(f"{key}/name").decode())  # there in a moment, if not yet
    name = ""
    try:
        name = _make_free(parent, "").name
    finally:
        store.set(f"{key}/name", name)
    return name


def _make_free(parent: Path, suffix: str) -> Path:
    """Make a folder that was not there; of two processes that try at once only one gets it."""
    parent.mkdir(parents=True, exist_ok=True)
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


def _store() -> Any:
    """Return what ranks can leave words for each other in; None before they are connected."""
    if not is_connected():
        return None
    return torch.distributed.distributed_c10d._get_default_store()
