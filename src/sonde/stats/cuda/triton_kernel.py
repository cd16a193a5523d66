"""The second way to measure on a GPU: Triton, for devices that NVRTC does not serve."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.stats.cuda import triton_programs as programs
from sonde.stats.cuda.arena import DeviceArena
from sonde.stats.cuda.batches import chunk_for, pieces
from sonde.stats.cuda.kernel import FLOATS, DeviceKernel, Group

_BLOCK: Final = 1024
_MERGE_BLOCK: Final = 64
_CHUNKS_PER_PROCESSOR: Final = 8
_NO_LIMIT: Final = 1 << 30
_WARPS: Final = 8


class TritonKernel(DeviceKernel):
    """Summarises tensors on one GPU with Triton. Every call uploads a table of chunks, through pinned memory."""

    name = "triton"
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(FLOATS)

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._chunks = torch.cuda.get_device_properties(index).multi_processor_count * _CHUNKS_PER_PROCESSOR

    def check(self) -> None:
        """Measure a few numbers and look at the result; errors of Triton's own become plain ones."""
        try:
            super().check()
        except programs.Failure as error:
            raise RuntimeError(f"Triton cannot compile for {self.device}: {error}") from error

    def arena(self, capacity: int) -> DeviceArena:
        """Make an empty arena with `capacity` rows."""
        return DeviceArena(capacity, self.index, 2 * (2 * self._chunks + capacity))

    def launch(self, dtype: torch.dtype, group: Group, arena: DeviceArena, histogram: bool) -> None:
        """Queue the summaries of a group on the current stream."""
        for start, stop in pieces(group.rows, None, _NO_LIMIT):
            self._launch_piece(dtype, group, slice(start, stop), arena, histogram)

    def launch_change(self, dtype: torch.dtype, group: Group, arena: DeviceArena, histogram: bool) -> None:
        """Queue the summaries of a group and of its change, and the update of its shadows, on the current stream."""
        for start, stop in pieces(group.rows, group.change_rows, _NO_LIMIT):
            self._launch_piece(dtype, group, slice(start, stop), arena, histogram)

    def _launch_piece(self, dtype: torch.dtype, group: Group, part: slice, arena: DeviceArena, histogram: bool) -> None:
        ways = 2 if group.shadows else 1
        chunks, tensors = tables(group, part, dtype.itemsize, self._chunks)
        if tensors[:, 2:].min() < 0 or tensors[:, 2:].max() >= arena.capacity:
            raise IndexError(f"some rows are not among the arena's {arena.capacity}")
        gap = np.zeros(_lines_end(len(chunks)) - chunks.size, np.int64)
        table = _upload(np.concatenate((chunks.ravel(), gap, tensors.ravel())), self.device)
        run_programs(
            table, len(chunks), len(tensors), arena.rows, arena.bins, arena.partials, dtype, ways == 2, histogram
        )


def tables(group: Group, part: slice, itemsize: int, blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tables that the programs read: one line per chunk, and one per tensor."""
    numels = np.array(group.numels[part], dtype=np.int64)
    rows = np.array(group.rows[part], dtype=np.int64)
    pointers = np.array(group.pointers[part], dtype=np.int64)
    shadows = np.array(group.shadows[part], dtype=np.int64) if group.shadows else pointers
    change_rows = np.array(group.change_rows[part], dtype=np.int64) if group.change_rows else rows
    chunk = chunk_for(int(numels.sum()), blocks)
    counts = np.maximum(1, -(-numels // chunk))
    firsts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(numels)), counts)
    starts = (np.arange(len(owner)) - firsts[owner]) * chunk
    chunks = (
        pointers[owner] + starts * itemsize,
        shadows[owner] + starts * itemsize,
        np.minimum(chunk, numels[owner] - starts),
        rows[owner],
        change_rows[owner],
    )
    return np.stack(chunks, axis=1), np.stack((firsts, counts, rows, change_rows), axis=1)


def run_programs(
    table: Tensor,
    chunks: int,
    tensors: int,
    rows: Tensor,
    bins: Tensor,
    partials: Tensor,
    dtype: torch.dtype,
    change: bool,
    histogram: bool,
) -> None:
    """Queue both programs; `table` holds the lines of all chunks, then, from an even word on, those of all tensors."""
    element = _triton_dtype(dtype)
    programs.chunk_program[(chunks,)](
        table,
        partials,
        bins,
        ELEMENT=element,
        REAL=element if dtype == torch.float64 else _triton_dtype(torch.float32),
        CHANGE=change,
        HISTOGRAM=histogram,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    ways = 2 if change else 1
    # One warp: the program reads and rewrites its row, which several warps would do out of step.
    words = _lines_end(chunks)
    programs.merge_program[(tensors, ways)](table[words:], partials, rows, WAYS=ways, BLOCK=_MERGE_BLOCK, num_warps=1)


def _lines_end(chunks: int) -> int:
    """Return the word at which the tensors' lines begin: an even one, since Triton compiles anew for other places."""
    words: int = chunks * programs.ENTRY_WORDS.value
    return words + words % 2


def _triton_dtype(dtype: torch.dtype) -> object:
    return getattr(programs.language, str(dtype).removeprefix("torch."))


def _upload(table: NDArray[np.int64], device: torch.device) -> Tensor:
    # Torch's pool of pinned memory does not reuse a block before the copies from it are done.
    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)
