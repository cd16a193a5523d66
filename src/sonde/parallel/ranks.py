"""Find the rank of this process and the number of ranks, so that each writes files of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import distributed

_asked: Final[Counter[str]] = Counter()
"""How many times this process has asked about each key; ranks agree on the n-th time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The place of this process among those that train together."""

    rank: int = 0
    world: int = 1
    local_rank: int | None = None
    """Its number on this machine, where the launcher names it."""
    source: str = ""
    """Where the rank is from: `torch.distributed`, `RANK`, `SLURM_PROCID` and so on; empty if nothing names one."""
    is_known: bool = True
    """False if there are several processes and the number of this one is unknown."""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables by which a launcher numbers its processes."""

    rank: str
    world: str
    local_rank: str


_LAUNCHERS: Final = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Accelerate, and most programs by hand
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    _Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # after SLURM, which may set it too
)


def identity() -> Identity:
    """Return which process this is: from torch.distributed or, before that is set up, from the launcher's variables."""
    if is_connected():
        return Identity(
            rank=distributed.get_rank(),
            world=distributed.get_world_size(),
            local_rank=_number("LOCAL_RANK"),
            source="torch.distributed",
        )
    found = _from_node() if _number("RANK") is None else None
    return found or _from_launcher() or Identity(is_known=(_number("WORLD_SIZE") or 1) == 1)


def _from_launcher() -> Identity | None:
    for launcher in _LAUNCHERS:
        rank = _number(launcher.rank)
        if rank is not None:
            return Identity(
                rank=rank,
                world=max(_number(launcher.world) or 1, rank + 1),
                local_rank=_number(launcher.local_rank),
                source=launcher.rank,
            )
    return None


def _from_node() -> Identity | None:
    """Return the identity from the number of the machine and the number on it, as for Lightning's child processes.

    Without WORLD_SIZE, LOCAL_RANK alone may be left over from something else.
    """
    local_rank, world = _number("LOCAL_RANK"), _number("WORLD_SIZE")
    if local_rank is None or world is None:
        return None
    node = _first_number("NODE_RANK", "GROUP_RANK", "SLURM_NODEID") or 0
    per_node = _number("LOCAL_WORLD_SIZE")
    nodes = _first_number("NNODES", "NUM_NODES", "GROUP_WORLD_SIZE", "SLURM_NNODES")
    if per_node is None and nodes:
        per_node = world // nodes
    if node and not per_node:
        return Identity(world=world, local_rank=local_rank, is_known=False)
    rank = node * (per_node or 0) + local_rank
    return Identity(rank=rank, world=max(world, rank + 1), local_rank=local_rank, source="LOCAL_RANK")


def _number(variable: str) -> int | None:
    """Return a variable of the environment as a whole number; None if it is missing or something else."""
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _first_number(*variables: str) -> int | None:
    return next((number for name in variables if (number := _number(name)) is not None), None)


def is_connected() -> bool:
    """Return whether torch.distributed is set up in this process."""
    return distributed.is_available() and distributed.is_initialized()


def this_rank() -> int:
    """Return this process's rank; 0 if nothing names one."""
    return identity().rank


def num_ranks() -> int:
    """Return how many processes train together, found in the same way; else 1."""
    return identity().world


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
