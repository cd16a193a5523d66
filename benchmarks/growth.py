"""How the cost of watching grows: with parameters, batch size and number of tensors; and that memory stays flat.

python benchmarks/growth.py [--quick] [--per-tensor]

`--per-tensor` only reads how much processor time the training thread needs for each tensor that is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from programs import Program, gpt, many_small, mlp
from rounds import inside_ratio, interleave
from watchers import Watcher, bare, watched

import sonde
from sonde.records import HELD

VARIANTS: dict[str, Watcher] = {
    "bare": bare,
    "parameters, gradients": watched(what=("parameters", "gradients")),
    "default": watched(),
}


def table(title: str, makers: dict[str, Callable[[], Program]], rounds: int, steps: int) -> None:
    print(f"\n### {title}: 1 + time in hooks / bare step\n")
    print("| | bare ms | parameters, gradients | + updates, outputs | ms in hooks |\n|---|--:|--:|--:|--:|")
    for name, make in makers.items():
        timings = interleave(make, VARIANTS, rounds=rounds, steps=steps)
        base = timings["bare"]
        middle = sorted(base.wall_ms)[len(base.wall_ms) // 2]
        light, full = (inside_ratio(timings[key], base) or 1.0 for key in ("parameters, gradients", "default"))
        print(f"| {name} | {middle:.1f} | {light:.3f} | {full:.3f} | {(full - 1) * middle:.1f} |", flush=True)


def per_tensor(rounds: int = 9, steps: int = 40) -> None:
    """Print the processor time of the training thread for each recorded tensor: one thread, tensors of 32 x 32."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {"bare": [], "recorder": [], "recorder and diagnosis": []}
    tensors = 0
    for _ in range(rounds):
        for name, times in taken.items():
            program = many_small(tensors=100)
            with contextlib.ExitStack() as stack:
                if name != "bare":
                    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sonde-bench-"))
                    options = {"run": Path(folder) / "run", "budget": None, "diagnose": name != "recorder"}
                    session = stack.enter_context(sonde.watch(program.model, program.optimizer, **options))
                for _ in range(100):  # the diagnosis looks closest at the first steps
                    program.step()
                began = time.thread_time()
                for _ in range(steps):
                    program.step()
                times.append((time.thread_time() - began) / steps)
                if name != "bare":
                    session.flush()
                    tensors = sum(site.quantity in (*HELD, "output") for site in sonde.open_run(session.path).sites)
    base = statistics.median(taken["bare"])
    print(f"\n### Processor time of the training thread, {tensors} tensors of 32 x 32, bare step {1e3 * base:.2f} ms\n")
    for name in ("recorder", "recorder and diagnosis"):
        more = statistics.median(taken[name]) - base
        print(f"{name}: {1 + more / base:.3f}, {1e6 * more / tensors:.2f} µs for each tensor")


def memory(steps: int) -> None:
    """Resident memory of a process that records `steps` steps of a small model: its slope after warming up."""
    process = psutil.Process()
    program = many_small(tensors=20, width=16, batch=8)
    samples = []
    with (
        tempfile.TemporaryDirectory(prefix="sonde-bench-") as folder,
        sonde.watch(program.model, program.optimizer, run=Path(folder) / "run") as session,
    ):
        for step in range(steps):
            session.log(loss=program.step())
            if step % (steps // 20) == 0:
                samples.append((step, process.memory_info().rss / 2**20))
    # The first quarter fills caches and the ring.
    settled = torch.tensor(samples[5:], dtype=torch.float64)
    steps_, sizes = settled.T
    slope = (((steps_ - steps_.mean()) * (sizes - sizes.mean())).sum() / ((steps_ - steps_.mean()) ** 2).sum()).item()
    print(f"\n### Memory over {steps} steps\n")
    print(f"RSS {samples[0][1]:.0f} MB at the start, {samples[-1][1]:.0f} MB at the end; ")
    print(
        f"slope after the first quarter {slope * 1000:.3f} MB per 1,000 steps; {session.dropped_steps} steps dropped."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--per-tensor", action="store_true")
    options = parser.parse_args()
    quick = options.quick
    if options.per_tensor:
        per_tensor()
        return
    rounds, steps = (3, 2) if quick else (5, 3)
    widths = {"1 M": 448, "10 M": 1536} if quick else {"1 M": 448, "10 M": 1536, "30 M": 2688, "100 M": 4928}
    table("Parameters (MLP, batch 64)", {k: lambda w=w: mlp(width=w) for k, w in widths.items()}, rounds, steps)
    batches = (1, 8) if quick else (1, 2, 4, 8, 16)
    table("Batch (GPT-like, 128 tokens each)", {str(b): lambda b=b: gpt(batch=b) for b in batches}, rounds, steps)
    counts = (100, 1000) if quick else (100, 1000, 10_000)
    table("Number of tensors (32 x 32)", {str(n): lambda n=n: many_small(tensors=n) for n in counts}, rounds, steps)
    memory(2_000 if quick else 20_000)


if __name__ == "__main__":
    main()
