"""Statistics kernels: one-pass summaries of tensors into the rows of an arena."""

from sonde.stats.adapt import Readable, to_readable
from sonde.stats.choose import kernel_for
from sonde.stats.fallback import TorchKernel
from sonde.stats.host import HostArena, HostShipment

__all__ = ["HostArena", "HostShipment", "Readable", "TorchKernel", "kernel_for", "to_readable"]
