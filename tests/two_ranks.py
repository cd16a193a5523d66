"""A distributed training of two ranks, in processes that share one import of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol


class RunTwoRanks(Protocol):
    """Runs imports, and a program in each rank; it knows `torch`, `dist`, `nn`, its `rank` and the `folder`, a text."""

    def __call__(self, imports: str, program: str, folder: Path, *, ranks: int = 2, backend: str = "gloo") -> None:
        """Run the program, and wait until all ranks have ended."""


def backend_for(ranks: int) -> str:
    """Return `nccl` where each rank can have a GPU of its own, which NCCL demands; `gloo` elsewhere."""
    import torch

    return "nccl" if torch.cuda.device_count() >= ranks else "gloo"


_BEFORE = """
{imports}
folder = {folder!r}
children = []
rank = 0
for number in range(1, {ranks}):
    children.append(os.fork())
    if children[-1] == 0:
        rank, children = number, []
        break
if {backend!r} == "nccl":
    torch.cuda.set_device(rank)
# Not by a port: somebody else could have taken it.
dist.init_process_group({backend!r}, init_method=f"file://{{folder}}.meeting", rank=rank, world_size={ranks})
torch.manual_seed(0)
"""
_AFTER = """
dist.destroy_process_group()
os._exit(any([os.waitpid(child, 0)[1] for child in children]))  # tearing torch down takes a second
"""


@contextmanager
def two_ranks() -> Iterator[RunTwoRanks]:
    """Start a process that imports torch, and hand out a function that runs programs in forks of it.

    Ranks that hang are killed with that process, and the next program gets a new one.
    """
    from tests.waiting import ask, started

    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # programs may import what tests share
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process: subprocess.Popen[str] | None = None

    def run(imports: str, program: str, folder: Path, *, ranks: int = 2, backend: str = "gloo") -> None:
        nonlocal process
        code = _BEFORE.format(imports=imports, folder=str(folder), ranks=ranks, backend=backend) + program + _AFTER
        if process is None or process.poll() is not None:
            process = running.enter_context(started([sys.executable, __file__], env=environment))
        assert ask(process, json.dumps(code)) == "0\n", "a rank has failed; its words are on standard error"

    with ExitStack() as running:
        yield run


def _next_program() -> str:
    """Fork for each line that comes, and return its program in the child; end when no more come."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            return str(json.loads(line))
        print(os.waitpid(child, 0)[1], flush=True)
    os._exit(0)


if __name__ == "__main__":
    # What every program would import, and what torch imports when the first optimizer is made.
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from torch import nn

    import sonde.debug
    import sonde.debuggers
    import sonde.pytorch_debugging
    import sonde.session
    import sonde.training  # noqa: F401

    torch.set_num_threads(1)
    exec(_next_program(), {"os": os, "torch": torch, "dist": dist, "nn": nn, "__name__": "__main__"})
