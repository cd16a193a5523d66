"""Which kernel serves a device."""

from __future__ import annotations

import logging
import os
from typing import Final

import torch

from sonde.errors import OptionError
from sonde.signals import Kernel
from sonde.stats import library
from sonde.stats.compiled import NativeKernel
from sonde.stats.cuda import NoDeviceKernel, cuda_kernel
from sonde.stats.fallback import TorchKernel
from sonde.stats.generic import GenericKernel

logger = logging.getLogger("sonde")

CHOICE_VARIABLE: Final = "SONDE_KERNEL"
_CHOICES: Final = ("", "native", "torch", "cuda", "triton")  # the last two are for other devices, and mean nothing here


def kernel_for(device: torch.device) -> Kernel:
    """Return the fastest kernel there is for tensors on `device`.

    `SONDE_KERNEL=native` or `SONDE_KERNEL=torch` in the environment insists on one of the two for the CPU,
    `SONDE_KERNEL=cuda` or `SONDE_KERNEL=triton` for CUDA devices.
    """
    if device.type == "cpu":
        return _host_kernel()
    return _cuda_kernel(device) if device.type == "cuda" else GenericKernel(device)


def _cuda_kernel(device: torch.device) -> Kernel:
    try:
        return cuda_kernel(device)
    except NoDeviceKernel as error:
        logger.warning("%s; torch operations do the work, more slowly.", error)
        return GenericKernel(device)


def _host_kernel() -> Kernel:
    wanted = os.environ.get(CHOICE_VARIABLE, "").lower()
    if wanted not in _CHOICES:
        raise OptionError(f"{CHOICE_VARIABLE}={wanted!r} is not one of: {', '.join(_CHOICES[1:])}")
    native = None if wanted == "torch" else library.load()
    if native is not None:
        return NativeKernel(native)
    if wanted == "native":
        raise OptionError(
            f"{CHOICE_VARIABLE}=native, but Sonde's native library is not built or cannot be loaded. "
            f"Reinstall Sonde where a C compiler is, or unset {CHOICE_VARIABLE} to use torch operations."
        )
    return TorchKernel()
