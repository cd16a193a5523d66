"""What the sensors of a diagnosis cost: CPU time of the training thread in each of them, per step.

    python benchmarks/vitals.py [--steps 63] [--only gpt|mlp|cnn] [--device cuda]

The first 21 steps, in which most sensors look every time, are stated apart from the rest.
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
from sonde.sensors.catalogue import SENSORS
from sonde.sensors.dispatcher import Sensors
from sonde.sensors.loop import Trace
from sonde.sensors.loss_calls import LossCalls
from sonde.sensors.sensor import Sensor

PROGRAMS = {"gpt": gpt, "mlp": mlp, "cnn": cnn}
EARLY = 21
MOMENTS = tuple(name for name in vars(Sensor) if name.startswith("on_"))
PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    kind.__name__: (kind, tuple(name for name in MOMENTS if name in vars(kind))) for kind in SENSORS
}
PARTS |= {
    "Leftovers, at each gradient": (Trace, ("saw_accumulation",)),
    "recording losses": (LossCalls, ("_see",)),
    "calling sensors, stating facts": (
        Sensors,
        ("_begin_pass", "enter", "leave", "_end_pass", "_before_backward", "_before_step", "_after_step", "_end_step"),
    ),
}


class Clock:
    """Adds up the CPU time of this thread inside functions, without that of timed functions inside them."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._inner = [0.0]
        begin = time.thread_time()
        for _ in range(1000):
            time.thread_time()
        self._cost = (time.thread_time() - begin) / 1000

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - begin
                self.seconds[part] += max(0.0, spent - self._inner.pop() - self._cost)
                self._inner[-1] += spent + self._cost

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
    for part in sorted(PARTS, key=lambda part: -early[part]):
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
