"""The byte-bounded ring: arenas go round from the training thread to the worker and back, and no more are made."""

from __future__ import annotations

import threading
from collections import deque

import torch

from sonde.signals import Arena, Kernel


class ArenaPool:
    """Lends arenas up to a number of bytes. When all are out, there is none to lend: nobody waits, nothing grows."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._free: dict[torch.device, deque[Arena]] = {}
        self._lock = threading.Lock()
        self._lent = 0
        self._bytes_per_row = 0.0

    def lend(self, device: torch.device, kernel: Kernel, capacity: int) -> Arena | None:
        """Return an empty arena with room for `capacity` rows at least, or None if the bytes are used up."""
        with self._lock:
            free = self._free.setdefault(device, deque())
            while free:
                arena = free.popleft()
                if arena.capacity >= capacity:
                    self._lent += 1
                    return arena
                self.used_bytes -= arena.nbytes  # too small since new sites were found: let it go
            # The first two are always lent: one to fill while the other is emptied. With less, nothing is recorded.
            if self._lent >= 2 and self.used_bytes + int(self._bytes_per_row * capacity) > self.max_bytes:
                return None
            with torch.inference_mode(False):  # or it could be written to in such evaluations only
                arena = kernel.arena(capacity)
            self._bytes_per_row = arena.nbytes / arena.capacity
            self.used_bytes += arena.nbytes
            self._lent += 1
            return arena

    def give_back(self, device: torch.device, arena: Arena) -> None:
        """Take an arena back, emptied."""
        arena.reset()
        with self._lock:
            self._lent -= 1
            self._free.setdefault(device, deque()).append(arena)

    def clear(self) -> None:
        """Let go of all arenas that are not out, and so of their memory."""
        with self._lock:
            for arena in (arena for arenas in self._free.values() for arena in arenas):
                self.used_bytes -= arena.nbytes
            self._free.clear()

    @property
    def is_slack(self) -> bool:
        """Say whether at most a quarter of the bytes is out."""
        with self._lock:
            free = sum(arena.nbytes for arenas in self._free.values() for arena in arenas)
            return self._lent <= 2 or (self.used_bytes - free) * 4 <= self.max_bytes
