"""Numbers from whatever people hand in: torch tensors, numpy arrays, lists."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonde.errors import OptionError


def as_array(values: Any, what: str = "values") -> NDArray[Any]:
    """Return an array of numbers of its own memory, in the type the values have. A tensor on a device is waited for.

    Raises:
        OptionError: There are no numbers in it.

    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return _from_torch(values, torch)
    try:
        array = np.array(values)
    except ValueError as error:
        raise OptionError(f"{what}: rows of different lengths are no tensor ({error}).") from error
    if array.dtype == object or array.dtype.kind in "USmMV":
        kind = type(values).__name__
        raise OptionError(f"{what} takes a tensor, an array or a list of numbers; got {kind} of {array.dtype}.")
    return array


def _from_torch(tensor: Any, torch: Any) -> NDArray[Any]:
    host = tensor.detach()
    host = host.to_dense() if host.layout != torch.strided else host
    host = host.cpu().contiguous()
    if host.dtype == torch.bfloat16:  # numpy has no such type; ml_dtypes lends it one
        bits: NDArray[Any] = host.view(torch.int16).numpy()
        borrowed: NDArray[Any] = bits.view(ml_dtypes.bfloat16).copy()
        return borrowed
    if host.dtype.is_floating_point and host.dtype.itemsize == 1:
        host = host.float()
    array: NDArray[Any] = host.resolve_conj().resolve_neg().numpy()
    owned: NDArray[Any] = array.copy()
    return owned


def as_floats(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values in one row, as float64; complex ones by magnitude."""
    flat = array.reshape(-1)
    return np.abs(flat).astype(np.float64) if np.iscomplexobj(flat) else flat.astype(np.float64)
