"""What a debug session costs: 1,000 tracked tensors, every step and one in ten, beside the bare loop; and its memory.

python benchmarks/debug_session.py [--turns 8] [--long 10000]

Variants take turns on one and the same model: where its memory lies makes a difference of several percent, more than
some of them cost. A step's time is the median over all turns of the steps at the same place among ten, so that the one
step in ten that is looked at is not lost; what stands in the table is the mean of the ten. `--long` trains that many
steps with 1,000 tracked tensors and tells the memory of the process on the way.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
from contextlib import nullcontext

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from sonde.debug import DebugConfig, DebugSession

LAYERS = 250  # each has a weight and a bias, and gradients of both: 1,000 tensors
BATCH = 512
QUICK_BATCH = 32  # for many steps: what memory does depends on the number of steps, not on how long they take


def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def train(model, optimizer, steps, batch):
    """Train, and return the seconds of each step."""
    x = torch.randn(batch, 64, generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def measure(config, model, optimizer):
    """Return the seconds of twenty steps, ten in a row, once a session is under way, and those in hooks per step."""
    with nullcontext() if config is None else DebugSession(config, model, optimizer) as session:
        train(model, optimizer, 30, BATCH)  # most is looked at in the first steps
        spent = own_seconds(session)
        steps = np.reshape(train(model, optimizer, 20, BATCH), (2, 10))
        return steps, (own_seconds(session) - spent) / 20


def own_seconds(session):
    """Return how long the training thread has been in Sonde's hooks so far, by the clock around them."""
    return 0.0 if session is None else session._recording._pipeline.guard.meter.total()


def quiet():
    torch.set_num_threads(1)
    logging.getLogger("sonde").setLevel(logging.ERROR)  # what it finds wrong with 250 linear layers is not of interest


def rss():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def memory(steps):
    """Train long with 1,000 tracked tensors; yield steps done and MiB held, ten times."""
    model, optimizer = make()
    config = DebugConfig(max_tracked_tensors=1000, max_gradient_history=100)
    with DebugSession(config, model, optimizer) as session:
        for part in range(1, 11):
            train(model, optimizer, steps // 10, QUICK_BATCH)
            session.snapshot()
            yield part * (steps // 10), rss()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--long", type=int, default=0)
    args = parser.parse_args()
    quiet()
    if args.turns:
        compare(args.turns)
    for done, megabytes in memory(args.long) if args.long else ():
        print(f"after {done:6d} steps the process holds {megabytes:7.1f} MiB", flush=True)


def compare(turns):
    """Print what each way of watching costs."""
    numbers_only = {"histogram": False, "enable_model_diagnostics": False}
    variants = {
        "bare": None,
        "every step": DebugConfig(**numbers_only),
        "one step in ten": DebugConfig(sampling_rate=0.1, **numbers_only),
        "every step, histograms and findings": DebugConfig(),
        "one step in ten, histograms and findings": DebugConfig(sampling_rate=0.1),
        "bare again": None,
    }
    model, optimizer = make()
    rows, own = {name: [] for name in variants}, {name: [] for name in variants}
    for _ in range(turns):
        for name, config in variants.items():
            steps, seconds = measure(config, model, optimizer)
            rows[name].extend(steps)
            own[name].append(seconds)
    taken = {name: float(np.median(found, axis=0).mean()) for name, found in rows.items()}
    bare = (taken["bare"] + taken["bare again"]) / 2
    hooks = {name: float(np.median(found)) for name, found in own.items()}
    table = Table("session", "ms a step", "ratio", "ms in hooks", title=f"1,000 tensors, {turns} turns of twenty steps")
    for name, seconds in taken.items():
        table.add_row(name, f"{1000 * seconds:.2f}", f"{seconds / bare:.3f}", f"{1000 * hooks[name]:.2f}")
    Console().print(table)
    for which in ("", ", histograms and findings"):
        share = (taken[f"one step in ten{which}"] - bare) / (taken[f"every step{which}"] - bare)
        clocked = hooks[f"one step in ten{which}"] / hooks[f"every step{which}"]
        print(
            f"one step in ten costs {share:.0%} of every step{which} in wall time, {clocked:.0%} by the clock in hooks"
        )


if __name__ == "__main__":
    main()
