"""What the vital signs of a diagnosis cost: CPU time of the training thread in each of their parts, per step.

    python benchmarks/vitals.py [--steps 63] [--only gpt|mlp|cnn] [--device cuda]

The first 21 steps, in which most is looked at every time, are stated apart from the rest.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from programs import Program, cnn, gpt, mlp

import sonde
from sonde.taps.clipping import ClippingTap
from sonde.taps.leftovers import Trace
from sonde.taps.losses import LossTap
from sonde.taps.vital_signs import VitalSigns

PROGRAMS = {"gpt": gpt, "mlp": mlp, "cnn": cnn}
EARLY = 21
PARTS = {
    "passes: inputs, order, modes, units": (VitalSigns, ("_begin_pass", "_enter", "_leave", "_end_pass")),
    "losses and labels": (LossTap, ("_see",)),
    "before backward passes": (VitalSigns, ("_before_backward",)),
    "gradients, one by one": (Trace, ("saw_accumulation",)),
    "around optimizer steps": (VitalSigns, ("_before_step", "_after_step")),
    "clipping": (ClippingTap, ("_see",)),
    "end of step, facts": (VitalSigns, ("_end_step",)),
}


class Clock:
    """Adds up the CPU time of this thread inside functions, less what asking for it costs."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._inside = False
        begin = time.thread_time()
        for _ in range(1000):
            time.thread_time()
        self._cost = (time.thread_time() - begin) / 1000

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += max(0.0, time.thread_time() - begin - self._cost)
                self._inside = False

        return timed


def on_device(program: Program, device: str) -> Program:
    """Move a program; a batch is moved where it is made."""
    if device == "cpu":
        return program
    program.model.to(device)
    make = program.batch
    program.batch = lambda: tuple(part.to(device) for part in make())  # type: ignore[assignment, return-value]
    return program


def measure(name: str, steps: int, device: str, clock: Clock) -> None:
    torch.set_default_device(device)  # the GPT-like model makes its positions in its forward
    program = on_device(PROGRAMS[name](), device)
    for _ in range(3):
        program.step()
    bare = [_timed(program.step) for _ in range(10)]
    clock.seconds.clear()
    early: collections.Counter[str] = collections.Counter()
    with (
        tempfile.TemporaryDirectory(prefix="sonde-bench-") as folder,
        sonde.watch(program.model, program.optimizer, run=f"{folder}/run") as session,
    ):
        for step in range(steps):
            session.log(loss=program.step())
            if step + 1 == EARLY:
                early = clock.seconds.copy()
    base = statistics.median(bare)
    print(f"\n### {name} on {device}: bare step {base * 1e3:.1f} ms\n")
    print(f"| part | ms per step, first {EARLY} | ms per step, then |\n|---|--:|--:|")
    late = clock.seconds - early
    for part in PARTS:
        print(f"| {part} | {early[part] / EARLY * 1e3:.3f} | {late[part] / (steps - EARLY) * 1e3:.3f} |")
    first, then = early.total() / EARLY, late.total() / (steps - EARLY)
    print(f"| all, and their share of the bare step | {first * 1e3:.2f}: {first / base:.1%} | ", end="")
    print(f"{then * 1e3:.2f}: {then / base:.1%} |", flush=True)


def _timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=63)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    clock = Clock()
    for part, (owner, names) in PARTS.items():
        for method in names:
            setattr(owner, method, clock.around(part, getattr(owner, method)))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in [options.only] if options.only else PROGRAMS:
        measure(name, options.steps, options.device, clock)


if __name__ == "__main__":
    main()
