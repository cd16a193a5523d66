"""Summaries of CPU tensors by the native library."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from sonde.stats.adapt import PLAIN_TYPES, Readable, difference, to_readable
from sonde.stats.library import ArenaLayout, Library
from sonde.stats.outputs import Outputs, native_module
from sonde.stats.protocol import Arena, BaseKernel, Changes, HostArena, HostShipment

# What the library calls the dtypes it reads.
_FORMATS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_WIDTH: Final = 6  # numbers for each tensor of a batch
_DLPACK_CPU: Final = 1
_WITH_CHANGE: Final = 4  # added to the format of a tensor that has a shadow
# Elements from which the work is worth letting other Python threads run, and worth waking torch's threads (measured:
# waking them costs some 5 us, as much as 20,000 elements, but a busy second core can cost much more).
_RELEASE_FROM: Final = 1 << 16
_THREADS_FROM: Final = 100_000


class NativeArena(HostArena):
    """Rows whose place the native library knows."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._layout = ArenaLayout(self.rows.ctypes.data, self.bins.ctypes.data, capacity)
        self.address = ctypes.addressof(self._layout)


class NativeKernel(BaseKernel):
    """Summarises CPU tensors in one pass over their memory."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self.library = library
        self._measure_one = library.measure_one

    def arena(self, capacity: int) -> NativeArena:
        """Make an empty arena with `capacity` rows."""
        return NativeArena(capacity)

    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row; return whether the tensor could be read."""
        place = _plain_place(tensor)
        if place is None or place[1] >= _RELEASE_FROM:
            batch = _Batch(arena)
            batch.add(tensor, row)
            return batch.run(self.library, histogram) > 0
        pointer, length, format = place
        if self._measure_one(arena.address, pointer, length, row << 3 | format << 1 | histogram):  # type: ignore[attr-defined]  # the arena is ours
            raise _outside(arena, (row,))
        return True

    def open_outputs(self, outputs: Outputs, arena: Arena, base: int) -> None:
        """Let `outputs` write rows of `arena`, whose first row is that of the site `base`."""
        assert isinstance(arena, NativeArena)
        threads = torch.get_num_threads() if self.library.has_threads else 1
        addresses = (arena.rows.ctypes.data, arena.bins.ctypes.data)
        outputs.open_cpu(*addresses, arena.capacity, base, threads)  # type: ignore[attr-defined]  # only C code is ever closed

    def measure(self, tensors: Sequence[Tensor], rows: Sequence[int], arena: Arena, *, histogram: bool = True) -> None:
        """Merge the summary of tensor i into row `rows[i]`."""
        batch = _Batch(arena)
        batch.add_all(tensors, rows)
        batch.run(self.library, histogram)

    def _measure_changes(self, changes: Changes, arena: Arena, histogram: bool) -> None:
        batch = _Batch(arena)
        outdated = batch.add_changes(changes)
        batch.run(self.library, histogram)
        for tensor, shadow in outdated:
            shadow.detach().copy_(tensor.detach())

    def warm_up(self, dtypes: Collection[torch.dtype] = ()) -> None:
        """Do nothing: there is nothing to prepare."""

    def ship(self, arena: Arena) -> HostShipment:
        """Hand the arena's rows over."""
        assert isinstance(arena, HostArena)
        return HostShipment(arena)


