"""The kernel of a CUDA device, made on first use and checked before it is trusted."""

from __future__ import annotations

from threading import Lock
from typing import Final

import torch

from sonde.errors import SondeError
from sonde.stats.cuda.kernel import DeviceKernel
from sonde.stats.cuda.native import NativeKernel

# What importing, compiling, loading and launching were seen to raise.
_FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_kernels: dict[int, DeviceKernel] = {}
_lock = Lock()


class NoDeviceKernel(SondeError, RuntimeError):
    """CUDA C does not work on this device; torch operations still do."""


def cuda_kernel(device: torch.device | str | int) -> DeviceKernel:
    """Return the kernel of a CUDA device: one object per device.

    Raises:
        NoDeviceKernel: It cannot be compiled, or gives wrong results there.

    """
    index = _index_of(device)
    with _lock:
        kernel = _kernels.get(index)
        if kernel is None:
            kernel = _kernels[index] = _make(index)
        return kernel


def _index_of(device: torch.device | str | int) -> int:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise NoDeviceKernel(f"{device} is not a CUDA device that torch can use here")
    return torch.empty(0, device=device).get_device()  # "cuda" alone means the current device


def _make(index: int) -> DeviceKernel:
    try:
        kernel = NativeKernel(index)
        kernel.check()
    except _FAILURES as error:
        reason = f"{type(error).__name__}: {error}"
        raise NoDeviceKernel(f"no statistics kernel works on cuda:{index} ({reason})") from error
    return kernel
