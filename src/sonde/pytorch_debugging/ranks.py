"""Which process of a distributed training this is, so that its files do not take the place of another's."""

from __future__ import annotations

import os

from torch import distributed


def this_rank() -> int:
    """Return this process's rank: from torch.distributed or, before that is set up, as the launcher says; else 0."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def suffix(rank: int) -> str:
    """Return what the names of a rank's files end with; those of the first are the plain ones.

    >>> suffix(0), suffix(3)
    ('', '_rank3')
    """
    return f"_rank{rank}" if rank else ""
