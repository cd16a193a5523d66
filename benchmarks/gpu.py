"""What watching a training step costs on a GPU: bare steps, hooks as people write them, and Sonde, interleaved.

    PYTHONPATH=src python benchmarks/gpu.py [--rounds 5] [--only NAME ...]     # under six minutes on an H200

Needs torch, numpy, safetensors and a CUDA device. Checks results first, then prints one table. Milliseconds are those
between events at the starts of steps; the ratio is that of medians within a round (means where steps are sampled), its
median over rounds and the range. Host milliseconds: until all calls of a step have returned, from an idle device.
Device memory: how much higher the peak is than that of the bare step. Waits: operations per step that wait for the
device, as torch's debug mode sees them in all threads, less those of the bare step. Floor: what merely reading the
elements would add at the bandwidth of a large copy.

"Sonde: ..." records and does nothing else (`diagnose=False`); "Sonde as it comes" is `sonde.watch(model, optimizer)`.

GPT-2 small: 16 x 1024 tokens, bfloat16 autocast, fused AdamW; eager, and with torch.compile. ResNet-50: 128 images of
224 x 224, channels-last, float16 autocast with a gradient scaler, fused SGD. 500 layers of 1 K weights each, and one
layer of 1 G: float32, fused AdamW, little arithmetic, so that only host time and only bandwidth count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_programs import Program, gpt, many_tiny, one_big, resnet
from torch import Tensor, nn

import sonde
from sonde import records
from sonde.core import schema
from sonde.testing import MemorySink

PG = ("parameters", "gradients")
DEFAULT = (*PG, "updates", "outputs")
EVERYTHING = (*DEFAULT, "output_gradients")
SYNC_STEPS = 1000
SLOW_ROUNDS = 2  # for what is slow by itself
MEMORY_MB = 16_384  # room for a copy of 1 G parameters

Watcher = Callable[[Program, Path], contextlib.AbstractContextManager[Callable[[Tensor], None]]]


@dataclass
class Variant:
    """Something to put around a step. Slow ones run few steps in few rounds; sampled ones need whole periods."""

    watcher: Watcher
    steps: int = 12
    warm_up: int = 3
    most_rounds: int = 100
    sampled: bool = False


@dataclass
class Result:
    """What was measured of one variant, a number per round."""

    medians: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    peak: int = 0
    waits: float = 0.0


# ------------------------------------------------------------------------------------------------------- the variants


@contextlib.contextmanager
def bare(program: Program, folder: Path) -> Iterator[Callable[[Tensor], None]]:
    yield lambda loss: None


def naive_statistics(tensor: Tensor) -> list[Any]:
    """The statistics Sonde records, one operation and one `.item()` each."""
    x = tensor.detach().float()
    size = x.abs()
    values = [x.mean(), x.std(), x.min(), x.max(), x.norm(), size.sum(), x.isnan().sum(), x.isinf().sum()]
    values += [(x == 0).sum(), (size >= 1).sum()]
    histogram = torch.histc(torch.log2(size.clamp_min(1e-38)), bins=64, min=-47, max=17)
    return [*(value.item() for value in values), histogram.tolist()]


def one_histogram(tensor: Tensor) -> list[Any]:
    """What W&B's `watch` does per tensor: look for non-finite values, then a histogram between the extremes."""
    flat = tensor.detach().reshape(-1).float()
    if not torch.isfinite(flat).all().item():
        flat = flat[torch.isfinite(flat)]
    if not flat.numel():
        return []
    low, high = flat.min().item(), flat.max().item()
    return [low, high, flat.histc(bins=64, min=low, max=high).cpu()]


