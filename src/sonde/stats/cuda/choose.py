"""Which kernel serves a CUDA device: CUDA C compiled by NVRTC, or Triton where that cannot be had."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from subprocess import SubprocessError
from threading import Lock
from typing import Final

import torch

from sonde.errors import OptionError, SondeError
from sonde.stats.cuda.kernel import DeviceKernel

CHOICE_VARIABLE: Final = "SONDE_KERNEL"
_CPU_CHOICES: Final = ("native",)  # the same variable chooses for the CPU; these say nothing about other devices


class NoDeviceKernel(SondeError, RuntimeError):
    """Neither CUDA C nor Triton works on this device; torch operations still do."""


def cuda_kernel(device: torch.device | str | int) -> DeviceKernel:
    """Return the kernel of a CUDA device: one object per device, made on first use.

    `SONDE_KERNEL=cuda` or `SONDE_KERNEL=triton` insists on one of the two; otherwise Triton stands in where CUDA C
    cannot be compiled, with a warning that says why. `NoDeviceKernel` is raised where neither works, and for
    `SONDE_KERNEL=torch`: torch operations are to be used then.
    """
    index = _index_of(device)
    wanted = os.environ.get(CHOICE_VARIABLE, "").lower()
    if wanted == "torch":
        raise NoDeviceKernel(f"{CHOICE_VARIABLE}={wanted} asks for torch operations")
    if wanted in _CPU_CHOICES:
        wanted = ""
    if wanted and wanted not in _MAKERS:
        known = ", ".join((*_MAKERS, *_CPU_CHOICES, "torch"))
        raise OptionError(f"{CHOICE_VARIABLE}={wanted!r} is not one of: {known}")
    with _lock:
        kernel = _kernels.get((index, wanted))
        if kernel is None:
            kernel = _kernels[index, wanted] = _make(index, (wanted,) if wanted else tuple(_MAKERS))
        return kernel


def _index_of(device: torch.device | str | int) -> int:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise NoDeviceKernel(f"{device} is not a CUDA device that torch can use here")
    return torch.empty(0, device=device).get_device()  # "cuda" alone means the current device


def _make(index: int, choices: tuple[str, ...]) -> DeviceKernel:
    reasons = []
    for name in choices:
        try:
            kernel = _MAKERS[name](index)
            kernel.check()
        except _FAILURES as error:
            reasons.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if reasons:
            warnings.warn(f"Sonde falls back to its slower {name} kernel on cuda:{index} ({reasons[0]})", stacklevel=3)
        return kernel
    raise NoDeviceKernel(f"no statistics kernel works on cuda:{index} ({'; '.join(reasons)})")


def _make_native(index: int) -> DeviceKernel:
    from sonde.stats.cuda.native import NativeKernel

    return NativeKernel(index)


def _make_triton(index: int) -> DeviceKernel:
    from sonde.stats.cuda.triton_kernel import TritonKernel

    return TritonKernel(index)


# What importing, compiling, loading and launching were seen to raise; a compiler that Triton calls may fail as well.
_FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SubprocessError,
    TypeError,
    ValueError,
)
_MAKERS: Final[dict[str, Callable[[int], DeviceKernel]]] = {"cuda": _make_native, "triton": _make_triton}
_kernels: dict[tuple[int, str], DeviceKernel] = {}
_lock = Lock()
