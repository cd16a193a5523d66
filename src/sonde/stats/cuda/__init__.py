"""Statistics on NVIDIA GPUs, by CUDA C compiled at run time. Importing needs no GPU."""

from sonde.stats.cuda.arena import DeviceArena, DeviceShipment
from sonde.stats.cuda.choose import NoDeviceKernel, cuda_kernel
from sonde.stats.cuda.kernel import DeviceKernel

__all__ = ["DeviceArena", "DeviceKernel", "DeviceShipment", "NoDeviceKernel", "cuda_kernel"]
