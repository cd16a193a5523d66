"""A distributed training of two ranks, in processes that share one import of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S

_BEFORE = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
{imports}
torch.set_num_threads(1)
folder = sys.argv[1]
child = os.fork()
rank = int(child == 0)
# Not by a port: somebody else could have taken it.
dist.init_process_group("gloo", init_method=f"file://{{folder}}.meeting", rank=rank, world_size=2)
torch.manual_seed(0)
"""
_AFTER = """
dist.destroy_process_group()
if child:
    sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def run_two_ranks(imports: str, program: str, folder: Path) -> None:
    """Run a program in both ranks; it knows `torch`, `dist`, `nn`, its `rank` and the `folder`, a text."""
    code = _BEFORE.format(imports=imports) + program + _AFTER
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=PATIENCE_S)
