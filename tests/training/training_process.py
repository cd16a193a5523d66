"""Trains in processes that can be killed, forking each so that torch is imported once.

Reads one JSON object a line: `work_dir`, `resume`, and `kill_at` (a moment) with `kill_epoch` and `kill_batch`. The
child kills itself with SIGKILL at that moment. Answers each with how the child ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from made_training import make_config, network

from sonde.debuggers import FeatureMapDebugger, SequentialDebugger
from sonde.training import SupervisedTrainer


def debugger():
    items = [{"name": "hidden", "debugger_config": {"class": FeatureMapDebugger, "args": {"layer_name": "2"}}}]
    return {"class": SequentialDebugger, "args": {"debuggers_config": items, "page_size_mb": 256 / 2**20}}


def train(order):
    config = make_config(
        order["work_dir"], epochs=4, checkpoint_method=2, debugger=debugger(), watch=True, val_seeds=[1, 2, 3, 4]
    )
    trainer = SupervisedTrainer(config)

    def kill(glimpse):
        if glimpse.epoch == order["kill_epoch"] and glimpse.batch == order.get("kill_batch", glimpse.batch):
            os.kill(os.getpid(), signal.SIGKILL)

    if order.get("kill_at"):
        trainer.on(order["kill_at"], kill, on_error="raise")
    trainer.run(resume=order.get("resume", False))


def main():
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # the processes die here, the disk does not
    torch.optim.AdamW(network().parameters()).step()  # torch imports much of itself at the first step: once is enough
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            train(json.loads(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)  # tearing torch down takes a second


if __name__ == "__main__":
    main()
