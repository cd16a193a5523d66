"""Statistics on NVIDIA GPUs (and, through Triton, on others that torch calls "cuda"). Importing needs no GPU."""

from sonde.stats.cuda.arena import DeviceArena, DeviceShipment
from sonde.stats.cuda.choose import NoDeviceKernel, cuda_kernel
from sonde.stats.cuda.kernel import DeviceKernel

__all__ = ["DeviceArena", "DeviceKernel", "DeviceShipment", "NoDeviceKernel", "cuda_kernel"]
