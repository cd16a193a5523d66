"""How much of the machine's arithmetic a profile uses, against a matrix product measured on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch

from sonde.probes.profiling_tree import ProfileTree

_SIZE_CPU: Final = 512
_SIZE_CUDA: Final = 4096
_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """FLOPs per second of the profiled stretch against the best that a plain float32 product reached."""

    flops_per_second: float
    peak_flops_per_second: float

    @property
    def share(self) -> float:
        """Used over possible."""
        return self.flops_per_second / self.peak_flops_per_second


def utilisation(trees: Iterable[ProfileTree], *, peak: Callable[[bool], float] | None = None) -> Utilisation | None:
    """Return the utilisation of all recordings together, or None if no FLOPs were counted."""
    flops, nanoseconds, on_cuda = 0, 0, False
    for tree in trees:
        if tree.calls:
            flops += sum(call.flops for call in tree.calls)
            begin = min(call.start_ns for call in tree.calls)
            nanoseconds += max(call.start_ns + call.duration_ns for call in tree.calls) - begin
            on_cuda = on_cuda or tree.device_ns > 0
    if not flops or not nanoseconds:
        return None
    return Utilisation(
        flops_per_second=flops / nanoseconds * 1e9, peak_flops_per_second=(peak or measure_peak)(on_cuda)
    )


def measure_peak(on_cuda: bool) -> float:
    """Return the FLOPs per second of a large float32 product. Waits for the device: call it outside of a loop."""
    size, device = (_SIZE_CUDA, "cuda") if on_cuda else (_SIZE_CPU, "cpu")
    with torch.no_grad():
        left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
        best = min(_time(left, right, on_cuda) for _ in range(_TRIES + 1))
    return 2.0 * size**3 / best


def _time(left: torch.Tensor, right: torch.Tensor, on_cuda: bool) -> float:
    begin = time.perf_counter()
    left @ right
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
