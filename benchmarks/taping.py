"""What taping a step costs: processor time of a taped step over that of the same step untaped, in one session.

    python benchmarks/taping.py [--rounds 12] [--profile PROGRAM]

The thread's own clock is read, so other work on the machine does not count. A tape is written by another thread.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
import statistics
import tempfile
import time
from pathlib import Path

import programs
import torch

import sonde

PROGRAMS = {
    "gpt": programs.gpt,
    "gpt, 2 layers, batch 2 x 32": lambda: programs.gpt(layers=2, width=64, batch=2, context=32),
    "mlp": programs.mlp,
    "cnn": programs.cnn,
    "cnn, batch 2": lambda: programs.cnn(batch=2),
}


def measure(name: str, rounds: int, profile: cProfile.Profile | None = None) -> tuple[float, list[float], int]:
    """Return the median of a step in ms, the ratios of taped steps to the untaped step before, and the operations."""
    program = PROGRAMS[name]()
    ratios, plain = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        sonde.watch(program.model, program.optimizer, run=Path(folder) / "run", diagnose=True, budget=None) as session,
    ):
        for _ in range(24):  # the early tapes, and what is looked at in the first steps
            program.step()
        for _ in range(rounds):
            for _ in range(3):
                began = time.thread_time()
                program.step()
                before = time.thread_time() - began
            plain.append(before)
            session.tape()
            program.step()  # the tape begins when this step ends
            if profile is not None:
                profile.enable()
            began = time.thread_time()
            program.step()
            ratios.append((time.thread_time() - began) / before)
            if profile is not None:
                profile.disable()
        session.flush()
        operations = len(sonde.open_run(Path(folder) / "run").tape().ops)
    return 1000 * statistics.median(plain), ratios, operations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--profile", choices=PROGRAMS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("sonde").setLevel(logging.ERROR)
    if options.profile:
        profile = cProfile.Profile()
        measure(options.profile, options.rounds, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    print("| program | operations | step, ms | taped, ratio (quartiles) |\n|---|--:|--:|--:|")
    for name in PROGRAMS:
        step, ratios, operations = measure(name, options.rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {operations:,} | {step:.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)


if __name__ == "__main__":
    main()
