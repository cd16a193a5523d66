"""What watching for non-finite values costs in a training step, and what repeating one step costs when it is needed.

    python benchmarks/nonfinite.py [--steps 20]

Whole loops on a shared machine differ by more than this costs, so a clock runs around the watcher's own code: its part
of every hook, and the hooks that only find that a module is none of its business.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from programs import Program, cnn, gpt, mlp

import sonde
from sonde.forensics.repeat import repeat
from sonde.hooks.guard import Guard

PARTS = {"keeping passes", "looking at losses", "looking at gradients", "looking at updates"}


by_part: dict[str, float] = {}


def watch(program: Program, folder: Path, **options: Any) -> tuple[sonde.Session, list[float]]:
    """Start a session whose watcher notes how long it takes, call by call."""
    spent: list[float] = []
    wrap = Guard.wrap

    def timed(self: Guard, part: str, function: Callable[..., None]) -> Callable[..., None]:
        guarded = wrap(self, part, function)
        if part not in PARTS:
            return guarded

        def call(*args: Any) -> None:
            begin = time.perf_counter()
            guarded(*args)
            spent.append(time.perf_counter() - begin)
            by_part[part] = by_part.get(part, 0.0) + spent[-1]

        return call

    Guard.wrap = timed
    try:
        return sonde.watch(program.model, program.optimizer, run=folder, **options), spent
    finally:
        Guard.wrap = wrap


def idle_hooks(program: Program) -> float:
    """Seconds per step that two hooks cost which only look whether a module is one of theirs."""
    roots = {id(program.model): program.model}
    model = program.model

    def before(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or id(module) not in roots:
            return

    modules = [module for module in model.modules() if module is not model]
    begin = time.perf_counter()
    for _ in range(20):
        for module in modules:
            before(module, ())
            before(module, ())
    return (time.perf_counter() - begin) / 20


def measure(name: str, make: Callable[[], Program], steps: int) -> None:
    program = make()
    program.step()
    bare = statistics.median(_timed(program.step) for _ in range(steps))
    row = [name, f"{bare * 1e3:.1f}"]
    for options in ({}, {"guard": "skip"}):
        with tempfile.TemporaryDirectory() as folder:
            session, spent = watch(program, Path(folder) / "run", **options)
            with session:
                sums = []
                for _ in range(steps + 2):
                    spent.clear()
                    program.step()
                    sums.append(sum(spent))
                if not options:
                    x, _ = program.batch()
                    program.model(x)
                    kept = session._pipeline.forensics.watcher.keeper.passes[-1]
                    again = _timed(lambda: repeat(kept, {}, backward=False))  # noqa: B023 - called at once
        cost = statistics.median(sums[2:]) + idle_hooks(program)
        row += [f"{cost * 1e6:.0f}", f"{cost / bare:.2%}"]
    print(f"| {' | '.join(row)} | {again / bare:.1f} |")


def _timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print("| program | bare step, ms | watcher, µs | share | with guard, µs | share | one repeated forward, steps |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, make in {"gpt": gpt, "mlp": mlp, "cnn": cnn}.items():
        measure(name, make, options.steps)


if __name__ == "__main__":
    main()
