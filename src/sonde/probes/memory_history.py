"""The CUDA allocator's own history of allocations, with stacks, kept only while somebody asked for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import torch

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
