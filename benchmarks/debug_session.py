"""What a debug session costs: 1,000 tracked tensors, every step and one in ten, beside the bare loop; and its memory.

python benchmarks/debug_session.py [--steps 50] [--rounds 3] [--long 10000]

Variants take turns, and the best of all rounds counts. `--long` trains that many steps with 1,000 tracked tensors and
tells the memory of the process on the way.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time

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
    x = torch.randn(batch, 64, generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps


def measure(config, steps):
    model, optimizer = make()
    if config is None:
        train(model, optimizer, 5, BATCH)
        return train(model, optimizer, steps, BATCH)
    with DebugSession(config, model, optimizer):
        train(model, optimizer, 10, BATCH)
        return train(model, optimizer, steps, BATCH)


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
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("sonde").setLevel(logging.ERROR)  # what it finds wrong with 250 linear layers is not of interest
    if args.rounds:
        compare(args.steps, args.rounds)
    for done, megabytes in memory(args.long) if args.long else ():
        print(f"after {done:6d} steps the process holds {megabytes:7.1f} MiB", flush=True)


def compare(steps, rounds):
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
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, config in variants.items():
            times[name].append(measure(config, steps))
    best = {name: min(found) for name, found in times.items()}
    bare = best["bare"]
    table = Table("session", "ms a step", "ratio", title=f"1,000 tensors, {steps} steps, best of {rounds}")
    for name, seconds in best.items():
        table.add_row(name, f"{1000 * seconds:.2f}", f"{seconds / bare:.3f}")
    Console().print(table)
    for which in ("", ", histograms and findings"):
        share = (best[f"one step in ten{which}"] - bare) / (best[f"every step{which}"] - bare)
        print(f"one step in ten costs {share:.0%} of every step{which}")


if __name__ == "__main__":
    main()