class _Batch:
    """Tensors to be summarised in one call: a table of where they lie and which rows they go to."""

    def __init__(self, arena: Arena) -> None:
        assert isinstance(arena, NativeArena)
        self._arena = arena
        self._table = array("q")
        self._elements = 0
        self._held: list[Tensor] = []  # converted copies, kept alive until the call
        self._zeros: list[tuple[int, int]] = []

    def add(self, tensor: Tensor, row: int) -> None:
        """Add a tensor, unless it has no memory to read."""
        place = _plain_place(tensor) or self._converted_place(tensor, row)
        if place is not None:
            pointer, length, format = place
            self._elements += length
            self._table.extend((pointer, 0, length, format, row, 0))

    def add_all(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Add many tensors."""
        for index in self._fill(tensors, None, rows, rows):
            self.add(tensors[index], rows[index])

    def add_changes(self, changes: Changes) -> list[tuple[Tensor, Tensor]]:
        """Add many tensors with their shadows; return those whose shadow the library will not update."""
        left = self._fill(changes.tensors, changes.shadows, changes.rows, changes.change_rows)
        each = list(changes.each()) if left else []
        return [each[index][:2] for index in left if not self.add_change(*each[index])]

    def _fill(
        self,
        tensors: Sequence[Tensor],
        shadows: Sequence[Tensor] | None,
        rows: Sequence[int],
        change_rows: Sequence[int],
    ) -> Sequence[int]:
        """Add the plain tensors, in C since every Python call would show; return the indices of the others."""
        if not len(tensors) == len(rows) == len(change_rows) == len(shadows or tensors):
            raise ValueError(f"{len(tensors)} tensors, but {len(rows)} rows")
        native = native_module()
        if native is None:
            return range(len(tensors))
        table = array("q", bytes(8 * _WIDTH * len(tensors)))
        table[4::_WIDTH], table[5::_WIDTH] = array("q", rows), array("q", change_rows)
        left: list[int] = native.fill(tensors, shadows, table, _WIDTH, _DLPACK_CPU, 0)
        self._elements += sum(table[2::_WIDTH]) * (1 if shadows is None else 2)
        for index in reversed(left):
            del table[_WIDTH * index : _WIDTH * (index + 1)]
        self._table += table
        return left

    def add_change(self, tensor: Tensor, shadow: Tensor, row: int, change_row: int) -> bool:
        """Add a tensor with its shadow; return whether the library will update the shadow."""
        place, place_before = _plain_place(tensor), _plain_place(shadow)
        if place is None or place_before is None:
            place, place_before = _twin_places(tensor, shadow)
        if place is None or place_before is None or place[1:] != place_before[1:]:
            return self._add_difference(tensor, shadow, row, change_row)
        pointer, length, format = place
        self._elements += 2 * length
        self._table.extend((pointer, place_before[0], length, format | _WITH_CHANGE, row, change_row))
        return True

    def run(self, library: Library, histogram: bool) -> int:
        """Summarise everything that was added; return how many tensors that were."""
        table = self._table
        size = len(table) // _WIDTH
        threads = 1
        if library.has_threads and self._elements >= _THREADS_FROM:
            threads = torch.get_num_threads()
        measure = library.measure if self._elements >= _RELEASE_FROM else library.measure_briefly
        if measure(self._arena.address, table.buffer_info()[0], size, threads << 1 | histogram):
            raise _outside(self._arena, [*table[4::_WIDTH], *table[5::_WIDTH]])
        for row, count in self._zeros:
            self._arena.add_zeros(row, count)
        return size

    def _converted_place(self, tensor: Tensor, row: int) -> tuple[int, int, int] | None:
        readable = to_readable(tensor)
        if readable is None or readable.values.device.type != "cpu":
            return None
        if readable.implicit_zeros:
            self._zeros.append((row, readable.implicit_zeros))
        self._held.append(readable.values)
        return _place(readable.values)

    def _add_difference(self, tensor: Tensor, shadow: Tensor, row: int, change_row: int) -> bool:
        self.add(tensor, row)
        change = difference(tensor, shadow)
        if change is None:
            return True  # neither measured nor brought up to date: there is nothing that could be
        self._held.append(change)
        self.add(change, change_row)
        return False


def _place(values: Tensor) -> tuple[int, int, int]:
    return values.data_ptr(), values.numel(), _FORMATS[values.dtype]


def _plain_place(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return pointer, length and format of an ordinary tensor; None for one that wants a closer look."""
    if type(tensor) not in PLAIN_TYPES:
        return None
    format = _FORMATS.get(tensor.dtype)
    if format is None:
        return None
    try:
        if not tensor.is_cpu or tensor.is_neg() or not tensor.is_contiguous():
            return None
        return tensor.data_ptr(), tensor.numel(), format
    except RuntimeError:  # sparse, or inside a functorch transform: no pointer to be had
        return None


def _twin_places(tensor: Tensor, shadow: Tensor) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
    """Return the places of two tensors that lie in memory alike, neither of them converted."""
    now, before = to_readable(tensor), to_readable(shadow)
    if now is None or before is None or not (_is_in_place(now, tensor) and _is_in_place(before, shadow)):
        return None, None
    if now.values.stride() != before.values.stride() or now.values.shape != before.values.shape:
        return None, None
    return _place(now.values), _place(before.values)


def _is_in_place(readable: Readable, tensor: Tensor) -> bool:
    values = readable.values
    if values.device.type != "cpu" or readable.implicit_zeros or type(tensor) not in PLAIN_TYPES:
        return False
    return values.dtype == tensor.dtype and values.data_ptr() == tensor.data_ptr()


def _outside(arena: Arena, rows: Iterable[int]) -> IndexError:
    worst = max(rows, key=lambda row: (row < 0, row))
    return IndexError(f"row {worst} is outside an arena of {arena.capacity} rows; make a larger arena")
