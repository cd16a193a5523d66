"""A datapoint: one batch on its way through a loop, as a dict.

- `inputs`: what the model is called with
- `labels`: the targets
- `meta_info`: `{"idx": [ids of the samples], ...}`
- `outputs`: what the model returned, after its forward
- `scores`: numbers for each sample, by name, in evaluation
- `debug`: what the debugger returned, in evaluation while it is enabled
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from sonde.capture import part_of
from sonde.capture.values import map_leaves
from sonde.errors import OptionError

# --------------------------------------------------------------------------------
# Apply an operation to every tensor of a nested value.


# Objects that are shared: copying them or writing into them would do harm.
_LEFT_ALONE: Final = (
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)


def apply_tensor_op(
    func: Callable[[Tensor], Any] | None = None,
    method: str | None = None,
    method_kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: Any,
) -> Any:
    """Return `inputs` with an operation applied to every tensor in it.

    Goes through tuples, lists, dicts and objects with attributes, and keeps their types: named tuples, subclasses of
    dict, dataclasses (also frozen ones and those with slots). Shared and self-referencing values stay shared.
    Modules, classes, functions and everything else that is not a tensor are left unchanged, and so is `inputs`.

    Args:
        func: Takes a tensor. Give this or `method`.
        method: The name of a method of tensors, such as `"cpu"`.
        method_kwargs: Arguments of that method.
        inputs: A tensor, or anything that contains tensors.

    Raises:
        OptionError: Neither or both of `func` and `method` were given.

    """
    if (func is None) == (method is None):
        raise OptionError("apply_tensor_op takes exactly one of func= and method=.")
    if func is None:
        arguments = dict(method_kwargs or {})

        def call_method(tensor: Tensor) -> Any:
            return getattr(tensor, str(method))(**arguments)

        func = call_method
    elif method_kwargs:
        raise OptionError("method_kwargs goes with method=, not with func=.")
    return _Walk(func).visit(inputs)


class _Walk:
    """A walk through a value. It remembers what it has visited, so that cycles end and shared parts stay shared."""

    def __init__(self, func: Callable[[Tensor], Any]) -> None:
        self._func = func
        # The originals are kept beside the results: while they live, no other object can have the same id.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def visit(self, value: Any) -> Any:
        known = self._seen.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, Tensor):
            return self._keep(value, self._func(value))
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, tuple):
            return self._keep(value, self._tuple(value))
        if isinstance(value, dict):
            return self._dict(value)
        return self._object(value)

    def _keep(self, value: Any, result: Any) -> Any:
        self._seen[id(value)] = (value, result)
        return result

    def _list(self, value: list[Any]) -> Any:
        result = self._keep(value, copy.copy(value))
        for index, item in enumerate(value):
            result[index] = self.visit(item)
        return result

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        items = [self.visit(item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if type(value) is tuple else type(value)(items)

    def _dict(self, value: dict[Any, Any]) -> Any:
        result = self._keep(value, copy.copy(value))
        for key, item in value.items():
            result[key] = self.visit(item)
        return result

    def _object(self, value: Any) -> Any:
        names = list(_attributes(value))
        if not names:
            return value
        result = self._keep(value, copy.copy(value))
        if result is value:
            return value  # it refuses to be copied: an enum member, a singleton
        for name in names:
            # Bypasses __setattr__, so that a frozen copy can be filled; nothing else refers to the copy yet.
            object.__setattr__(result, name, self.visit(getattr(value, name)))
        return result


def _attributes(value: Any) -> Iterator[str]:
    if isinstance(value, _LEFT_ALONE):
        return
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):
        names.update(dict.fromkeys(field.name for field in dataclasses.fields(value)))
    yield from (name for name in names if hasattr(value, name))


# --------------------------------------------------------------------------------


Datapoint = dict[str, Any]
SampleId = int | str


class NumberedBatch(NamedTuple):
    """A batch with the indices of its samples in the dataset."""

    indices: list[int]
    batch: Any


def as_datapoint(batch: Any, first_index: int = 0) -> Datapoint:
    """Return a loader's batch as a datapoint.

    A dict with `inputs` is one already; a pair is inputs and labels; a single tensor is inputs. Samples without
    `meta_info["idx"]` are numbered by their index in the dataset or, where that is unknown, in the loader.

    Raises:
        OptionError: It has another form.

    """
    indices = None
    if isinstance(batch, NumberedBatch):
        indices, batch = batch.indices, batch.batch
    datapoint = _as_dict(batch)
    meta = datapoint.get("meta_info") or {}
    if isinstance(meta, list | tuple):  # a collate function that returns a list of the samples' dicts
        meta = {key: [each[key] for each in meta] for key in meta[0]} if meta else {}
    if "idx" not in meta:
        meta = {**meta, "idx": indices or range(first_index, first_index + batch_size(datapoint))}
    datapoint["meta_info"] = {**meta, "idx": plain_ids(meta["idx"])}
    return datapoint


def _as_dict(batch: Any) -> Datapoint:
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise OptionError(
                f"A batch that is a dict needs the key 'inputs'; this one has {', '.join(map(str, batch))}. "
                "Let the dataset return {'inputs': ..., 'labels': ...}, or override _datapoint of the trainer."
            )
        return dict(batch)
    if isinstance(batch, Tensor):
        return {"inputs": batch, "labels": None}
    if isinstance(batch, Sequence) and not isinstance(batch, str) and 1 <= len(batch) <= 2:
        return {"inputs": batch[0], "labels": batch[1] if len(batch) == 2 else None}
    size = f" of {len(batch)}" if isinstance(batch, Sequence) else ""
    raise OptionError(
        f"A batch is a dict with 'inputs' and 'labels', or a pair of them; the loader gave a {type(batch).__name__}"
        f"{size}. Override _datapoint of the trainer to read it."
    )


def batch_size(datapoint: Datapoint) -> int:
    """Return the number of samples in a datapoint: the length of its ids, or of its first tensor."""
    meta = datapoint.get("meta_info")
    if isinstance(meta, Mapping) and "idx" in meta:
        return len(plain_ids(meta["idx"]))
    for tensor in tensors_in((datapoint.get("inputs"), datapoint.get("labels"))):
        if tensor.ndim:
            return int(tensor.shape[0])
    return 1


def plain_ids(ids: Any) -> list[SampleId]:
    """Return sample ids as a list of ints and strings, from any form that a collate function returns."""
    if isinstance(ids, Tensor) or hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, int | str):
        return [ids]
    flat: list[SampleId] = []
    for each in ids:
        flat += plain_ids(each)
    return flat


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def to_device(datapoint: Datapoint, device: torch.device) -> Datapoint:
    """Move inputs and labels to a device, and return the datapoint."""
    for key in ("inputs", "labels"):
        if any(tensor.device != device for tensor in tensors_in(datapoint.get(key))):
            datapoint[key] = apply_tensor_op(lambda tensor: tensor.to(device, non_blocking=True), inputs=datapoint[key])
    return datapoint


def sample_of(value: Any, at: int, samples: Sequence[SampleId]) -> Any:
    """Return a copy of one sample's part of a batch. What belongs to the whole batch is marked as `BatchValue`."""
    return map_leaves(part_of(value, at, tuple(samples), collated=True), _copied)


def _copied(leaf: Any) -> Any:
    # A copy, so that keeping it does not keep the batch.
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf.copy()


def grouped(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield batches in groups of `size`; the last group may be smaller."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
