"""Which process of a distributed training this is, and of how many; so that its files do not take another's place."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch import distributed

_asked: Final[Counter[str]] = Counter()
"""How often this process has asked about each thing; ranks agree on the n-th of theirs."""


def is_connected() -> bool:
    """Return whether torch.distributed is set up in this process."""
    return distributed.is_available() and distributed.is_initialized()


def this_rank() -> int:
    """Return this process's rank: from torch.distributed or, before that is set up, as the launcher says; else 0."""
    return distributed.get_rank() if is_connected() else int(os.environ.get("RANK", "0"))


def num_ranks() -> int:
    """Return how many processes train together, found in the same way; else 1."""
    return distributed.get_world_size() if is_connected() else int(os.environ.get("WORLD_SIZE", "1"))


def suffix(rank: int) -> str:
    """Return what the names of a rank's files end with; those of the first are the plain ones.

    >>> suffix(0), suffix(3)
    ('', '_rank3')
    """
    return f"_rank{rank}" if rank else ""


def folder_of(rank: int, shared: Path) -> Path:
    """Return where a rank keeps files that others would write too: the first in the folder they share, others below.

    >>> folder_of(0, Path("runs/a")).as_posix(), folder_of(2, Path("runs/a")).as_posix()
    ('runs/a', 'runs/a/rank2')
    """
    return shared / f"rank{rank}" if rank else shared


def agree(about: str, choose: Callable[[], str]) -> str:
    """Return what the first rank to ask chooses: all that ask as often get the same; empty if choosing failed there.

    The ranks must be connected. No rank waits for one that has not asked, so one of them may do without.
    """
    _asked[about] += 1
    key = f"sonde/{about}/{_asked[about]}"
    store: Any = distributed.distributed_c10d._get_default_store()
    if store.add(f"{key}/turn", 1) > 1:
        return str(store.get(f"{key}/choice").decode())  # there in a moment, if not yet
    choice = ""
    try:
        choice = choose()
    finally:
        store.set(f"{key}/choice", choice)
    return choice
