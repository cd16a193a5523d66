"""What a statistic costs: nanoseconds per element of each kernel, beside a plain read of the same memory.

    python benchmarks/kernel.py            all tables (some minutes; 100M elements need 1 GB)
    python benchmarks/kernel.py --quick    nothing above 1M elements

One-thread figures are CPU time of the thread, two-thread figures wall time. Candidates take turns within a round, and
medians over rounds are shown, so that a busy machine blurs the figures but favours nobody.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from sonde.stats import NativeKernel, TorchKernel, library
from sonde.stats.protocol import Kernel

CPU = torch.device("cpu")
ROUNDS = 5
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
SLOW_FROM = 10_000_000  # elements above which the slowest are left out: they would take minutes


def timed(clock: Callable[[], float], work: Callable[[], object], repeats: int) -> float:
    start = clock()
    for _ in range(repeats):
        work()
    return (clock() - start) / repeats


def compare(candidates: dict[str, Callable[[], object]], repeats: int, clock=time.thread_time) -> dict[str, float]:
    """Return the median seconds of each candidate."""
    for work in candidates.values():
        work()
    rounds = [{name: timed(clock, work, repeats) for name, work in candidates.items()} for _ in range(ROUNDS)]
    return {name: median(each[name] for each in rounds) for name in candidates}


def naive(x: torch.Tensor) -> list[float]:
    """Summarise as a hook script would: one operation and one `.item()` for each statistic."""
    statistics = [x.mean(), x.std(), x.norm(), x.min(), x.max(), x.abs().sum()]
    statistics += [x.isnan().sum(), x.isinf().sum(), (x == 0).sum(), (x.abs() >= 1).sum()]
    x.float().abs().log2().floor().histc(64, -47, 17)
    return [statistic.item() for statistic in statistics]


def one(kernel: Kernel, x: torch.Tensor, *, histogram: bool = True) -> Callable[[], object]:
    arena = kernel.arena(1)
    return lambda: kernel.measure_one(x, 0, arena, histogram=histogram)


def change(kernel: Kernel, x: torch.Tensor) -> Callable[[], object]:
    arena, shadow = kernel.arena(2), x.clone()
    return lambda: kernel.measure_change([x], [shadow], [0], [1], arena)


def many(kernel: Kernel, tensors: list[torch.Tensor]) -> Callable[[], object]:
    arena, rows = kernel.arena(len(tensors)), list(range(len(tensors)))
    return lambda: kernel.measure(tensors, rows, arena)


def show(title: str, results: dict[str, float], elements: int, unit: str = "ns/element") -> None:
    scale = 1e9 if unit.startswith("ns") else 1e6
    floor = results.get("torch.sum")
    cells = []
    for name, seconds in results.items():
        ratio = f" ({seconds / floor:.1f}x)" if floor and name != "torch.sum" else ""
        cells.append(f"{name} {seconds / elements * scale:.3f}{ratio}")
    print(f"{title:<28}{unit:<12}{'   '.join(cells)}", flush=True)


def repeats_for(elements: int) -> int:
    return max(1, 3_000_000 // max(elements, 3_000))


def sizes(kernels: dict[str, Kernel], quick: bool) -> None:
    print("\n-- one thread, CPU time")
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (
            (1_000, 10_000, 100_000, 1_000_000)
            if quick
            else (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
        ):
            x = torch.randn(size).to(dtype)
            candidates = {"torch.sum": x.sum, "native": one(kernels["native"], x)}
            candidates["native, no histogram"] = one(kernels["native"], x, histogram=False)
            candidates["torch"] = one(kernels["torch"], x)
            if size < SLOW_FROM:
                candidates |= {"torch device": one(kernels["torch device"], x), "naive": lambda x=x: naive(x)}
            show(f"{size:>11,} {str(dtype)[6:]}", compare(candidates, repeats_for(size)), size)


def threads(kernels: dict[str, Kernel], quick: bool) -> None:
    print("\n-- two threads, wall time")
    torch.set_num_threads(2)
    for size in SIZES[2:4] if quick else SIZES[2:]:
        x = torch.randn(size)
        candidates = {"torch.sum": x.sum, "native": one(kernels["native"], x)}
        candidates["native, no histogram"] = one(kernels["native"], x, histogram=False)
        show(f"{size:>11,} float32", compare(candidates, repeats_for(size), time.perf_counter), size)
    torch.set_num_threads(1)


def tiny(kernels: dict[str, Kernel]) -> None:
    print("\n-- many tiny tensors, per tensor")
    for count, size in ((500, 64), (500, 1_000), (10_000, 64)):
        tensors = [torch.randn(size) for _ in range(count)]
        candidates = {"torch.sum": lambda tensors=tensors: [x.sum() for x in tensors]}
        candidates |= {"native": many(kernels["native"], tensors), "torch": many(kernels["torch"], tensors)}
        show(f"{count:>6,} x {size:,}, one call", compare(candidates, 5), count, "us/tensor")
    x = torch.randn(1_000)
    show(
        "one of 1,000, as in a hook",
        compare({"torch.sum": x.sum, "native": one(kernels["native"], x)}, 5_000),
        1,
        "us/tensor",
    )


def changes(kernels: dict[str, Kernel], quick: bool) -> None:
    print("\n-- change: two summaries and the shadow brought up to date")
    size = 1_000_000 if quick else 50_000_000
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(size).to(dtype)
        candidates = {"torch.sum": x.sum, "native": change(kernels["native"], x), "torch": change(kernels["torch"], x)}
        show(f"{size:>11,} {str(dtype)[6:]}", compare(candidates, repeats_for(size)), size)


def data(kernels: dict[str, Kernel]) -> None:
    print("\n-- kinds of data, 1,000,000 float32")
    x = torch.randn(1_000_000)
    with_nan = x.clone()
    with_nan[::2048] = torch.nan
    kinds = {
        "normal": x,
        "relu": x.relu(),
        "softmax": x.reshape(1000, 1000).softmax(1),
        "zeros": torch.zeros_like(x),
        "wide (lognormal)": (3 * x).exp(),
        "float32 squares vanish": x * 1e-20,
        "a NaN in every block": with_nan,
        "all NaN": torch.full_like(x, torch.nan),
    }
    for kind, values in kinds.items():
        candidates = {"native": one(kernels["native"], values), "torch": one(kernels["torch"], values)}
        show(kind, compare(candidates, 5), values.numel())


def levels(native: library.Library) -> None:
    print("\n-- instruction sets, 1,000,000 elements")
    best = native.level
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(1_000_000).to(dtype)
        results = {}
        for level in filter(native.use_level, library.LEVELS):
            results |= compare({level: one(NativeKernel(native), x)}, 5)
        show(str(dtype)[6:], results, x.numel())
    native.use_level(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="nothing above 1M elements")
    quick = parser.parse_args().quick
    native = library.load()
    if native is None:
        raise SystemExit("The native library is not built: pip install -e . where a C compiler is.")
    print(f"torch {torch.__version__}, native library at level {native.level}, threads to borrow: {native.has_threads}")
    kernels: dict[str, Kernel] = {
        "native": NativeKernel(native),
        "torch": TorchKernel(),
        "torch device": TorchKernel(CPU, reads_numbers=False),
    }
    torch.manual_seed(0)
    sizes(kernels, quick)
    threads(kernels, quick)
    tiny(kernels)
    changes(kernels, quick)
    data(kernels)
    levels(native)


if __name__ == "__main__":
    main()
