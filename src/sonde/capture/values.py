"""Copy what debuggers return, of any kind, split it by sample, and prepare it for the store."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.store.pages import BatchValue, Datapoint, FromTorch, Unsupported
from sonde.store.pages import dtypes as numpy_types
from sonde.store.pages.dtypes import TORCH
from sonde.store.pages.nodes import MAX_DEPTH

# --------------------------------------------------------------------------------
# Values of any kind that debuggers return: copied, split by sample, and converted for the store.


_MAX_DENSE_BYTES: Final = 1 << 30


def copy_outputs(outputs: Any) -> Any:
    """Return a copy of nested outputs that nothing done to the original can change.

    Tensors are detached and cloned, arrays copied, containers (also named tuples, dataclasses and mappings of any kind)
    rebuilt. Other objects are passed on as they are.
    """
    return map_leaves(outputs, _copy)


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy()


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps only its own memory alive; a slice of a batch would keep the batch."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > 2 * tensor.nbytes + 4096 else tensor


def map_leaves(value: Any, leaf: Callable[[Any], Any], depth: int = MAX_DEPTH) -> Any:
    """Return a rebuilt nested value, with `leaf` applied to its tensors and arrays."""
    if isinstance(value, Tensor | np.ndarray):
        return leaf(value)
    if not depth or isinstance(value, str | bytes | int | float | type | None):
        return value
    if isinstance(value, tuple):
        items = [map_leaves(item, leaf, depth - 1) for item in value]
        make = getattr(type(value), "_make", tuple)  # named tuples stay what they are
        return make(items)
    if isinstance(value, list):
        return [map_leaves(item, leaf, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return _map_mapping(value, leaf, depth - 1)
    if isinstance(value, BatchValue):
        return BatchValue(map_leaves(value.value, leaf, depth - 1), value.samples)
    if dataclasses.is_dataclass(value):
        return _map_fields(value, leaf, depth - 1)
    return value


def _map_mapping(value: Mapping[Any, Any], leaf: Callable[[Any], Any], depth: int) -> Any:
    mapped = {key: map_leaves(item, leaf, depth) for key, item in value.items()}
    if type(value) is dict or not isinstance(value, dict):
        return mapped
    # Subclasses of dict keep their kind, and with it their behaviour (defaults, attributes), if they can be copied.
    try:
        other = copy.copy(value)
        for key, item in mapped.items():
            other[key] = item
    except (TypeError, ValueError, AttributeError, KeyError, NotImplementedError):
        return mapped
    return other


def _map_fields(value: Any, leaf: Callable[[Any], Any], depth: int) -> Any:
    other = copy.copy(value)
    for each in dataclasses.fields(value):
        if hasattr(value, each.name):
            # Frozen dataclasses refuse plain assignment; nothing else refers to this copy yet.
            object.__setattr__(other, each.name, map_leaves(getattr(value, each.name), leaf, depth))
    return other


def num_bytes(value: Any, depth: int = MAX_DEPTH) -> int:
    """Return how much memory a nested value takes, tensors and arrays exactly and the rest roughly."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return 64 + len(value)
    if not depth:
        return 64
    if isinstance(value, Mapping):
        return sum(64 + num_bytes(item, depth - 1) for item in value.values())
    if isinstance(value, BatchValue):
        return num_bytes(value.value, depth - 1)  # its samples are shared by the whole batch
    if isinstance(value, list | tuple | set | frozenset):
        return sum(num_bytes(item, depth - 1) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(num_bytes(getattr(value, each.name, None), depth - 1) for each in dataclasses.fields(value))
    return 32


@dataclasses.dataclass(frozen=True, slots=True)
class PerSample:
    """One entry for each sample of a batch, for debuggers that know what belongs to which sample."""

    entries: list[Any]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, sample: int) -> Any:
        return self.entries[sample]


def part_of(value: Any, at: int, samples: tuple[Datapoint, ...], *, collated: bool = False) -> Any:
    """Return what of a batch's value belongs to the sample at one place; the rest as `BatchValue`.

    Tensors and arrays whose first axis is the batch are cut and keep that axis, with length 1; entries of `PerSample`
    are distributed; texts belong to every sample. Other numbers were computed over the whole batch, or cannot be
    distinguished from those that were, so they are marked. A list of numbers is not cut, since it may be a shape.

    Args:
        value: Nested in any way.
        at: The place of the sample in the batch.
        samples: The samples of the batch; a sample that came alone owns everything.
        collated: Whether a collate function made it: then the batch axis is dropped, and a list as long as the batch
            holds one entry for each sample.

    """
    if isinstance(value, PerSample) and len(value) == len(samples):
        return value[at]
    if isinstance(value, Tensor | np.ndarray):
        return _cut(value, at, samples, collated)
    if collated and isinstance(value, list) and len(value) == len(samples) and not _holds_tensors(value):
        return value[at]
    if _is_number(value) or (isinstance(value, list | tuple) and value and all(map(_is_number, value))):
        return _of_batch(value, samples)
    return _rebuilt(value, at, samples, collated)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | np.generic)


