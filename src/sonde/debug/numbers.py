"""Convert what is passed in (torch tensors, numpy arrays, lists) to numpy arrays."""

from __future__ import annotations

import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonde.errors import OptionError

_MAX_DENSE_BYTES: Final = 1 << 30
"""The largest sparse tensor that is made dense."""


def as_array(values: Any, what: str = "values") -> NDArray[Any]:
    """Return a copy of the values as an array of their own type. For a tensor on a device this waits.

    Raises:
        OptionError: It holds no numbers.

    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return _from_torch(values, torch, what)
    if torch is not None and _holds_tensors(values, torch):
        values = [as_array(each, what) for each in values]
    try:
        array = np.array(values)
    except ValueError as error:
        cure = "Pass its tensors one by one." if isinstance(values, list | tuple) else "Give rows of one length."
        raise OptionError(f"{what} got parts of different shapes, which make no tensor. {cure}") from error
    if not has_numbers(array.dtype):
        kind = type(values).__name__
        raise OptionError(f"{what} takes a tensor, an array or a list of numbers; got {kind} of {array.dtype}.")
    return array


def has_numbers(dtype: np.dtype[Any]) -> bool:
    """Return whether a type holds numbers: one of numpy's own, or of ml_dtypes."""
    return dtype.kind in "biufc" or is_extended(dtype)


def is_extended(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is one of ml_dtypes, such as bfloat16."""
    return dtype.type.__module__.startswith("ml_dtypes")


def _holds_tensors(values: Any, torch: Any) -> bool:
    return isinstance(values, list | tuple) and any(isinstance(each, torch.Tensor) for each in values)


def _from_torch(tensor: Any, torch: Any, what: str) -> NDArray[Any]:
    host = _plain(tensor.detach(), torch, what).cpu().contiguous()
    extended = getattr(ml_dtypes, str(host.dtype).removeprefix("torch."), None)
    if host.dtype.is_floating_point and extended is not None:  # a type that numpy lacks and ml_dtypes adds
        bits: NDArray[Any] = host.view(torch.int16 if host.dtype.itemsize == 2 else torch.uint8).numpy()
        copied: NDArray[Any] = bits.view(extended).copy()
        return copied
    host = host.to(torch.complex64) if host.dtype == torch.complex32 else host
    array: NDArray[Any] = host.resolve_conj().resolve_neg().numpy()
    owned: NDArray[Any] = array.copy()
    return owned


def _plain(tensor: Any, torch: Any, what: str) -> Any:
    """Return a dense tensor that numpy can read."""
    if tensor.is_meta:
        shape = tuple(tensor.shape)
        raise OptionError(
            f"{what} got a tensor {shape} on the meta device, which has no values. Move it to a real one."
        )
    if tensor.is_nested:
        raise OptionError(f"{what} got a nested tensor, whose parts differ in shape. Pass its parts: .unbind().")
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout == torch.strided:
        return tensor
    size = tensor.numel() * tensor.element_size()
    if size > _MAX_DENSE_BYTES:
        raise OptionError(
            f"{what} got a sparse tensor {tuple(tensor.shape)} that takes {size / 2**30:.1f} GiB when written out. "
            "Pass its values: .coalesce().values()."
        )
    return tensor.to_dense()


def as_floats(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values in one row, as float64; complex ones by magnitude."""
    flat = array.reshape(-1)
    return np.abs(flat).astype(np.float64) if np.iscomplexobj(flat) else flat.astype(np.float64)


def as_number(value: Any, what: str) -> float:
    """Return a single number, from a tensor of one element as well. For a tensor on a device this waits.

    Raises:
        OptionError: It is not a single number.

    """
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"{what} takes a number; got {value!r:.80}.") from None
