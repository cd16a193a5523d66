"""Choose the kernel for a device."""

from __future__ import annotations

import logging
import os
from typing import Final

import torch

from sonde.errors import OptionError
from sonde.stats import library
from sonde.stats.compiled import NativeKernel
from sonde.stats.cuda import NoDeviceKernel, cuda_kernel
from sonde.stats.protocol import Kernel
from sonde.stats.torch_kernel import TorchKernel

logger = logging.getLogger("sonde")

CHOICE_VARIABLE: Final = "SONDE_KERNEL"
_CHOICES: Final = ("native", "cuda", "torch")


def kernel_for(device: torch.device) -> Kernel:
    """Return the fastest kernel there is for tensors on `device`.

    `SONDE_KERNEL` in the environment insists on one: `native` for the CPU, `cuda` for CUDA devices, `torch` for all. A
    choice for another kind of device has no effect.
    """
    wanted = os.environ.get(CHOICE_VARIABLE, "").lower()
    if wanted and wanted not in _CHOICES:
        raise OptionError(f"{CHOICE_VARIABLE}={wanted!r} is not one of: {', '.join(_CHOICES)}")
    if wanted == "torch" or device.type not in ("cpu", "cuda"):
        return TorchKernel(device)
    return _cuda_kernel(device) if device.type == "cuda" else _cpu_kernel(wanted)


def _cuda_kernel(device: torch.device) -> Kernel:
    try:
        return cuda_kernel(device)
    except NoDeviceKernel as error:
        logger.warning("%s; torch operations do the work, more slowly.", error)
        return TorchKernel(device)


def _cpu_kernel(wanted: str) -> Kernel:
    native = library.load()
    if native is not None:
        return NativeKernel(native)
    if wanted == "native":
        raise OptionError(
            f"{CHOICE_VARIABLE}=native, but Sonde's native library is not built or cannot be loaded. "
            f"Reinstall Sonde where a C compiler is, or unset {CHOICE_VARIABLE} to use torch operations."
        )
    return TorchKernel()
