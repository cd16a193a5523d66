"""Which kernel serves a device."""

from __future__ import annotations

import os
from typing import Final

import torch

from sonde.errors import OptionError
from sonde.signals import Kernel
from sonde.stats import library
from sonde.stats.compiled import NativeKernel
from sonde.stats.fallback import TorchKernel
from sonde.stats.generic import GenericKernel

CHOICE_VARIABLE: Final = "SONDE_KERNEL"
_CHOICES: Final = ("", "native", "torch", "cuda", "triton")  # the last two are for other devices, and mean nothing here


def kernel_for(device: torch.device) -> Kernel:
    """Return the fastest kernel there is for tensors on `device`.

    `SONDE_KERNEL=native` or `SONDE_KERNEL=torch` in the environment insists on one of the two for the CPU.
    """
    return _host_kernel() if device.type == "cpu" else GenericKernel(device)


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
