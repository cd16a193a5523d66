"""Nested arguments as JSON with references to tensors, and back: no pickle, so a bundle is safe to open.

What a call was given becomes plain lists and objects. Anything that is not plain is an object with one key that names
its type: `{"tensor": "input.0"}`, `{"tuple": [...]}`, `{"dtype": "float16"}`, `{"float": "nan"}`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sonde.errors import RunDamaged


class Packing:
    """Turns nested values into JSON, and gathers their tensors under names that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.opaque: list[str] = []
        """Classes of values that cannot be kept."""
        self._prefix = prefix

    def pack(self, value: Any) -> Any:
        """Return a value as JSON."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor | np.ndarray):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        return self._container(value)

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        if type(value) is tuple:
            return {"tuple": [self.pack(item) for item in value]}
        if isinstance(value, slice):
            return {"slice": [self.pack(part) for part in (value.start, value.stop, value.step)]}
        self.opaque.append(type(value).__qualname__)
        return {"opaque": type(value).__qualname__}

    def _tensor(self, value: Tensor | np.ndarray[Any, Any]) -> dict[str, Any]:
        name = f"{self._prefix}.{len(self.tensors)}"
        if isinstance(value, np.ndarray):
            self.tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
            return {"array": name}
        self.tensors[name] = value.detach()
        return {"tensor": name, "requires_grad": True} if value.requires_grad else {"tensor": name}


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that `Packing.pack` described.

    Raises:
        RunDamaged: The description makes no sense, or a value could not be kept.

    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    for kind, read in _READERS.items():
        if kind in value:
            try:
                return read(value, tensors)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RunDamaged(f"the bundle describes an argument in a way that cannot be read: {value!r:.80}") from (
                    error
                )
    raise RunDamaged(f"an argument of the model could not be kept in the bundle: {value.get('opaque', value)!r:.80}")


def _read_tensor(value: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    return tensors[value["tensor"]].requires_grad_(bool(value.get("requires_grad")))


def _read_dtype(value: dict[str, Any], tensors: dict[str, Tensor]) -> torch.dtype:
    dtype = getattr(torch, str(value["dtype"]))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(value)
    return dtype


_READERS: dict[str, Any] = {
    "tensor": _read_tensor,
    "array": lambda value, tensors: tensors[value["array"]].numpy(),
    "tuple": lambda value, tensors: tuple(unpack(item, tensors) for item in value["tuple"]),
    "dict": lambda value, tensors: {unpack(key, tensors): unpack(item, tensors) for key, item in value["dict"]},
    "float": lambda value, tensors: float(value["float"]),
    "dtype": _read_dtype,
    "device": lambda value, tensors: torch.device(str(value["device"])),
    "slice": lambda value, tensors: slice(*(unpack(part, tensors) for part in value["slice"])),
}
