"""What capturing costs in evaluation: a ResNet-like CNN, bare, with a disabled debugger, and with each ready one.

    python benchmarks/capture.py [--rounds 9] [--batches 4] [--batch 16] [--size 64]

All variants evaluate the same batches, interleaved in one process; a ratio is taken inside each round. Printed are the
median over rounds with quartiles, of wall time and of CPU time of the whole process (the thread that writes included),
and how much was written for a sample.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sonde.debuggers import (
    ActivationStatsDebugger,
    AttentionDebugger,
    BaseDebugger,
    EmbeddingDebugger,
    FeatureMapDebugger,
    ForwardDebugger,
    GradCAMDebugger,
    LayerOutputDebugger,
    SequentialDebugger,
)

STAGES = ("stage1", "stage2", "stage3", "stage4")


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.skip = nn.Identity() if stride == 1 and inside == outside else nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.skip(x))


class ResNetLike(nn.Module):
    """Eighteen layers, as ResNet-18, at a quarter of its width."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.stage1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.stage2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.stage3 = nn.Sequential(Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width, 1))
        self.stage4 = nn.Sequential(Residual(4 * width, 8 * width, 2), Residual(8 * width, 8 * width, 1))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage4(self.stage3(self.stage2(self.stage1(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class TenFloats(ForwardDebugger):
    """Ten statistics, each read by itself, as a first attempt is usually written."""

    def process_forward(self, module: nn.Module, input: Any, output: torch.Tensor) -> dict[str, float]:
        x = output.detach()
        return {
            "mean": float(x.mean()),
            "std": float(x.std()),
            "min": float(x.min()),
            "max": float(x.max()),
            "l1": float(x.abs().mean()),
            "l2": float(x.norm()),
            "sparsity": float((x == 0).float().mean()),
            "positive": float((x > 0).float().mean()),
            "low": float((x <= -1).float().mean()),
            "high": float((x >= 1).float().mean()),
        }


def each_stage(kind: Callable[[str], BaseDebugger]) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [{"name": stage, "debugger_config": kind(stage)} for stage in STAGES]


VARIANTS: dict[str, Callable[[], list[dict[str, Any]]] | None] = {
    "bare evaluation": None,
    "bare evaluation again (noise)": None,
    "debugger disabled": each_stage(FeatureMapDebugger),
    "feature maps of 4 stages": each_stage(FeatureMapDebugger),
    "feature map of the last stage": lambda: each_stage(FeatureMapDebugger)()[-1:],
    "outputs of 4 stages, downsampled by 4": each_stage(LayerOutputDebugger),
    "statistics of 4 stages": each_stage(ActivationStatsDebugger),
    "ten float() of 4 stages, whole batch": each_stage(TenFloats),
    "embeddings of 4 stages": each_stage(EmbeddingDebugger),
    "attention of 4 stages (there is none)": each_stage(AttentionDebugger),
    "Grad-CAM of the last stage": lambda: each_stage(GradCAMDebugger)()[-1:],
}


@dataclass
class Timing:
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    bytes_per_sample: float = 0.0


@contextmanager
def debugging(name: str, model: nn.Module, folder: Path) -> Iterator[SequentialDebugger | None]:
    make = VARIANTS[name]
    if make is None:
        yield None
        return
    with SequentialDebugger(make(), model) as debugger:
        if "disabled" not in name:
            debugger.enabled = True
            debugger.open(folder)
        yield debugger


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: list[torch.Tensor], debugger: SequentialDebugger | None, folder: Path
) -> tuple[float, float]:
    """Evaluate all batches and return the seconds it took, writing included: wall and CPU."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for number, inputs in enumerate(batches):
        first = number * len(inputs)
        dp = {"inputs": inputs, "meta_info": {"idx": list(range(first, first + len(inputs)))}}
        dp["outputs"] = model(inputs)
        dp["outputs"].argmax(1).tolist()  # a metric looks at the answer
        if debugger is not None and debugger.enabled:
            debugger(dp, model)
    if debugger is not None and debugger.enabled:
        debugger.save_all(folder)
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def measure(model: nn.Module, batches: list[torch.Tensor], rounds: int) -> dict[str, Timing]:
    timings = {name: Timing() for name in VARIANTS}
    samples = sum(map(len, batches))
    for number in range(rounds + 1):  # the first round warms up
        for name, timing in timings.items():
            with tempfile.TemporaryDirectory(prefix="sonde-bench-") as scratch:
                folder = Path(scratch) / "debugger"
                with debugging(name, model, folder) as debugger:
                    wall_s, cpu_s = evaluate(model, batches, debugger, folder)
                if number:
                    timing.wall_s.append(wall_s)
                    timing.cpu_s.append(cpu_s)
                timing.bytes_per_sample = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / samples
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    # One thread computes and one writes: on a busy machine, threads of one computation mostly wait for each other.
    torch.set_num_threads(1)
    model = ResNetLike().eval()
    batches = [torch.randn(options.batch, 3, options.size, options.size) for _ in range(options.batches)]
    timings = measure(model, batches, options.rounds)
    base = timings["bare evaluation"]
    per_batch = statistics.median(base.wall_s) / options.batches * 1e3
    print(f"batches of {options.batch} x 3 x {options.size} x {options.size}; bare: {per_batch:.1f} ms a batch")
    print(f"{'':42}{'wall':>6}{'quartiles':>13}{'CPU':>8}{'quartiles':>13}{'KB a sample':>13}")
    for name, timing in timings.items():
        wall, cpu = ratio(timing.wall_s, base.wall_s), ratio(timing.cpu_s, base.cpu_s)
        print(f"{name:42}{wall}  {cpu}{timing.bytes_per_sample / 1e3:13.1f}")


def ratio(ours: list[float], bare: list[float]) -> str:
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:6.2f}{f'{low:.2f}-{high:.2f}':>13}"


if __name__ == "__main__":
    main()