def by_hand(statistics_of: Callable[[Tensor], list[Any]], *, outputs: bool = False) -> Watcher:
    @contextlib.contextmanager
    def watcher(program: Program, folder: Path) -> Iterator[Callable[[Tensor], None]]:
        found: list[Any] = []

        def look() -> None:
            for parameter in program.model.parameters():
                found.append(statistics_of(parameter))
                found.append(statistics_of(parameter.grad))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1:
                found.append(statistics_of(output))

        handles = [module.register_forward_hook(after) for module in program.model.modules()] if outputs else []
        program.before_optimizer.append(look)
        yield lambda loss: found.clear()
        program.before_optimizer.clear()
        for handle in handles:
            handle.remove()

    return watcher


@contextlib.contextmanager
def norms(program: Program, folder: Path) -> Iterator[Callable[[Tensor], None]]:
    """One number per parameter and gradient, left on the device."""

    def look() -> None:
        parameters = list(program.model.parameters())
        torch._foreach_norm(parameters, 2)
        torch._foreach_norm([parameter.grad for parameter in parameters], 2)

    program.before_optimizer.append(look)
    yield lambda loss: None
    program.before_optimizer.clear()


def watched(*what: str, every: int = 1, diagnose: bool = False) -> Watcher:
    @contextlib.contextmanager
    def watcher(program: Program, folder: Path) -> Iterator[Callable[[Tensor], None]]:
        options = {"run": folder, "what": what, "every": every, "scaler": program.scaler, "max_memory_mb": MEMORY_MB}
        options["diagnose"] = diagnose
        with sonde.watch(program.watched, program.optimizer, on_error="raise", **options) as session:
            yield lambda loss: session.log(loss=loss)
            assert session.dropped_steps == 0, "steps were dropped: the times are not comparable"

    return watcher


FEW: dict[str, Variant] = {
    "bare": Variant(bare),
    "bare again (noise)": Variant(bare),
    "naive hooks, `.item()` per statistic: parameters, gradients": Variant(
        by_hand(naive_statistics), steps=2, warm_up=1, most_rounds=SLOW_ROUNDS
    ),
    "W&B-like: `histc` per parameter and gradient": Variant(
        by_hand(one_histogram), steps=3, warm_up=1, most_rounds=SLOW_ROUNDS
    ),
    "`torch._foreach_norm` of parameters and gradients": Variant(norms),
    "Sonde: parameters, gradients": Variant(watched(*PG)),
    "Sonde: parameters, gradients, updates": Variant(watched(*PG, "updates")),
    "Sonde: parameters, gradients, 1 step in 10": Variant(watched(*PG, every=10), steps=20, warm_up=5, sampled=True),
    "Sonde as it comes": Variant(watched(*DEFAULT, diagnose=True), warm_up=25),
    "Sonde as it comes, 1 step in 10": Variant(
        watched(*DEFAULT, diagnose=True, every=10), steps=20, warm_up=25, sampled=True
    ),
}
ALL: dict[str, Variant] = FEW | {
    "naive hooks: parameters, gradients, outputs": Variant(
        by_hand(naive_statistics, outputs=True), steps=1, warm_up=1, most_rounds=SLOW_ROUNDS
    ),
    "Sonde: parameters, gradients, outputs": Variant(watched(*PG, "outputs")),
    "Sonde: parameters, gradients, updates, outputs": Variant(watched(*DEFAULT)),
    "Sonde: the same and output gradients": Variant(watched(*EVERYTHING)),
}
PROGRAMS: dict[str, tuple[str, Callable[[], Program], dict[str, Variant]]] = {
    "gpt": ("GPT-2 small", gpt, ALL),
    "compiled": ("GPT-2 small, compiled", functools.partial(gpt, compiled=True), FEW),
    "resnet": ("ResNet-50", resnet, ALL),
    "tiny": ("500 layers of 1 K", many_tiny, ALL),
    "big": ("one layer of 1 G", one_big, FEW),
}


# ------------------------------------------------------------------------------------------------------- measurements


