"""The CUDA C kernels of `summary.cu`, compiled at run time and launched through the driver."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from threading import Lock
from typing import ClassVar, Final

import torch
from torch import Tensor

from sonde.stats.adapt import PLAIN_TYPES, is_dense
from sonde.stats.cuda import batches, compiler
from sonde.stats.cuda.arena import DeviceArena
from sonde.stats.cuda.batches import Batch, SingleBatch
from sonde.stats.cuda.driver import DriverError, Function, Module, entry_points
from sonde.stats.cuda.kernel import DeviceKernel, Group, current_device, is_stream_capturing
from sonde.stats.outputs import Outputs
from sonde.stats.protocol import Arena

_SOURCE: Final = "summary.cu"
# Numbers of the element types in the source.
_ELEMENTS: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}
# The element types that C code launches kernels for, in its order.
_IN_C: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# As many blocks as run at once: on small tensors a second round would cost more than it evens out.
_BLOCKS_PER_PROCESSOR: Final = 4
_CHANGE_BLOCKS_PER_PROCESSOR: Final = 6
_MOST_PLANS: Final = 256

_PlanKey = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Functions:
    """The kernels for one element type; index by whether a histogram is wanted."""

    single: tuple[Function, Function]
    summary: tuple[Function, Function]
    change: tuple[Function, Function]


@dataclass(frozen=True, slots=True)
class _Plan:
    """All launches for a group, and the rows they write to."""

    batches: list[Batch]
    lowest_row: int
    highest_row: int


class NativeKernel(DeviceKernel):
    """Summarises tensors on one NVIDIA GPU with CUDA C. One launch per batch; nothing is uploaded."""

    name = "cuda"
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(_ELEMENTS)

    def __init__(self, index: int, *, blocks_per_processor: int = _BLOCKS_PER_PROCESSOR) -> None:
        super().__init__(index)
        if torch.version.cuda is None:
            raise compiler.CompileError("CUDA C needs a CUDA build of torch")
        properties = torch.cuda.get_device_properties(index)
        self._capability = (properties.major, properties.minor)
        self._blocks = properties.multi_processor_count * blocks_per_processor
        self._change_blocks = properties.multi_processor_count * _CHANGE_BLOCKS_PER_PROCESSOR
        self._functions: dict[torch.dtype, _Functions] = {}
        self._images: dict[torch.dtype, bytes] = {}
        self._plans: dict[_PlanKey, _Plan] = {}
        self._shapes: dict[int, tuple[int, int]] = {}
        self._single = SingleBatch()
        # Argument blocks are refilled for every launch, and a launch lets other threads run while it is queued.
        self._lock = Lock()
        self._load(torch.float32)  # now, so that a device it does not work on is known at once

    def arena(self, capacity: int) -> DeviceArena:
        """Make an empty arena with `capacity` rows."""
        # Two partial rows per block where a change is measured.
        return DeviceArena(capacity, self.index, 2 * batches.most_blocks(max(self._blocks, self._change_blocks)))

    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row; return whether the tensor could be read.

        This is what runs inside a module's hook, so the usual case goes straight to the launch.
        """
        functions = self._functions.get(tensor.dtype)
        pointer = -1 if functions is None else self._pointer(tensor)
        if functions is None or pointer < 0:
            return super().measure_one(tensor, row, arena, histogram=histogram)
        assert isinstance(arena, DeviceArena)
        if is_stream_capturing():
            self.skipped += 1
            return False
        if not 0 <= row < arena.capacity:
            _check_rows(row, row, arena)
        numel = tensor.numel()
        chunk, blocks = self._shapes.get(numel) or self._shape_for(numel)
        stream = arena.enter()
        with self._lock:
            self._single.fill(*arena.addresses, chunk, 1, 0, pointer, numel, 0, row)
            functions.single[histogram].launch(blocks, batches.SUMMARY_THREADS, stream, self._single.arguments)
        return True

    def open_outputs(self, outputs: Outputs, arena: Arena, base: int) -> None:
        """Let `outputs` launch kernels that write rows of `arena`, whose first row is that of the site `base`."""
        assert isinstance(arena, DeviceArena)
        if arena.capacity < 1 or arena.enter() != arena.stream_handle:
            return
        functions = [
            0 if made is None else made.single[histogram].address
            for made in map(self._functions.get, _IN_C)
            for histogram in (False, True)
        ]
        outputs.open_cuda(  # type: ignore[attr-defined]  # only C code is ever opened
            self.index,
            arena.stream_handle,
            arena.addresses,
            arena.capacity,
            base,
            self._blocks,
            *entry_points(),
            functions,
        )

    def _pointer(self, tensor: Tensor) -> int:
        """Return where the elements of a tensor lie; -1 if they cannot be read here as they lie."""
        if (
            type(tensor) not in PLAIN_TYPES
            or tensor.layout is not torch.strided
            or tensor.get_device() != self.index
            or current_device() != self.index
        ):
            return -1
        try:
            # A view with flipped signs is contiguous only if it has one element.
            if (tensor.is_contiguous() and tensor.numel() > 1) or _is_dense_and_signed(tensor):
                return tensor.data_ptr()
        except RuntimeError:  # nested, or inside a functorch transform
            pass
        return -1

    def _shape_for(self, numel: int) -> tuple[int, int]:
        """Return the chunk and the number of blocks of a launch for one tensor, and remember them."""
        if len(self._shapes) >= _MOST_PLANS:
            self._shapes.clear()
        chunk = batches.chunk_for(numel, self._blocks)
        shape = self._shapes[numel] = (chunk, batches.blocks_of(numel, chunk))
        return shape

    def launch(self, dtype: torch.dtype, group: Group, arena: DeviceArena, histogram: bool) -> None:
        """Queue the summaries of a group on the current stream."""
        function = self._load(dtype).summary[histogram]
        self._launch_all(function, batches.SUMMARY_THREADS, dtype, group, arena)

    def launch_change(self, dtype: torch.dtype, group: Group, arena: DeviceArena, histogram: bool) -> None:
        """Queue the summaries of a group and of its change, and the update of its shadows, on the current stream."""
        function = self._load(dtype).change[histogram]
        self._launch_all(function, batches.CHANGE_THREADS, dtype, group, arena)

    def _launch_all(
        self, function: Function, threads: int, dtype: torch.dtype, group: Group, arena: DeviceArena
    ) -> None:
        with self._lock:
            plan = self._plan(dtype, group)
            _check_rows(plan.lowest_row, plan.highest_row, arena)
            for batch in plan.batches:
                batch.point(arena.addresses, group.pointers, group.shadows)
                function.launch(batch.blocks, threads, arena.stream_handle, batch.arguments)

    def _plan(self, dtype: torch.dtype, group: Group) -> _Plan:
        key = (dtype, tuple(group.numels), tuple(group.rows), tuple(group.change_rows))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:  # shapes that never come back, say of sentences
                self._plans.clear()
            blocks = self._change_blocks if group.shadows else self._blocks
            made = batches.make_batches(group.numels, group.rows, group.change_rows or None, blocks)
            rows = group.rows + group.change_rows
            plan = self._plans[key] = _Plan(made, min(rows), max(rows))
        return plan

    def _load(self, dtype: torch.dtype) -> _Functions:
        functions = self._functions.get(dtype)
        if functions is None:
            with torch.cuda.device(self.index):
                torch.cuda.current_stream().query()  # makes torch's context current in this thread
                functions = self._functions[dtype] = self._compile(dtype)
        return functions

    def warm_up(self, dtypes: Collection[torch.dtype] = ()) -> None:
        """Compile all that is usual at the same time, then run it once."""
        missing = [dtype for dtype in self._usual(dtypes) if dtype not in self._functions]
        with ThreadPoolExecutor(thread_name_prefix="sonde-compiling") as pool:
            self._images |= zip(missing, pool.map(self._image, missing), strict=True)
        super().warm_up(dtypes)

    def _image(self, dtype: torch.dtype) -> bytes:
        return compiler.compiled(_source(), self._capability, _options(dtype))

    def _compile(self, dtype: torch.dtype) -> _Functions:
        try:
            module = Module(self._images.pop(dtype, b"") or self._image(dtype))
        except DriverError:
            compiler.forget(_source(), self._capability, _options(dtype))
            module = Module(self._image(dtype))
        return _Functions(
            single=(module.function("single"), module.function("single_bins")),
            summary=(module.function("summary"), module.function("summary_bins")),
            change=(module.function("change"), module.function("change_bins")),
        )


def _is_dense_and_signed(tensor: Tensor) -> bool:
    if tensor.is_neg():
        return False
    # Images first: asking for this layout is quicker than going through strides.
    return (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)) or is_dense(tensor)


def _check_rows(lowest: int, highest: int, arena: DeviceArena) -> None:
    """Refuse rows that are not there: on the device they would overwrite other memory."""
    if lowest < 0 or highest >= arena.capacity:
        raise IndexError(f"row {lowest if lowest < 0 else highest} is not among the arena's {arena.capacity}")


def _options(dtype: torch.dtype) -> tuple[str, ...]:
    return (f"-DELEMENT={_ELEMENTS[dtype]}",)


@cache
def _source() -> str:
    return resources.files(__package__).joinpath(_SOURCE).read_text(encoding="utf-8")
