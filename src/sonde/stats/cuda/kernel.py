"""The base of all CUDA kernels: which tensors can be read in place, streams, arenas, copies to the host.

Nothing here waits for the device, with one exception that torch makes: the gradient of a sparse embedding cannot be
brought into its final form (coalesced) without the host learning its size.

While the current stream is being captured into a CUDA graph nothing is measured and rows stay as they are: a replay
would otherwise write into an arena that has long been shipped. `skipped` counts those calls.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, Final, TypeGuard, TypeVar

import torch
from torch import Tensor

from sonde.core import schema
from sonde.stats.adapt import PLAIN_TYPES, is_dense, to_readable, widened
from sonde.stats.cuda.arena import DeviceArena, DeviceShipment
from sonde.stats.protocol import Arena, BaseKernel, Changes

T = TypeVar("T")
_DTYPE: Final = attrgetter("dtype")
# Without torch's question whether CUDA has been started, which every tensor here answers.
current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
is_stream_capturing: Final[Callable[[], bool]] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# Whole numbers, such as tokens and labels, are measured as float64.
WARM_UP_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(slots=True)
class Group:
    """Tensors of one dtype that one batch of launches can take. Shadows only where a change is measured."""

    pointers: list[int] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    shadows: list[int] = field(default_factory=list)
    change_rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pointers)


class DeviceKernel(BaseKernel):
    """Summarises tensors on one CUDA device. Subclasses launch groups of plain, dense tensors."""

    name: str
    dtypes: ClassVar[frozenset[torch.dtype]]
    """Element types that are read as they lie; others are converted on the device first."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = torch.device("cuda", index)
        self.skipped = 0

    @abstractmethod
    def arena(self, capacity: int) -> DeviceArena:
        """Make an empty arena with `capacity` rows."""

    @abstractmethod
    def launch(self, dtype: torch.dtype, group: Group, arena: DeviceArena, histogram: bool) -> None:
        """Queue the summaries of a group on the current stream."""

    @abstractmethod
    def launch_change(self, dtype: torch.dtype, group: Group, arena: DeviceArena, histogram: bool) -> None:
        """Queue the summaries of a group and of its change, and the update of its shadows, on the current stream."""

    def measure(self, tensors: Sequence[Tensor], rows: Sequence[int], arena: Arena, *, histogram: bool = True) -> None:
        """Merge the summary of tensor i into row `rows[i]`."""
        if len(tensors) == 1 and len(rows) == 1:
            self.measure_one(tensors[0], rows[0], arena, histogram=histogram)
        elif tensors:
            with _OnDevice(self.index):
                if self._enter(arena):
                    self._measure(tensors, rows, arena, histogram)

    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row; return whether the tensor could be read."""
        with _OnDevice(self.index):
            return self._enter(arena) and self._measure((tensor,), (row,), arena, histogram) == 1

    def _measure_changes(self, changes: Changes, arena: Arena, histogram: bool) -> None:
        with _OnDevice(self.index):
            if changes.tensors and self._enter(arena):
                self._launch_changes(changes, arena, histogram)

    def ship(self, arena: Arena) -> DeviceShipment:
        """Start moving the arena's rows to the host."""
        assert isinstance(arena, DeviceArena)
        return arena.ship()

    def check(self) -> None:
        """Measure a few numbers and look at the result.

        Raises:
            RuntimeError: This kernel does not work on its device.

        """
        arena = self.arena(1)
        self.measure_one(torch.full((3,), 2.0, device=self.device), 0, arena)
        rows, bins = self.ship(arena).take()
        if (rows[0, schema.COUNT], rows[0, schema.ABS_SUM], bins[0].sum()) != (3, 6, 3):
            raise RuntimeError(f"the {self.name} kernel gives wrong results on {self.device}")

    def warm_up(self, dtypes: Collection[torch.dtype] = ()) -> None:
        """Compile, load and run everything once, so that no training step has to; waits for the device.

        This is for the usual element types and those given; others are compiled at their first use.
        """
        arena = self.arena(4)
        for dtype in self._usual(dtypes):
            # Large enough for several blocks per tensor, which is a way of its own through the kernels.
            values = [torch.zeros(size, device=self.device).to(dtype) for size in (1 << 17, 3)]
            shadows = [each.clone() for each in values]
            for histogram in (False, True):  # the driver loads each when it is launched first, and may wait for that
                self.measure_one(values[0], 0, arena, histogram=histogram)
                self.measure(values, (0, 1), arena, histogram=histogram)
                self.measure_change(values, shadows, (0, 1), (2, 3), arena, histogram=histogram)
        self.ship(arena).take()
        arena.reset()
        torch.cuda.synchronize(self.device)

    def _usual(self, dtypes: Collection[torch.dtype]) -> list[torch.dtype]:
        return [*WARM_UP_DTYPES, *(self.dtypes.intersection(dtypes) - {*WARM_UP_DTYPES})]

    def _enter(self, arena: Arena) -> TypeGuard[DeviceArena]:
        """Order the current stream after the arena's work so far; False where nothing may be queued."""
        assert isinstance(arena, DeviceArena)
        if is_stream_capturing():
            self.skipped += 1
            return False
        arena.enter()
        return True

    def _measure(self, tensors: Sequence[Tensor], rows: Sequence[int], arena: DeviceArena, histogram: bool) -> int:
        """Launch; return how many tensors could be read."""
        plain = self._plain_group(tensors, rows)
        if plain is not None:
            self.launch(*plain, arena, histogram)
            return len(tensors)
        parts = _by_dtype(tensors)
        if len(parts) > 1:
            return sum(self._measure(_at(tensors, part), _at(rows, part), arena, histogram) for part in parts)
        groups: dict[torch.dtype, Group] = {}
        # Converted tensors must live until the launch that reads them is queued; after that the allocator hands their
        # memory out in stream order only.
        converted: list[Tensor] = []
        read = 0
        for tensor, row in zip(tensors, rows, strict=True):
            values, zeros = (tensor, 0) if self._is_plain(tensor) else self._converted(tensor)
            if values is None:
                continue
            converted.append(values)
            _append(groups.setdefault(values.dtype, Group()), values, row)
            if zeros:
                _add_zeros(arena.rows[row], zeros)
            read += 1
        for dtype, group in groups.items():
            self.launch(dtype, group, arena, histogram)
        return read

    def _launch_changes(self, changes: Changes, arena: DeviceArena, histogram: bool) -> None:
        tensors, shadows, rows, change_rows = changes
        plain, before = self._plain_group(tensors, rows), self._plain_group(shadows, change_rows)
        if plain is not None and before is not None and _all_lie_alike(plain, before, tensors, shadows):
            plain[1].shadows, plain[1].change_rows = before[1].pointers, before[1].rows
            self.launch_change(*plain, arena, histogram)
            return
        parts = _by_dtype(tensors)
        if len(parts) > 1:
            for part in parts:
                some = Changes(_at(tensors, part), _at(shadows, part), _at(rows, part), _at(change_rows, part))
                self._launch_changes(some, arena, histogram)
            return
        groups: dict[torch.dtype, Group] = {}
        for tensor, shadow, row, change_row in changes.each():
            if self._is_plain(tensor) and self._is_plain(shadow) and _lie_alike(tensor, shadow):
                group = groups.setdefault(tensor.dtype, Group())
                _append(group, tensor, row)
                group.shadows.append(shadow.data_ptr())
                group.change_rows.append(change_row)
            else:
                self._measure_odd_change(tensor, shadow, row, change_row, arena, histogram)
        for dtype, group in groups.items():
            self.launch_change(dtype, group, arena, histogram)

    def _measure_odd_change(
        self, tensor: Tensor, shadow: Tensor, row: int, change_row: int, arena: DeviceArena, histogram: bool
    ) -> None:
        """Do with torch operations what the kernels cannot do in one pass."""
        self._measure((tensor,), (row,), arena, histogram)
        now, before = to_readable(tensor), to_readable(shadow)
        if now is None or before is None or now.values.shape != before.values.shape:
            return
        with torch.no_grad():
            self._measure((widened(now.values) - widened(before.values),), (change_row,), arena, histogram)
            shadow.detach().copy_(tensor.detach())

    def _plain_group(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> tuple[torch.dtype, Group] | None:
        """Return the group of all tensors if each is plain and dense and all have one dtype, the usual case.

        One pass per property over all tensors: much faster than one pass per tensor over all properties.
        """
        dtype = tensors[0].dtype
        if dtype not in self.dtypes or not set(map(type, tensors)) <= PLAIN_TYPES:
            return None
        try:
            if set(map(_DTYPE, tensors)) != {dtype} or set(map(Tensor.get_device, tensors)) != {self.index}:
                return None
            odd = [tensor for tensor in tensors if not tensor.is_contiguous()]
            if odd and (any(map(Tensor.is_neg, odd)) or not all(map(is_dense, odd))):
                return None
            pointers, numels = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors))
        except RuntimeError:  # a sparse or otherwise unusual tensor
            return None
        if 1 in numels and any(map(Tensor.is_neg, tensors)):  # a view with flipped signs is contiguous only then
            return None
        if len(pointers) != len(rows):
            raise ValueError(f"{len(pointers)} tensors for {len(rows)} rows")
        return dtype, Group(pointers, numels, list(rows))

    def _is_plain(self, tensor: Tensor) -> bool:
        if type(tensor) not in PLAIN_TYPES or tensor.dtype not in self.dtypes or tensor.layout is not torch.strided:
            return False
        try:
            has_memory = bool(tensor.data_ptr()) or not tensor.numel()
            return has_memory and tensor.get_device() == self.index and is_dense(tensor) and not tensor.is_neg()
        except RuntimeError:  # nested, or inside a functorch transform: there is no pointer
            return False

    def _converted(self, tensor: Tensor) -> tuple[Tensor | None, int]:
        readable = to_readable(tensor)
        if readable is None or readable.values.get_device() != self.index:
            return None, 0
        return readable.values, readable.implicit_zeros


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of tensors of each dtype: weights in half precision with norms in full are common."""
    places: dict[torch.dtype, list[int]] = {}
    for at, dtype in enumerate(map(_DTYPE, tensors)):
        places.setdefault(dtype, []).append(at)
    return list(places.values())


def _at(items: Sequence[T], places: list[int]) -> list[T]:
    return [items[place] for place in places]


def _append(group: Group, values: Tensor, row: int) -> None:
    group.pointers.append(values.data_ptr())
    group.numels.append(values.numel())
    group.rows.append(row)


def _add_zeros(row: Tensor, count: int) -> None:
    """Merge `count` zeros, which no tensor stores, into a row on the device."""
    finite = row[schema.COUNT] - row[schema.NAN] - row[schema.POS_INF] - row[schema.NEG_INF]
    share = finite / (finite + count)
    row[schema.M2] += row[schema.MEAN].square() * share * count
    row[schema.MEAN] *= share
    row[schema.MIN].clamp_(max=0)
    row[schema.MAX].clamp_(min=0)
    row[schema.COUNT] += count
    row[schema.ZERO] += count


def _all_lie_alike(
    plain: tuple[torch.dtype, Group],
    before: tuple[torch.dtype, Group],
    tensors: Sequence[Tensor],
    shadows: Sequence[Tensor],
) -> bool:
    if plain[0] is not before[0] or plain[1].numels != before[1].numels:
        return False
    return all(map(Tensor.is_contiguous, (*tensors, *shadows))) or all(map(_lie_alike, tensors, shadows))


def _lie_alike(tensor: Tensor, shadow: Tensor) -> bool:
    if tensor.dtype is not shadow.dtype or tensor.shape != shadow.shape:
        return False
    return (tensor.is_contiguous() and shadow.is_contiguous()) or tensor.stride() == shadow.stride()


class _OnDevice:
    """Make a device current, at no cost if it is already: `torch.cuda.device` costs microseconds either way."""

    __slots__ = ("_before", "_index")

    def __init__(self, index: int) -> None:
        self._index = index
        self._before = -1

    def __enter__(self) -> None:
        current = current_device()
        if current != self._index:
            self._before = current
            torch.cuda.set_device(self._index)

    def __exit__(self, *exc: object) -> None:
        if self._before >= 0:
            torch.cuda.set_device(self._before)
