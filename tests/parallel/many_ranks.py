"""Trainings of several ranks at once, in processes that share one import of torch and are not waited for."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

StartRanks = Callable[[str, Path, int], list[int]]
"""Starts a program in so many ranks; it knows `torch`, `dist`, `nn`, `sonde`, its `rank`, `device` and `folder`."""

_BEFORE = """
# NCCL demands a GPU for each rank.
device = torch.device(*(("cuda", rank) if torch.cuda.device_count() >= world else ("cpu",)))
if device.type == "cuda":
    torch.cuda.set_device(device)
backend = "nccl" if device.type == "cuda" else "gloo"
dist.init_process_group(backend, init_method=f"file://{folder}.meeting", rank=rank, world_size=world)
torch.manual_seed(0)
"""


@contextmanager
def many_ranks() -> Iterator[StartRanks]:
    """Start a process that imports torch, and hand out a function that forks ranks from it. They end with the block."""
    from tests.waiting import ask, started

    with started([sys.executable, __file__]) as process:
        yield lambda program, folder, world: json.loads(ask(process, json.dumps([program, str(folder), world])))


def _fork(program: str, folder: str, world: int) -> list[int]:
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            log = os.open(f"{folder}.log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            known = {"rank": rank, "world": world, "folder": folder, "__name__": "__main__"}
            try:
                exec(_BEFORE + program, globals() | known)
            finally:
                sys.stderr.flush()
                os._exit(0)
        pids.append(pid)
    return pids


if __name__ == "__main__":
    import time  # noqa: F401 - for the programs, as are the others

    import torch
    import torch._dynamo
    import torch.distributed as dist  # noqa: F401
    from torch import nn  # noqa: F401

    import sonde.session
    import sonde.watching  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    for line in sys.stdin:
        print(json.dumps(_fork(*json.loads(line))), flush=True)
    os._exit(0)  # tearing torch down takes seconds
