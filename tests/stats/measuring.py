"""What tests of kernels do again and again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.oracles.rows import FLOAT32_SUMS, FLOAT64_SUMS, Bounds
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.stats import NativeKernel, TorchKernel, library
from sonde.stats.protocol import Kernel

CPU = torch.device("cpu")


def make_kernel(name: str) -> Kernel:
    """Make a kernel by name; `native-avx2` is the native one, held to an instruction set."""
    if name == "torch":
        return TorchKernel()
    if name == "torch-device":
        return device_kernel()
    native = library.load()
    if native is None:
        pytest.skip("the native library is not built here")
    if not native.use_level(name.removeprefix("native-")):
        pytest.skip(f"this processor has no {name}")
    return NativeKernel(native)


def device_kernel(**options) -> TorchKernel:
    """Make the kernel that serves other devices, for the CPU: it reads no number on the way."""
    return TorchKernel(CPU, reads_numbers=False, **options)


def measured(kernel: Kernel, *tensors: torch.Tensor, histogram: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return row and bins of some tensors, merged into one row."""
    arena = kernel.arena(3)
    kernel.measure(tensors, [1] * len(tensors), arena, histogram=histogram)
    rows, bins = kernel.ship(arena).take()
    assert not rows[[0, 2]].any()
    assert not bins[[0, 2]].any()
    return rows[1], bins[1]


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return all elements in float64."""
    return tensor.detach().double().reshape(-1).numpy()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, by which NaNs and signed zeros can be compared."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def bounds_for(kernel: Kernel, dtype: torch.dtype) -> Bounds:
    """Return how exact a kernel must be for a dtype."""
    return FLOAT64_SUMS if dtype == torch.float64 or not getattr(kernel, "reads_numbers", True) else FLOAT32_SUMS


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))
