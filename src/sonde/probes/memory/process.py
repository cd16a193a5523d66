"""Read how much memory this process holds and how much is left, from the operating system, without torch.

On Linux two small files are read, which costs microseconds; elsewhere psutil is asked. What neither knows is absent.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sonde.stats.protocol import Recorder

RSS: Final = "process.rss"
AVAILABLE: Final = "system.available"
HELD: Final = "process.sonde"
# A sample every tenth step, and at least every tenth of a second if steps are slower than that.
EVERY_STEPS: Final = 10
EVERY_SECONDS: Final = 0.1

_STATM: Final = "/proc/self/statm"
_MEMINFO: Final = "/proc/meminfo"
_GROUP: Final = "/sys/fs/cgroup"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident_bytes() -> int | None:
    """Return the bytes of physical memory this process holds, or None if the system does not report it."""
    try:
        # A file opened anew each time survives forks; the process behind `self` is the one that opens it.
        descriptor = os.open(_STATM, os.O_RDONLY)
    except OSError:
        process = _psutil("Process")
        return None if process is None else int(process.memory_info().rss)
    try:
        return int(os.read(descriptor, 128).split()[1]) * _PAGE
    finally:
        os.close(descriptor)


class _MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _mallinfo() -> Any:
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    ask.restype = _MallInfo
    return ask


def heap_bytes() -> int | None:
    """Return the bytes allocated by malloc and not freed, tensors on the CPU included; None if they are not counted.

    Unlike resident memory it does not stay up when things are freed. It is read from glibc's lists of free blocks, up
    to milliseconds; small Python objects live elsewhere and are not in it.
    """
    ask = _mallinfo()
    if ask is None:
        return None
    found = ask()
    # Another allocator in place of glibc's leaves them at zero.
    return int(found.uordblks + found.hblkhd) or None


def available_bytes() -> int | None:
    """Return the bytes that can still be had before the machine, or the container, runs out."""
    left = [each for each in (_machine_left(), _container_left()) if each is not None]
    return min(left) if left else None


def total_bytes() -> int | None:
    """Return the machine's memory in bytes."""
    found = _meminfo("MemTotal")
    memory = None if found is not None else _psutil("virtual_memory")
    return found if memory is None else int(memory.total)


def _machine_left() -> int | None:
    found = _meminfo("MemAvailable")
    memory = None if found is not None else _psutil("virtual_memory")
    return found if memory is None else int(memory.available)


def _container_left() -> int | None:
    try:
        limit = Path(_GROUP, "memory.max").read_text().strip()
        used = int(Path(_GROUP, "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0) if limit.isdigit() else None


def _meminfo(name: str) -> int | None:
    try:
        lines = Path(_MEMINFO).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)


def _psutil(question: str) -> Any:
    try:
        import psutil
    except ImportError:
        return None
    return getattr(psutil, question)()


class ProcessMemory:
    """Reports the process's resident memory, what is left, and what of it Sonde holds.

    They are scalars: `process.rss`, `system.available`, `process.sonde`.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        clock: Callable[[], float],
        resident: Callable[[], int | None] = resident_bytes,
        available: Callable[[], int | None] = available_bytes,
        held: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._readers = ((RSS, resident), (AVAILABLE, available), (HELD, held))
        self._sites: dict[str, int] = {}
        self._steps = 0
        self._last = float("-inf")

    def see(self) -> None:
        """Report the current state if a sample is due. Called at the end of every step."""
        now = self._clock()
        due = self._steps % EVERY_STEPS == 0 or now - self._last >= EVERY_SECONDS
        self._steps += 1
        if not due:
            return
        self._last = now
        for name, read in self._readers:
            value = read()
            if value is not None:
                if name not in self._sites:
                    self._sites[name] = self._recorder.site(name, "scalar")
                self._recorder.put(self._sites[name], float(value))
