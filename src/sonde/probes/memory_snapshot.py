"""Memory at one moment, as plain numbers, and what changed between two moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from sonde.probes.device_memory import ALLOCATED, ALLOCATED_PEAK, RESERVED, RESERVED_PEAK, allocator_numbers
from sonde.probes.process_memory import available_bytes, proportional_bytes, resident_bytes, total_bytes

_BY_NAME: Final = {
    "cuda_allocated": ALLOCATED,
    "cuda_reserved": RESERVED,
    "cuda_max_allocated": ALLOCATED_PEAK,
    "cuda_max_reserved": RESERVED_PEAK,
}


def memory_snapshot(*, pss: bool = False, clock: Callable[[], float] = time.time) -> dict[str, Any]:
    """Return what the process, the machine and the current CUDA device hold now, in bytes.

    Keys: `timestamp`, `rss`, `cpu_memory_percent`, `cpu_memory_available`, `cpu_memory_used` and, once CUDA is in use,
    `cuda_allocated`, `cuda_reserved`, `cuda_max_allocated`, `cuda_max_reserved`, `cuda_device_count`,
    `cuda_current_device`. With `pss` also `pss`, whose reading takes milliseconds in a large process. What the system
    does not tell is absent.

    >>> memory_snapshot()["cpu_memory_percent"] <= 100
    True
    """
    readings = {"rss": resident_bytes(), "pss": proportional_bytes() if pss else None}
    found: dict[str, Any] = {"timestamp": clock()}
    found |= {name: value for name, value in readings.items() if value is not None}
    return found | _machine() | _device()


def compare_snapshots(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much each number of two snapshots changed; what only one of them has is left out."""
    same_device = before.get("cuda_current_device") == after.get("cuda_current_device")
    return {
        name: after[name] - value
        for name, value in before.items()
        if name in after and isinstance(value, int | float) and (same_device or not name.startswith("cuda_"))
    }


def used_devices() -> list[int]:
    """Return the CUDA devices on which torch holds memory, as far as its allocator tells."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch
        return []
    devices = range(torch.cuda.device_count())
    return [index for index in devices if allocator_numbers(index, [RESERVED]).get(RESERVED)]


def _machine() -> dict[str, Any]:
    total, available = total_bytes(), available_bytes()
    if not total or available is None:
        return {}
    used = max(total - available, 0)
    return {
        "cpu_memory_percent": round(100 * used / total, 1),
        "cpu_memory_available": available,
        "cpu_memory_used": used,
    }


def _device() -> dict[str, Any]:
    # Asking for more would start CUDA in a process that only uses the CPU.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch
        return {}
    current = torch.cuda.current_device()
    numbers = allocator_numbers(current, _BY_NAME.values())
    found = {name: numbers[place] for name, place in _BY_NAME.items() if place in numbers}
    return found | {"cuda_device_count": torch.cuda.device_count(), "cuda_current_device": current}
