"""Statistics kernels: one-pass summaries of tensors into the rows of an arena."""

from sonde.stats.adapt import Readable, to_readable
from sonde.stats.choose import kernel_for
from sonde.stats.compiled import NativeKernel
from sonde.stats.protocol import HostArena, HostShipment
from sonde.stats.torch_kernel import TorchKernel

__all__ = [
    "HostArena",
    "HostShipment",
    "NativeKernel",
    "Readable",
    "TorchKernel",
    "kernel_for",
    "to_readable",
]
