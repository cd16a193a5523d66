"""Which kernel serves a device."""

from __future__ import annotations

import torch

from sonde.signals import Kernel
from sonde.stats.fallback import TorchKernel


def kernel_for(device: torch.device) -> Kernel:
    """Return the fastest kernel there is for tensors on `device`."""
    return TorchKernel()
