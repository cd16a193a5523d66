"""What the PyTorch debugging tools cost: checks, scopes and debugged steps beside the bare loop, interleaved.

    python benchmarks/door2.py [--rounds 5] [--steps 3] [--only gpt|mlp|cnn] [--variant memory] [--long 10000]

Prints ratios to the bare step: the median over rounds with quartiles. `--long N` instead trains N debugged steps of a
small model and prints memory and the size of the report.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
import watchers
from programs import Program, cnn, gpt, mlp
from rounds import inside_ratio, interleave, ratio
from torch import nn
from watchers import Watcher, bare, watched

from sonde.pytorch_debugging import PyTorchDebugger

PROGRAMS = {"gpt": gpt, "mlp": mlp, "cnn": cnn}
After = Callable[[torch.Tensor], None]


def timed(function: Callable[[], object]) -> None:
    """Call, and add the time to the clock of what Sonde itself does in the training thread."""
    begin = time.perf_counter()
    function()
    watchers.inside += time.perf_counter() - begin


@contextlib.contextmanager
def debugger_in(folder: Path, **options: bool) -> Iterator[PyTorchDebugger]:
    with PyTorchDebugger(log_dir=folder, **options) as debugger:
        yield debugger


@contextlib.contextmanager
def gradients(program: Program, folder: Path) -> Iterator[After]:
    with debugger_in(folder, enable_gradient_checking=True) as debugger:
        yield lambda loss: timed(lambda: debugger.check_gradients(program.model))


@contextlib.contextmanager
def parameters(program: Program, folder: Path) -> Iterator[After]:
    with debugger_in(folder) as debugger:
        yield lambda loss: timed(lambda: debugger.check_model_parameters(program.model))


@contextlib.contextmanager
def naive_gradients(program: Program, folder: Path) -> Iterator[After]:
    """As hook scripts do it: norm, isnan and isinf of every gradient, each read at once."""

    def check() -> float:
        total = 0.0
        for parameter in program.model.parameters():
            if parameter.grad is not None:
                total += parameter.grad.norm(2).item() ** 2
                torch.isnan(parameter.grad).any().item()
                torch.isinf(parameter.grad).any().item()
        return total**0.5

    yield lambda loss: timed(check)


@contextlib.contextmanager
def torch_anomaly(program: Program, folder: Path) -> Iterator[After]:
    with torch.autograd.set_detect_anomaly(True):
        yield lambda loss: None


@contextlib.contextmanager
def anomaly(program: Program, folder: Path) -> Iterator[After]:
    with debugger_in(folder, enable_anomaly_detection=True) as debugger, debugger.anomaly_detection():
        yield lambda loss: None


@contextlib.contextmanager
def memory(program: Program, folder: Path) -> Iterator[After]:
    with debugger_in(folder, enable_memory_tracking=True) as debugger, debugger.memory_tracking() as scope:
        before = scope.own_seconds

        def after(loss: torch.Tensor) -> None:
            nonlocal before
            now = scope.own_seconds
            watchers.inside += now - before
            before = now

        yield after


@contextlib.contextmanager
def forward_tables(program: Program, folder: Path) -> Iterator[After]:
    """Every forward pass of the program goes through `debug_forward_pass`."""
    model = program.model
    with debugger_in(folder, debug_mode=True) as debugger:
        program.model = lambda inputs: debugger.debug_forward_pass(model, inputs)
        try:
            yield lambda loss: None
        finally:
            program.model = model


VARIANTS: dict[str, Watcher] = {
    "bare loop": bare,
    "bare loop again (noise)": bare,
    "`check_gradients` every step": gradients,
    "naive: norm, isnan, isinf per gradient, `.item()`": naive_gradients,
    "`check_model_parameters` every step": parameters,
    "`memory_tracking()`": memory,
    "`debug_forward_pass`, a table of every layer": forward_tables,
    "torch's `set_detect_anomaly(True)`": torch_anomaly,
    "`anomaly_detection()`: forward, gradients, optimizer too": anomaly,
    "the cheap watcher: `sonde.watch`": watched(),
}


def measure(name: str, rounds: int, steps: int, only: str = "") -> None:
    variants = {key: variant for key, variant in VARIANTS.items() if only in key or key.startswith("bare")}
    timings = interleave(PROGRAMS[name], variants, rounds=rounds, steps=steps, warm_up=1)
    base = timings["bare loop"]
    print(f"\n### {name}\n\n| variant | ms | wall ratio (quartiles) | 1 + inside / bare |\n|---|--:|--:|--:|")
    for key, timing in timings.items():
        middle, low, high = ratio(timing, base)
        inside = inside_ratio(timing, base)
        shown = "" if inside is None else f"**{inside:.3f}**"
        milliseconds = statistics.median(timing.wall_ms)
        print(f"| {key} | {milliseconds:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) | {shown} |", flush=True)


def train_long(steps: int) -> None:
    """Train with every step debugged, and look at memory and the report."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    process, seen = psutil.Process(os.getpid()), []
    with tempfile.TemporaryDirectory(prefix="sonde-bench-") as scratch:
        with debugger_in(Path(scratch), debug_mode=True, enable_gradient_checking=True) as debugger:
            begin = time.perf_counter()
            for step in range(steps):
                x = torch.randn(32, 16)
                debugger.debug_training_step(model, x, x[:, :4].argmax(1), F.cross_entropy, optimizer)
                if step % max(1, steps // 20) == 0:
                    gc.collect()
                    seen.append(process.memory_info().rss / 1e6)
            seconds = time.perf_counter() - begin
            sizes = {
                form: debugger.save_debug_report(format=form).stat().st_size / 1e3 for form in ("json", "md", "html")
            }
        disk = watchers.folder_bytes(Path(scratch)) / 1e6
    print(f"{steps} steps in {seconds:.0f} s ({seconds / steps * 1e3:.2f} ms each); run and reports {disk:.1f} MB")
    print("report: " + ", ".join(f"{form} {size:.0f} KB" for form, size in sizes.items()))
    half = len(seen) // 2
    print(f"RSS {seen[0]:.0f} MB at the start, {seen[half]:.0f} MB in the middle, {seen[-1]:.0f} MB at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=PROGRAMS)
    parser.add_argument("--variant", help="measure only variants whose name has this in it, beside the bare loop")
    parser.add_argument("--long", type=int, default=0)
    options = parser.parse_args()
    if options.long:
        train_long(options.long)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in [options.only] if options.only else PROGRAMS:
        measure(name, options.rounds, options.steps, options.variant or "")


if __name__ == "__main__":
    main()
