"""What a debug session costs: 1,000 tracked tensors, every step and one in ten, beside the bare loop; and its memory.

python benchmarks/debug_session.py [--steps 10000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import gc
import time

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from sonde.debug import DebugConfig, DebugSession

LAYERS = 250  # each has a weight and a bias, and gradients of both: 1,000 tensors


def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def train(model, optimizer, steps):
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps


def measure(config, steps):
    model, optimizer = make()
    if config is None:
        return train(model, optimizer, steps)
    with DebugSession(config, model, optimizer):
        return train(model, optimizer, steps)


def rss():
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def memory(steps):
    """Return the memory after a tenth, a half and all of the steps."""
    model, optimizer = make()
    found = []
    with DebugSession(DebugConfig(max_tracked_tensors=1000), model, optimizer) as session:
        done = 0
        for share in (0.1, 0.5, 1.0):
            train(model, optimizer, int(steps * share) - done)
            done = int(steps * share)
            session.snapshot()
            found.append((done, rss()))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    no_histogram = {"histogram": False, "enable_model_diagnostics": False}
    variants = {
        "bare": None,
        "every step": DebugConfig(**no_histogram),
        "every step, histograms and findings": DebugConfig(),
        "one step in ten (sampling_rate=0.1)": DebugConfig(sampling_rate=0.1, **no_histogram),
    }
    times = {name: [] for name in variants}
    steps = max(50, args.steps // 40)
    for _ in range(args.rounds):
        for name, config in variants.items():
            times[name].append(measure(config, steps))
    table = Table("session", "ms a step", "ratio", title=f"1,000 tensors, {steps} steps, best of {args.rounds}")
    bare = min(times["bare"])
    for name, found in times.items():
        table.add_row(name, f"{1000 * min(found):.2f}", f"{min(found) / bare:.3f}")
    Console().print(table)
    for done, megabytes in memory(args.steps):
        print(f"after {done:6d} steps the process holds {megabytes:7.1f} MiB")


if __name__ == "__main__":
    main()
