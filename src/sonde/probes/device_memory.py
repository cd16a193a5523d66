"""What torch's allocator holds on a CUDA device, step by step. Reading it asks the host's books, never the device."""

from __future__ import annotations

from typing import Any, Final

import torch

from sonde.signals import Recorder

# Scalar by scalar: where torch's nested statistics keep it. Peaks are since the user last reset them.
_PLACES: Final[dict[str, tuple[str, ...]]] = {
    "allocated": ("allocated_bytes", "all", "current"),
    "allocated_peak": ("allocated_bytes", "all", "peak"),
    "reserved": ("reserved_bytes", "all", "current"),
    "allocation_retries": ("num_alloc_retries",),
}


class DeviceMemory:
    """Reports the bytes that torch has allocated and reserved on one device as scalars such as `cuda:0.allocated`.

    `allocation_retries` counts how often torch had to empty its cache to find room, each of which stalls the device.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._sites = [(recorder.site(f"{device}.{name}", "scalar"), place) for name, place in _PLACES.items()]

    def see(self) -> None:
        """Report the state of now."""
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        for site, place in self._sites:
            value = _look_up(statistics, place)
            if value is not None:  # another allocator than torch's own may not count it
                self._recorder.put(site, float(value))


def _look_up(statistics: dict[str, Any], place: tuple[str, ...]) -> int | None:
    found: Any = statistics
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None
