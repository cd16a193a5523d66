"""Distribute tensors over launches: the argument blocks of the kernels in `summary.cu`."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

# The same numbers as in summary.cu.
SUMMARY_THREADS: Final = 256
CHANGE_THREADS: Final = 128
SUMMARY_TENSORS: Final = 168
CHANGE_TENSORS: Final = 112

_TARGET: Final = struct.Struct("<5Q2I")  # rows, bins, partials, tickets, chunk, tensors, padding
_WORD, _HALF = 8, 4
# Chunks start at a multiple of this many elements, so that a tensor's alignment is that of all its chunks.
_CHUNK_UNIT: Final = 4096
_SMALLEST_CHUNK: Final = 4 * _CHUNK_UNIT
# From this size on a block's start and end hardly count, and smaller chunks even out which block finishes last.
_AMPLE_CHUNK: Final = 1 << 17


def chunk_for(elements: int, blocks: int) -> int:
    """Return the chunk size with which `elements` give `blocks` blocks, or twice as many if they are large."""
    if elements > blocks * _AMPLE_CHUNK:
        blocks *= 2
    return max(-(-elements // (blocks * _CHUNK_UNIT)) * _CHUNK_UNIT, _SMALLEST_CHUNK)


def most_blocks(blocks: int) -> int:
    """Return how many blocks a launch can have at most: each tensor's last chunk may be a small one."""
    return 2 * blocks + SUMMARY_TENSORS


def blocks_of(numel: int, chunk: int) -> int:
    """Return how many blocks read a tensor; an empty one needs a block too, to be seen."""
    return max(1, -(-numel // chunk))


@dataclass(slots=True)
class Batch:
    """One launch: tensors `start` to `stop` of a group, and its argument block with all but addresses filled in."""

    start: int
    stop: int
    chunk: int
    blocks: int
    block: ctypes.Array[ctypes.c_char]
    arguments: ctypes.Array[ctypes.c_void_p]
    pointers: struct.Struct
    shadows_at: int

    def point(self, targets: tuple[int, int, int, int], pointers: Sequence[int], shadows: Sequence[int]) -> None:
        """Fill in addresses: of the arena's rows, bins, partial rows and tickets, of the tensors and their shadows."""
        count = self.stop - self.start
        _TARGET.pack_into(self.block, 0, *targets, self.chunk, count, 0)
        self.pointers.pack_into(self.block, _TARGET.size, *pointers[self.start : self.stop])
        if shadows:
            self.pointers.pack_into(self.block, self.shadows_at, *shadows[self.start : self.stop])


def make_batches(
    numels: Sequence[int], rows: Sequence[int], change_rows: Sequence[int] | None, blocks: int
) -> list[Batch]:
    """Deal tensors out over launches of about `blocks` blocks each. Within a launch no row is written twice."""
    limit = SUMMARY_TENSORS if change_rows is None else CHANGE_TENSORS
    return [
        _make_batch(start, stop, numels, rows, change_rows, blocks) for start, stop in pieces(rows, change_rows, limit)
    ]


def pieces(rows: Sequence[int], change_rows: Sequence[int] | None, limit: int) -> Iterator[tuple[int, int]]:
    """Yield stretches of at most `limit` tensors within which no row is written twice."""
    start, written = 0, set[int]()
    for at, row in enumerate(rows):
        touched = {row} if change_rows is None else {row, change_rows[at]}
        if at - start == limit or not written.isdisjoint(touched):
            yield start, at
            start, written = at, set()
        written |= touched
    yield start, len(rows)


def _make_batch(
    start: int,
    stop: int,
    numels: Sequence[int],
    rows: Sequence[int],
    change_rows: Sequence[int] | None,
    blocks: int,
) -> Batch:
    numels, rows = numels[start:stop], rows[start:stop]
    limit = SUMMARY_TENSORS if change_rows is None else CHANGE_TENSORS
    chunk = chunk_for(sum(numels), blocks)
    firsts = [0]
    for numel in numels:
        firsts.append(firsts[-1] + blocks_of(numel, chunk))
    # Arrays in the order of the structures Batch and ChangeBatch: pointers, shadows, numels, firsts, rows, change rows.
    wide = 2 if change_rows is None else 3
    halves = [firsts[:-1], list(rows)] if change_rows is None else [firsts[:-1], list(rows), change_rows[start:stop]]
    at = _TARGET.size + (wide - 1) * _WORD * limit
    block = ctypes.create_string_buffer(at + _WORD * limit + _HALF * limit * len(halves))
    struct.pack_into(f"<{len(numels)}Q", block, at, *numels)
    at += _WORD * limit
    for values in halves:
        struct.pack_into(f"<{len(values)}I", block, at, *values)
        at += _HALF * limit
    return Batch(
        start=start,
        stop=stop,
        chunk=chunk,
        blocks=firsts[-1],
        block=block,
        arguments=(ctypes.c_void_p * 1)(ctypes.addressof(block)),
        pointers=struct.Struct(f"<{stop - start}Q"),
        shadows_at=_TARGET.size + _WORD * limit,
    )


class SingleBatch:
    """The argument block of a launch for one tensor, made to be refilled quickly.

    `fill` takes the addresses of the arena's rows, bins, partial rows and tickets, then chunk, 1, 0, the address of the
    tensor and its number of elements, 0, and its row.
    """

    def __init__(self) -> None:
        layout = struct.Struct(_TARGET.format + "QQII")
        self._block = ctypes.create_string_buffer(layout.size)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self.fill: Callable[..., None] = functools.partial(layout.pack_into, self._block, 0)
