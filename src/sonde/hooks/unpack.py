"""Find the tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor

# A module may return anything; these keep a strange structure from costing more than a usual one.
MAX_DEPTH: Final = 4
MAX_PARTS: Final = 32


def unpack(output: Any) -> list[tuple[str, Tensor]]:
    """Return (part, tensor) for every tensor in a nested output, in order; a plain tensor has the part "".

    Tuples, lists, mappings (Hugging Face's ModelOutput is one), named tuples and dataclasses are entered; anything
    else holds no tensors as far as Sonde is concerned.

    >>> import torch
    >>> [part for part, _ in unpack((torch.ones(1), {"aux": torch.ones(2)}))]
    ['[0]', "[1]['aux']"]
    """
    if isinstance(output, Tensor):
        return [("", output)]
    found: list[tuple[str, Tensor]] = []
    for item in _walk(output, "", MAX_DEPTH):
        found.append(item)
        if len(found) == MAX_PARTS:
            break
    return found


def plain_values(tensor: Tensor) -> Tensor:
    """Return a tensor, or all values of one that is nested (as of a transformer with padding, in evaluation) in one."""
    return tensor.detach().values() if tensor.is_nested else tensor


def _walk(value: Any, part: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield part, value
    elif depth:
        for suffix, item in _children(value):
            yield from _walk(item, part + suffix, depth - 1)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, tuple | list):
        fields = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield (f".{fields[index]}" if fields else f"[{index}]"), item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