def _holds_tensors(value: list[Any]) -> bool:
    return any(isinstance(each, Tensor | np.ndarray) for each in value)


def _of_batch(value: Any, samples: tuple[Datapoint, ...]) -> Any:
    return value if len(samples) == 1 else BatchValue(value, samples)


def _cut(value: Any, at: int, samples: tuple[Datapoint, ...], collated: bool) -> Any:
    if len(samples) == 1 and not collated:
        return value
    if isinstance(value, Tensor):
        if value.is_nested:
            return part_of(list(value.unbind()), at, samples) if value.size(0) != len(samples) else value.unbind()[at]
        value = value.dequantize() if value.is_quantized else value.to_dense()
    if value.ndim == 0 or value.shape[0] != len(samples):
        return _of_batch(value, samples)
    return value[at] if collated else value[at : at + 1]


def _rebuilt(value: Any, at: int, samples: tuple[Datapoint, ...], collated: bool) -> Any:
    def part(item: Any) -> Any:
        return part_of(item, at, samples, collated=collated)

    if isinstance(value, PerSample):
        value = value.entries
    if isinstance(value, Mapping):
        return {key: part(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(part, value))
    if isinstance(value, list | tuple):
        return type(value)(map(part, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | BatchValue):
        return {field.name: part(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    return value


def to_plain_outputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested outputs as the store takes them: without torch."""
    return {name: map_leaves(value, to_plain) for name, value in outputs.items()}


def to_plain(leaf: Any) -> Any:
    """Return a tensor as numpy holds it, tagged so that it can become the same tensor again.

    Sparse and quantized tensors are stored dense; of a sharded tensor the local part; a nested tensor as a list. A
    tensor without elements to read (on the meta device) becomes a placeholder.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = leaf.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.is_nested:
        return [to_plain(part) for part in tensor.unbind()]
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.device.type == "meta":
        return Unsupported.of(leaf, f"a tensor of shape {tuple(tensor.shape)} on the meta device")
    if tensor.layout != torch.strided:
        if tensor.numel() * tensor.element_size() > _MAX_DENSE_BYTES:
            return Unsupported.of(leaf, f"a sparse tensor of shape {tuple(tensor.shape)}, too large when dense")
        tensor = tensor.to_dense()
    return _to_array(tensor.resolve_conj().resolve_neg().cpu().contiguous())


def _to_array(tensor: Tensor) -> FromTorch | Unsupported:
    dtype = str(tensor.dtype)
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.complex32:  # numpy has no such type: it is stored as two halves
        tensor, shape = torch.view_as_real(tensor), (*shape, 2)
    name = str(tensor.dtype).removeprefix(TORCH)
    numpy_type = np.dtype(np.uint8) if name == "float4_e2m1fn_x2" else numpy_types.parse(name)
    if numpy_type is None or numpy_type.itemsize != tensor.element_size():
        return Unsupported.of(tensor, f"a tensor of shape {shape} and type {dtype}")
    if not tensor.numel():
        return FromTorch(np.empty(shape, numpy_type), dtype)
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # a single element may have any stride, and still count as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    content = flat.view(torch.uint8).numpy()
    return FromTorch(content.view(numpy_type).reshape(shape), dtype)


# --------------------------------------------------------------------------------


# What an item takes in addition to its elements and texts: measured for one small tensor in two dicts.
_ITEM_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What was captured of one datapoint, and the events after which its tensors can be read."""

    datapoint: Datapoint
    outputs: dict[str, Any]
    info: dict[str, Any]
    nbytes: int
    ready: list[torch.cuda.Event] = field(default_factory=list)


def take(
    datapoint: Datapoint, outputs: Mapping[str, Any], info: Mapping[str, Any], save_dtype: torch.dtype | None
) -> Item:
    """Return a capture as an item: detached, without the rest of its batch, as `save_dtype`."""
    devices: set[torch.device] = set()

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = compact(leaf.detach())
        if save_dtype is not None and leaf.is_floating_point():
            leaf = leaf.to(save_dtype)
        if leaf.is_cuda:
            devices.add(leaf.device)
        return leaf

    taken = {str(name): map_leaves(value, detach) for name, value in outputs.items()}
    noted = {str(name): map_leaves(value, detach) for name, value in info.items()}
    # The worker copies from the device on a stream of its own, after the pending work of this one.
    ready = [torch.cuda.current_stream(device).record_event() for device in devices]
    return Item(datapoint, taken, noted, num_bytes(taken) + num_bytes(noted) + _ITEM_BYTES, ready)