def time_steps(step: Callable[[], object], variant: Variant) -> list[float]:
    """Return the milliseconds of steps, between events at their starts."""
    for _ in range(variant.warm_up):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(variant.steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def host_time(step: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.fmean(times) if steps >= 10 else statistics.median(times)


def measure_once(program: Program, variant: Variant, folder: Path, result: Result) -> None:
    with variant.watcher(program, folder) as after:

        def step() -> None:
            after(program.step())

        torch.cuda.reset_peak_memory_stats()
        times = time_steps(step, variant)
        result.medians.append(statistics.median(times))
        result.means.append(statistics.fmean(times))
        result.host.append(host_time(step, 10 if variant.sampled else min(4, variant.steps)))
        result.peak = max(result.peak, torch.cuda.max_memory_allocated())
        if not result.waits:
            result.waits = count_waits(step, 2) / 2
    shutil.rmtree(folder, ignore_errors=True)


def interleave(program: Program, variants: dict[str, Variant], rounds: int) -> dict[str, Result]:
    results = {name: Result() for name in variants}
    for _ in range(10):  # a gradient scaler needs a few to find its scale
        program.step()
    gc.collect()
    gc.disable()  # a collection in the middle of a step is no variant's fault
    with tempfile.TemporaryDirectory(prefix="sonde-bench-") as scratch:
        for number in range(rounds):
            # Another variant begins each round, after some steps that do not count: a rested device runs faster.
            names = list(variants)
            first = number * len(names) // rounds
            for _ in range(10):
                program.step()
            for name in names[first:] + names[:first]:
                if number < variants[name].most_rounds:
                    measure_once(
                        program, variants[name], Path(scratch) / f"{number}-{names.index(name)}", results[name]
                    )
            gc.collect()
    gc.enable()
    return results


def bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copy = Variant(bare, steps=10)
    return 2e3 * source.numel() / statistics.median(time_steps(lambda: target.copy_(source), copy))


def bytes_of_outputs(program: Program) -> int:
    """Bytes of all modules' outputs, less those that are the very tensor of the module before."""
    size = 0
    last: list[Tensor | None] = [None]

    def add(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal size
        if isinstance(output, Tensor) and output is not last[0]:
            size += output.nbytes
            last[0] = output

    handles = [module.register_forward_hook(add) for module in program.model.modules()]
    with torch.no_grad():
        program.loss()
    for handle in handles:
        handle.remove()
    return size


def count_waits(step: Callable[[], object], steps: int) -> int:
    """Count operations that wait for the device, as torch's debug mode sees them, in all threads of the process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def waits_of_many_steps(watcher: Watcher, steps: int) -> int:
    program = gpt(width=128, layers=2, heads=2, words=500, batch=4, context=64)
    folder = Path(tempfile.mkdtemp(prefix="sonde-bench-")) / "run"
    with watcher(program, folder) as after:
        for _ in range(3):
            after(program.step())
        waits = count_waits(lambda: after(program.step()), steps)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return waits


# ------------------------------------------------------------------------------------------------------------ results


def check() -> None:
    """Stop if a watched step does not show what the host computes from the same tensors."""
    program = gpt(width=128, layers=2, heads=2, words=500, batch=4, context=64)
    sink, folder = MemorySink(), Path(tempfile.mkdtemp(prefix="sonde-bench-")) / "run"
    kept: list[dict[str, Tensor]] = []

    def keep() -> None:
        kept.append({f"{name}:gradient": p.grad.clone() for name, p in program.model.named_parameters()})

    program.before_optimizer.append(keep)
    with sonde.watch(program.watched, program.optimizer, run=folder, what=EVERYTHING, on_error="raise") as session:
        session.subscribe(sink)
        hook = program.model.blocks[1].mlp.act.register_forward_hook(
            lambda module, args, output: outputs.append(output.detach().clone())
        )
        outputs: list[Tensor] = []
        for _ in range(3):
            program.step()
            kept[-1] |= {f"{name}:parameter": p.detach().clone() for name, p in program.model.named_parameters()}
            kept[-1]["blocks.1.mlp.act:output"] = outputs[-1]
        hook.remove()
    shutil.rmtree(folder.parent, ignore_errors=True)
    for index, tensors in enumerate(kept):
        for key, tensor in tensors.items():
            reading = sink.readings(key)[index + 1]
            row, bins = records.summarise(tensor.double().cpu().numpy())
            np.testing.assert_array_equal(reading.row[1 : schema.MEAN], row[1 : schema.MEAN])
            # The mean may cancel; its bound is relative to the mean magnitude.
            assert abs(reading.row[schema.MEAN] - row[schema.MEAN]) <= 1e-6 * row[schema.ABS_SUM] / row[schema.COUNT]
            np.testing.assert_allclose(reading.row[schema.M2 :], row[schema.M2 :], rtol=1e-5)
            np.testing.assert_array_equal(reading.bins, bins)
    print(f"results are right: {sum(map(len, kept))} readings compared with the host's", flush=True)


def ratios(variant: Variant, result: Result, base: Result) -> tuple[float, float, float]:
    # Sampled steps differ among themselves, so their mean counts, against the bare steps' mean.
    pairs = (result.means, base.means) if variant.sampled else (result.medians, base.medians)
    found = [ours / theirs for ours, theirs in zip(*pairs, strict=False)]
    return statistics.median(found), min(found), max(found)


def print_program(
    title: str, program: Program, variants: dict[str, Variant], results: dict[str, Result], speed: float
) -> None:
    base = results["bare"]
    usual = statistics.median(base.medians)
    for name, result in results.items():
        middle, low, high = ratios(variants[name], result, base)
        usual_of = result.means if variants[name].sampled else result.medians
        more = result.peak - base.peak
        print(
            f"| {title} | {name} | {statistics.median(usual_of):.2f} | **{middle:.3f}** "
            f"({low:.3f} to {high:.3f}) | {statistics.median(result.host):.2f} "
            f"| {more / 1e6:+.1f} ({100 * more / base.peak:+.2f} %) | {result.waits - base.waits:+.0f} |",
            flush=True,
        )
    size = 2 * sum(parameter.nbytes for parameter in program.model.parameters())
    floors = {"parameters, gradients": size}
    if any("outputs" in name for name in results):
        floors["parameters, gradients, outputs"] = size + bytes_of_outputs(program)
    for what, size in floors.items():
        more = 1e3 * size / speed
        row = f"| {title} | floor: reading {what} ({size / 1e9:.2f} GB) | {usual + more:.2f} | {1 + more / usual:.3f} "
        print(f"{row}| | | |")
    print(f"| {title} | bare peak {base.peak / 1e9:.2f} GB | | | | | |", flush=True)


def measure(name: str, rounds: int, speed: float, *, quick: bool) -> None:
    title, make, variants = PROGRAMS[name]
    if quick:
        variants = {key: variant for key, variant in variants.items() if variant.most_rounds > SLOW_ROUNDS}
    began = time.perf_counter()
    program = make()
    results = interleave(program, variants, rounds)
    print_program(title, program, variants, results, speed)
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    del program
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="leave out what is slow by itself: naive hooks, histc")
    parser.add_argument("--waits", type=int, default=SYNC_STEPS, help="over how many steps to count waits; 0 for none")
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 1
    torch.set_float32_matmul_precision("high")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.rounds} rounds", flush=True)
    check()
    speed = bandwidth()
    print(f"copy: {speed / 1e12:.2f} TB/s read and written")
    if options.waits:
        bare_waits = waits_of_many_steps(bare, options.waits)
        waits = waits_of_many_steps(watched(*EVERYTHING, diagnose=True), options.waits)
        print(f"waits for the device in {options.waits} steps: {bare_waits} bare, {waits} with everything watched")
    print(
        "\n| program | variant | ms per step | ratio (range over rounds) | host ms | more device memory, MB | waits |"
    )
    print("|---|---|--:|--:|--:|--:|--:|", flush=True)
    for name in options.only:
        measure(name, options.rounds, speed, quick=options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
