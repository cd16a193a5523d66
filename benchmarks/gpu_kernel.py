"""How fast the CUDA statistics kernels are, against the time it takes merely to read the tensors.

    PYTHONPATH=src python benchmarks/gpu_kernel.py            # checks, then the table; about a minute on an H200
    PYTHONPATH=src python benchmarks/gpu_kernel.py --tune     # also other numbers of blocks

Needs torch, numpy and a CUDA device. Device times are medians by events, with the device kept busy first so that the
host's time does not show; host times are medians of the call alone. The floor is bytes over measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sonde import records
from sonde.core import schema
from sonde.stats.cuda import DeviceKernel, cuda_kernel
from sonde.stats.cuda.native import NativeKernel

REPEATS = 15
HOOK_SHAPES = (
    ((64,), torch.float32),
    ((16, 1024, 768), torch.bfloat16),
    ((16, 1024, 3072), torch.bfloat16),
    ((16, 1024, 50304), torch.bfloat16),
)
GPT2_LAYERS, GPT2_WIDTH, GPT2_WORDS, GPT2_LENGTH = 12, 768, 50304, 1024


def gpt2_shapes() -> list[tuple[int, ...]]:
    d = GPT2_WIDTH
    layer = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(GPT2_WORDS, d), (GPT2_LENGTH, d), *(layer * GPT2_LAYERS), (d,), (d,)]


def device_and_host_time(call: Callable[[], object]) -> tuple[float, float]:
    """Return seconds on the device and on the host, medians."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    on_device, on_host = [], []
    for _ in range(REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead
        start.record()
        began = time.perf_counter()
        call()
        on_host.append(time.perf_counter() - began)
        stop.record()
        torch.cuda.synchronize()
        on_device.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(on_device), statistics.median(on_host)


def host_time_in_a_row(call: Callable[[], object], times: int = 200) -> float:
    """Return seconds per call of many calls without a pause, as in the hooks of a forward pass."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    taken = (time.perf_counter() - began) / times
    torch.cuda.synchronize()
    return taken


def kernels() -> dict[str, DeviceKernel]:
    began = time.perf_counter()
    made = cuda_kernel("cuda")
    made.warm_up()
    print(f"{made.name}: made and warmed up in {time.perf_counter() - began:.2f} s")
    return {made.name: made}


def check(kernel: DeviceKernel) -> None:
    """Stop if results are wrong: exact where they must be, else within bounds."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensors = [torch.randn(n, device="cuda").to(dtype) for n in (1, 1000, 16385, 3_000_017)]
        tensors.append(torch.tensor([float("nan"), float("inf"), 0.0, -3.0], device="cuda").to(dtype))
        tensors.append((1000 + 0.01 * torch.randn(100_000, device="cuda", dtype=torch.float64)).to(dtype))
        tensors.append((torch.randn(2_000_000, device="cuda") * 0.02).relu_().to(dtype))
        arena = kernel.arena(len(tensors))
        kernel.measure(tensors, range(len(tensors)), arena)
        rows, bins = kernel.ship(arena).take()
        for row, counts, tensor in zip(rows, bins, tensors, strict=True):
            want, want_bins = records.summarise(tensor.double().cpu().numpy())
            np.testing.assert_array_equal(row[: schema.MEAN], want[: schema.MEAN])
            np.testing.assert_array_equal(counts, want_bins)
            np.testing.assert_allclose(row[schema.MEAN :], want[schema.MEAN :], rtol=1e-5, atol=1e-7)
    print(f"{kernel.name}: results are right")


def bandwidths() -> tuple[float, float]:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    copy, _ = device_and_host_time(lambda: target.copy_(source))
    values = torch.randn(2**29, device="cuda")
    read, _ = device_and_host_time(values.sum)
    return 2 * source.numel() / copy, 4 * values.numel() / read


def line(what: str, seconds: float, floor: float, host: float, per: int = 1) -> None:
    each = f"{1e6 * max(seconds, host) / per:8.3f}" if per > 1 else " " * 8
    print(f"{what:46s} {1e3 * seconds:9.3f} {seconds / floor:8.2f} {1e6 * host:9.1f} {each}", flush=True)


def compare(title: str, tensors: Sequence[Tensor], made: dict[str, DeviceKernel], bandwidth: float) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    floor = size / bandwidth
    per = len(tensors)
    print(f"\n{title}: {len(tensors)} tensors, {size / 1e6:.0f} MB, floor {1e3 * floor:.4f} ms")
    print(f"{'':46s} {'ms':>9s} {'x floor':>8s} {'host us':>9s} {'us each':>8s}")
    for name, kernel in made.items():
        arena = kernel.arena(len(tensors))
        rows = list(range(len(tensors)))
        for histogram in (False, True):
            kind = f"{name}, {'exact histogram' if histogram else 'no histogram'}"

            def measure(kernel=kernel, arena=arena, rows=rows, histogram=histogram) -> None:
                kernel.measure(tensors, rows, arena, histogram=histogram)

            line(kind, *_timed(measure, floor), per)

        def measure_and_ship(kernel=kernel, arena=arena, rows=rows) -> None:
            kernel.measure(tensors, rows, arena)
            kernel.ship(arena)

        line(f"{name}, exact histogram + shipping", *_timed(measure_and_ship, floor), per)
    line("torch._foreach_norm (one number each)", *_timed(lambda: torch._foreach_norm(list(tensors), 2), floor), per)


def compare_change(title: str, tensors: Sequence[Tensor], made: dict[str, DeviceKernel], bandwidth: float) -> None:
    shadows = [tensor.clone() for tensor in tensors]
    floor = 3 * sum(tensor.numel() * tensor.element_size() for tensor in tensors) / bandwidth
    for name, kernel in made.items():
        arena = kernel.arena(2 * len(tensors))
        count = len(tensors)

        def change(kernel=kernel, arena=arena, count=count) -> None:
            kernel.measure_change(tensors, shadows, range(count), range(count, 2 * count), arena)

        line(f"{name}, {title} (reads two, writes one)", *_timed(change, floor))


def _timed(call: Callable[[], object], floor: float) -> tuple[float, float, float]:
    seconds, host = device_and_host_time(call)
    return seconds, floor, host


def hook_times(made: dict[str, DeviceKernel], bandwidth: float) -> None:
    print("\none tensor at a time, as in a hook:   host us per call; device us and x floor")
    for name, kernel in made.items():
        arena = kernel.arena(4)
        for shape, dtype in HOOK_SHAPES:
            tensor = torch.randn(shape, device="cuda").to(dtype)

            def one(kernel=kernel, arena=arena, tensor=tensor) -> None:
                kernel.measure_one(tensor, 1, arena)

            host = host_time_in_a_row(one)
            seconds, _ = device_and_host_time(one)
            floor = tensor.numel() * tensor.element_size() / bandwidth
            print(
                f"{name:8s}{str(dtype)[6:]:9s}{shape!s:18s} host {1e6 * host:7.2f}   device {1e6 * seconds:8.2f}"
                f"   {seconds / floor:6.2f} x floor"
            )


def compare_contents(kernel: DeviceKernel, bandwidth: float) -> None:
    """Contents that are harder than a bell curve: many elements in one bin, or chunks that must be read twice."""
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(2**28, device="cuda").mul_(0.02).to(dtype)
        sprinkled = values.clone()
        sprinkled[:: 2**12] = float("nan")
        contents = {
            "bell curve": values,
            "half zeros": values.relu(),
            "all equal": torch.full_like(values, 0.02),
            "far from zero": values + 1000,
            "a NaN in every chunk": sprinkled,
        }
        print(f"\n256 M {str(dtype)[6:]}, exact histogram, by contents")
        arena = kernel.arena(1)
        for name, tensor in contents.items():

            def measure(tensor=tensor, arena=arena) -> None:
                kernel.measure_one(tensor, 0, arena)

            line(name, *_timed(measure, tensor.numel() * tensor.element_size() / bandwidth))


def tune(sets: dict[str, list[Tensor]], bandwidth: float) -> None:
    print("\nx floor with exact histogram and without, by blocks per processor")
    print("columns:", ", ".join(sets))
    for blocks in (3, 4, 5, 6, 8, 12, 16):
        kernel = NativeKernel(0, blocks_per_processor=blocks)
        results = []
        for tensors in sets.values():
            arena = kernel.arena(len(tensors))
            rows = list(range(len(tensors)))
            floor = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / bandwidth
            for histogram in (True, False):

                def measure(kernel=kernel, tensors=tensors, rows=rows, arena=arena, histogram=histogram) -> None:
                    kernel.measure(tensors, rows, arena, histogram=histogram)

                results.append(f"{device_and_host_time(measure)[0] / floor:6.2f}")
        print(f"{blocks:3d} blocks: {' '.join(results)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try other numbers of blocks too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 1
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    made = kernels()
    for kernel in made.values():
        check(kernel)
    copy, read = bandwidths()
    print(f"copy {copy / 1e12:.2f} TB/s (read and written), torch.sum reads {read / 1e12:.2f} TB/s")
    torch.manual_seed(0)
    model = {
        dtype: [(torch.randn(shape, device="cuda") * 0.02).to(dtype) for shape in gpt2_shapes()]
        for dtype in (torch.float32, torch.bfloat16)
    }
    big = torch.randn(2**30, device="cuda").mul_(0.02)
    tiny = [torch.randn(1024, device="cuda") for _ in range(500)]
    for dtype, tensors in model.items():
        compare(f"GPT-2 small, {str(dtype)[6:]}", tensors, made, copy)
        compare_change("change pass", tensors, made, copy)
    compare("1 G float32", [big], made, copy)
    compare("500 of 1 K, float32", tiny, made, copy)
    hook_times(made, copy)
    compare_contents(made["cuda"], copy)
    if arguments.tune:
        tune(
            {
                "GPT-2 float32": model[torch.float32],
                "GPT-2 bfloat16": model[torch.bfloat16],
                "1 G float32": [big],
                "16x1024x3072 bfloat16": [torch.randn(16, 1024, 3072, device="cuda").bfloat16()],
            },
            copy,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
