"""Read what torch's allocator holds on a CUDA device, now and over time, without waiting for the device."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from sonde.stats.protocol import Recorder

# --------------------------------------------------------------------------------
# What torch's allocator holds on a CUDA device, step by step. Reading it does not wait for the device.


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
        """Report the current state."""
        found = allocator_numbers(self._device, [place for _, place in self._sites])
        for site, place in self._sites:
            if place in found:
                self._recorder.put(site, float(found[place]))


def allocator_numbers(device: torch.device | int, places: Iterable[Place]) -> dict[Place, int]:
    """Return statistics of the allocator of a device, without flattening all of them as torch does.

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


# --------------------------------------------------------------------------------
# The CUDA allocator's own history of allocations, with stacks, kept only while it is requested.


logger = logging.getLogger("sonde")

_MOST_ENTRIES: Final = 100_000


class MemoryHistory:
    """Records allocations from `start` to `stop`; writes them on demand, and by itself when memory runs out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        """Begin to record. Python's stacks only: resolving native ones takes minutes."""
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES, stacks="python")

    def stop(self, error: BaseException | None = None) -> None:
        """Stop recording; an error that says memory has run out is written down first."""
        try:
            if isinstance(error, torch.OutOfMemoryError):
                logger.warning("CUDA ran out of memory; its history is in %s", self.dump(self._path))
        except OSError:
            logger.warning("the history of CUDA's memory could not be written to %s", self._path, exc_info=True)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def dump(self, path: Path) -> Path:
        """Write the history so far, to be opened at pytorch.org/memory_viz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call] # torch
        return path
