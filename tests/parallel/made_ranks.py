"""A run of three ranks, written by hand: readings that differ, step times with a late rank, and heartbeats."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sonde
from sonde.core import heartbeat
from sonde.core.heartbeat import Beat
from sonde.core.step_times import StepTimesFile
from sonde.store import layout


def write_ranks(path: Path) -> None:
    """Write 40 steps of three ranks: rank 1 waits 50 ms for its data, rank 2 leaves the others at step 21."""
    for rank in range(3):
        with sonde.open_session(run=path, rank=rank) as session:
            for step in range(40):
                session.log(loss=float(step), extra=10.0 * rank + step, parted=1.0 + (rank == 2 and step >= 20))
                session.step()
        times = StepTimesFile(layout.rank_folder(path, rank))
        late = 0.05 * (rank == 1)
        spent = {"data_wait": 0.001 + late, "forward": 0.02, "communication": 0.053 - late}
        times.append([(step, 0.0, spent) for step in range(1, 41)])
        times.close()


def write_beat(
    path: Path, rank: int, *, host: str = "elsewhere", since: float = 0.0, pid: int = 1, **more: Any
) -> None:
    """Write the heartbeat of a rank that made no progress for `since` seconds."""
    now = time.time()
    known: dict[str, Any] = {"phase": "forward", "step": 40, "stuck_after": 30.0, "device": "cuda:0", "memory": 1 << 30}
    written = Beat(rank=rank, world=3, host=host, pid=pid, time=now, since=now - since, **known | more)
    heartbeat.write(layout.rank_folder(path, rank), written)


def write_hang(path: Path) -> None:
    """Write heartbeats of a run that stands still: ranks 0 and 1 wait for rank 2, which left its stacks."""
    slow = {"interval": 3600.0, "step": 41}  # a busy machine may look at them much later, when others would be silent
    for rank in (0, 1):
        write_beat(path, rank, phase="communication", since=90, collective="all_reduce", collectives=7, **slow)
    write_beat(path, 2, phase="data_wait", since=95, where="train.py:12 in load", collectives=6, stacks=True, **slow)
    (layout.rank_folder(path, 2) / heartbeat.STACKS).write_text("Thread 1: in load\n")
