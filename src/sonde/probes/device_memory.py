"""What torch's allocator holds on a CUDA device, step by step. Reading it asks the host's books, never the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from sonde.stats.protocol import Recorder

Place = tuple[str, ...]
"""Where torch's nested statistics keep a number."""
ALLOCATED: Final[Place] = ("allocated_bytes", "all", "current")
ALLOCATED_PEAK: Final[Place] = ("allocated_bytes", "all", "peak")  # peaks are since the user last reset them
RESERVED: Final[Place] = ("reserved_bytes", "all", "current")
RESERVED_PEAK: Final[Place] = ("reserved_bytes", "all", "peak")
_SCALARS: Final = {
    "allocated": ALLOCATED,
    "allocated_peak": ALLOCATED_PEAK,
    "reserved": RESERVED,
    "allocation_retries": ("num_alloc_retries",),
}


class DeviceMemory:
    """Reports the bytes that torch has allocated and reserved on one device as scalars such as `cuda:0.allocated`.

    `allocation_retries` counts how often torch had to empty its cache to find room, each of which stalls the device.
    Of another allocator than torch's own only what it counts is reported, which may be nothing.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._sites = [(recorder.site(f"{device}.{name}", "scalar"), place) for name, place in _SCALARS.items()]

    def see(self) -> None:
        """Report the state of now."""
        found = allocator_numbers(self._device, [place for _, place in self._sites])
        for site, place in self._sites:
            if place in found:
                self._recorder.put(site, float(found[place]))


def allocator_numbers(device: torch.device | int, places: Iterable[Place]) -> dict[Place, int]:
    """Return what the allocator of a device has in its books, without flattening all of them as torch does.

    What it does not count is absent: one that the user plugged in need not count anything.
    """
    try:
        statistics = torch.cuda.memory_stats_as_nested_dict(device)
    except RuntimeError:
        return {}
    found = {place: _look_up(statistics, place) for place in places}
    return {place: value for place, value in found.items() if value is not None}


def _look_up(statistics: dict[str, Any], place: Place) -> int | None:
    found: Any = statistics
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None
