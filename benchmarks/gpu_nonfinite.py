"""What watching for non-finite values costs on a GPU: the step of a small GPT with and without it, interleaved.

python benchmarks/gpu_nonfinite.py [--rounds 9] [--steps 20]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch
from nonfinite import by_part, watch
from programs import GPT, Program

import sonde

WARM_UP = 25  # the diagnosis looks closely at the first twenty steps


def gpt(**options: bool) -> Program:
    torch.manual_seed(0)
    model = GPT(12, 768, 12, 50304, 512).cuda()
    model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)
    text = torch.randint(50304, (8, 513), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, **options)
    return Program(model, optimizer, lambda: (text[:, :-1], text[:, 1:]))


def timed(program: Program, steps: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        program.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def measure(kind: str, rounds: int, steps: int) -> None:
    program = gpt(**{kind: True})
    program.model.position.forward = lambda index: torch.nn.functional.embedding(
        index.cuda(), program.model.position.weight
    )
    timed(program, 5)
    guards = ("skip", "stop", "stop_late")
    variants: dict[str, dict[str, str] | None] = {"bare": None, "bare again": None, "watched": {}}
    variants |= {f"watched, guard={guard!r}": {"guard": guard} for guard in guards}
    times: dict[str, list[float]] = {name: [] for name in variants}
    hooks: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                spent: list[float] = []
                if variants[name] is not None:
                    session, spent = watch(program, Path(folder) / "run", diagnose=True, **variants[name])
                    stack.enter_context(session)
                timed(program, WARM_UP)
                spent.clear()
                by_part.clear()
                times[name].append(timed(program, steps))
                hooks[name].append(sum(spent) / steps)
    bare, watched = (statistics.median(times[name]) for name in ("bare", "watched"))
    for name in variants:
        middle, inside = statistics.median(times[name]), statistics.median(hooks[name])
        print(
            f"| {kind} | {name} | {middle * 1e3:.2f} | {middle / bare:.3f} | {middle / watched:.3f} "
            f"| {inside * 1e6:.0f} | {inside / bare:.2%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, sonde {sonde.__version__}, {torch.cuda.get_device_name()}")
    print("| AdamW | variant | ms | to bare | to watched | watcher in the training thread, µs | share |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for kind in ("fused", "foreach"):
        measure(kind, options.rounds, options.steps)


if __name__ == "__main__":
    main()
