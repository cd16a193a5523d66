"""Which process of a distributed training this is, and of how many; so that its files do not take another's place."""

from __future__ import annotations

import os

from torch import distributed


def is_connected() -> bool:
    """Say whether torch.distributed is set up in this process."""
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
