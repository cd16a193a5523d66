"""What the live diagnosis adds to the recorder on the GPT-like model, once a run is under way.

    python benchmarks/diagnosis.py [--steps 20] [--rounds 3]

Two sessions of one process take turns, each on a model of its own, so that both are well past their first steps, where
more is looked at. Wall time is of the whole step; "inside" is a clock around Sonde's own hooks over the bare step.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import watchers
from programs import gpt
from watchers import bare, watched

WARM_UP = 30
VARIANTS = {"bare": bare, "recorder": watched(), "recorder and diagnosis": watched(diagnose=True), "bare again": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        programs = {name: gpt() for name in VARIANTS}
        after = {
            name: stack.enter_context(watcher(programs[name], scratch / str(number)))
            for number, (name, watcher) in enumerate(VARIANTS.items())
        }
        for name, program in programs.items():
            for _ in range(WARM_UP if not name.startswith("bare") else 2):
                after[name](program.step())
        for _ in range(options.rounds):
            for name, program in programs.items():
                began, before = time.perf_counter(), watchers.inside
                for _ in range(options.steps):
                    after[name](program.step())
                wall = (time.perf_counter() - began) / options.steps
                times[name].append((wall, (watchers.inside - before) / options.steps))
    base = [wall for wall, _ in times["bare"]]
    print("| variant | ms per step | ratio | inside |\n|---|--:|--:|--:|")
    for name, found in times.items():
        ratio = statistics.median(wall / bare_wall for (wall, _), bare_wall in zip(found, base, strict=True))
        inside = statistics.median(own for _, own in found) / statistics.median(base)
        wall = statistics.median(wall for wall, _ in found)
        print(f"| {name} | {1000 * wall:.1f} | **{ratio:.3f}** | {1 + inside:.3f} |")


if __name__ == "__main__":
    main()
