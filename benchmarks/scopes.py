"""What step phases, memory tracking and the profiler cost, interleaved with the bare loop in one process.

    python benchmarks/scopes.py [--rounds 5] [--steps 4] [--only gpt|mlp]

*1 + own / bare* is a clock around Sonde's own code in the training thread over the bare step: two equal loops on a
shared machine differ by more than what is measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import watchers
from programs import Program, gpt, mlp
from rounds import inside_ratio, interleave, ratio
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from watchers import Watcher, bare

from sonde.probes import memory_scope, profile_scope
from sonde.probes.memory.scope import MemoryScope
from sonde.probes.profile.phases import PhaseClock, StepVitals


class Numbers:
    """A recorder that keeps nothing: what the session adds to a number is measured by overhead.py."""

    def site(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def put(self, site: int, value: float) -> None:
        pass


def timed(owner: type, *names: str) -> contextlib.AbstractContextManager[None]:
    """Count the time inside some methods as Sonde's own."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        originals = {name: getattr(owner, name) for name in names}
        for name, original in originals.items():
            setattr(owner, name, _clocked(original))
        yield
        for name, original in originals.items():
            setattr(owner, name, original)

    return context()


_depth = 0


def _clocked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _depth  # noqa: PLW0603 - one clock for the whole program
        begin = time.perf_counter()
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1
            if not _depth:
                watchers.inside += time.perf_counter() - begin

    return call


@contextlib.contextmanager
def step_phases(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    with timed(PhaseClock, "begin", "end", "end_step"), timed(StepVitals, "_mark", "_end_step"):
        vitals = StepVitals([program.model], Numbers(), lambda _, function: function)
        handles = [
            register_optimizer_step_pre_hook(lambda *_: vitals.mark("optimizer")),
            register_optimizer_step_post_hook(lambda *_: vitals.end_step(True)),
        ]
        vitals.attach()
        yield lambda loss: None
        vitals.remove()
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def memory(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    with timed(PhaseClock, "begin", "end", "end_step"), timed(MemoryScope, "_end_step"), memory_scope():
        yield lambda loss: None


@contextlib.contextmanager
def both(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    with step_phases(program, folder), memory(program, folder):
        yield lambda loss: None


def profiled(**options: Any) -> Watcher:
    @contextlib.contextmanager
    def watcher(program: Program, folder: Path) -> Iterator[Callable[[torch.Tensor], None]]:
        scope = profile_scope(**options)
        scope.__enter__()
        yield lambda loss: None
        scope.__exit__(None, None, None)

    return watcher


VARIANTS: dict[str, Watcher] = {
    "bare loop": bare,
    "bare loop again (noise)": bare,
    "step phases": step_phases,
    "memory scope": memory,
    "step phases + memory scope": both,
    "profile scope, phases and modules only (waiting)": profiled(schedule={"wait": 1000}),
    "profile scope, recording, no stacks, no memory": profiled(stacks=False, memory=False),
    "profile scope, recording everything": profiled(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=("gpt", "mlp"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, make in {"gpt": gpt, "mlp": mlp}.items():
        if options.only in (None, name):
            timings = interleave(make, VARIANTS, rounds=options.rounds, steps=options.steps)
            base = timings["bare loop"]
            print(
                f"\n### {name}\n\n| variant | wall ratio (quartiles) | CPU ratio | 1 + own / bare |\n|---|--:|--:|--:|"
            )
            for variant, timing in timings.items():
                middle, low, high = ratio(timing, base)
                own = inside_ratio(timing, base)
                own_share = f"**{own:.4f}**" if own else ""
                cpu = ratio(timing, base, cpu=True)[0]
                print(f"| {variant} | {middle:.3f} ({low:.3f} to {high:.3f}) | {cpu:.3f} | {own_share} |")


if __name__ == "__main__":
    main()
