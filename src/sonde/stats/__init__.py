"""Statistics kernels: one-pass summaries of tensors into the rows of an arena."""

from sonde.stats.adapt import Readable, to_readable
from sonde.stats.choose import kernel_for
from sonde.stats.compiled import NativeKernel
from sonde.stats.fallback import TorchKernel
from sonde.stats.generic import GenericKernel
from sonde.stats.host import HostArena, HostShipment

__all__ = [
    "GenericKernel",
    "HostArena",
    "HostShipment",
    "NativeKernel",
    "Readable",
    "TorchKernel",
    "kernel_for",
    "to_readable",
]
