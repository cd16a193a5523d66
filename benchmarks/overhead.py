"""What watching a training step costs: bare loop, naive hooks, peers and Sonde, interleaved in one process.

    python benchmarks/overhead.py [--rounds 7] [--steps 3] [--only gpt|mlp|cnn]

Prints ratios to the bare step: the median over rounds with quartiles, wall time and CPU time of the whole process.
"""

from __future__ import annotations

import argparse
import time

import torch
from programs import Program, cnn, gpt, mlp
from rounds import Timing, inside_ratio, interleave, ratio
from watchers import (
    Watcher,
    attached_but_disabled,
    bare,
    leaf_modules,
    naive,
    naive_statistics,
    no_op_hooks,
    six_statistics,
    tensorboard,
    wandb,
    watched,
)

EVERYTHING = ("parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state")
DEFAULT = "Sonde: parameters, gradients, updates, outputs"

VARIANTS: dict[str, Watcher] = {
    "bare loop": bare,
    "bare loop again (noise)": bare,
    "no-op hooks": no_op_hooks,
    "Sonde disabled": attached_but_disabled,
    "Sonde: parameters, gradients": watched(what=("parameters", "gradients")),
    DEFAULT: watched(),
    f"{DEFAULT}, diagnosis": watched(diagnose=True),
    f"{DEFAULT}, no histogram": watched(histogram=False),
    "Sonde: everything": watched(what=EVERYTHING),
    f"{DEFAULT}, 1 step in 10": watched(every=10),
    f"{DEFAULT}, without compiled code": watched(kernel="torch"),
    "naive hooks, 6 statistics, no histogram": naive(six_statistics),
    "naive hooks, the same statistics": naive(naive_statistics),
    "W&B watch(log='all', log_freq=1), offline": wandb,
    "TensorBoard histograms of parameters, gradients": tensorboard,
}
PROGRAMS = {"gpt": gpt, "mlp": mlp, "cnn": cnn}
# Sampling one step in ten needs ten steps to be seen; the others need few.
STEPS_OF_SAMPLED = 10


def elements_per_step(program: Program) -> int:
    """How many numbers the default selection reads in a step: outputs of leaves, and parameters three times."""
    count = 0

    def add(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        nonlocal count
        count += output.numel()

    handles = [module.register_forward_hook(add) for module in leaf_modules(program.model)]
    program.step()
    for handle in handles:
        handle.remove()
    return count + 3 * sum(parameter.numel() for parameter in program.model.parameters())


def read_floor_ms(elements: int) -> float:
    """The time of one plain read (torch.sum) of that many float32, in pieces that do not fit into the cache."""
    piece = torch.ones(16 << 20)
    piece.sum()
    begin = time.perf_counter()
    for _ in range(5):
        piece.sum()
    return (time.perf_counter() - begin) / 5 * 1e3 * elements / piece.numel()


def measure(name: str, rounds: int, steps: int) -> None:
    make = PROGRAMS[name]
    program = make()
    parameters = sum(parameter.numel() for parameter in program.model.parameters())
    elements = elements_per_step(program)
    sampled = {key: value for key, value in VARIANTS.items() if "1 step in 10" in key} | {"bare loop": bare}
    rest = {key: value for key, value in VARIANTS.items() if "1 step in 10" not in key}
    timings = interleave(make, rest, rounds=rounds, steps=steps)
    slow = interleave(make, sampled, rounds=max(3, rounds // 2), steps=STEPS_OF_SAMPLED, warm_up=0)
    base = timings["bare loop"]
    floor = read_floor_ms(elements)
    print(f"\n### {name}: {parameters / 1e6:.1f} M parameters, {elements / 1e6:.0f} M elements read per step\n")
    print("| variant | ms | wall ratio (quartiles) | CPU ratio | 1 + hooks / bare | KB per step |")
    print("|---|--:|--:|--:|--:|--:|")
    for key in rest:
        line(key, timings[key], base)
    for key in sampled:
        if key != "bare loop":
            line(key, slow[key], slow["bare loop"])
    share = floor / (sum(base.wall_ms) / len(base.wall_ms))
    print(f"| floor: one read of every element | {floor:.1f} | {1 + share:.3f} | | | |")


def line(key: str, timing: Timing, base: Timing) -> None:
    middle, low, high = ratio(timing, base)
    cpu, _, _ = ratio(timing, base, cpu=True)
    size = f"{timing.bytes_per_step / 1e3:.0f}" if timing.bytes_per_step else ""
    milliseconds = sorted(timing.wall_ms)[len(timing.wall_ms) // 2]
    hooks = inside_ratio(timing, base)
    inside = "" if hooks is None else f"**{hooks:.3f}**"
    spread = f"{middle:.3f} ({low:.3f} to {high:.3f})"
    print(f"| {key} | {milliseconds:.1f} | {spread} | {cpu:.3f} | {inside} | {size} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=PROGRAMS)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in [options.only] if options.only else PROGRAMS:
        measure(name, options.rounds, options.steps)


if __name__ == "__main__":
    main()
