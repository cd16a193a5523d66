"""Numbers from whatever people hand in: torch tensors, numpy arrays, lists."""

from __future__ import annotations

import sys
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sonde.errors import OptionError

_MAX_DENSE_BYTES: Final = 1 << 30
"""A sparse tensor is written out in full to be looked at; beyond this its memory would be a surprise."""


def as_array(values: Any, what: str = "values") -> NDArray[Any]:
    """Return an array of numbers of its own memory, in the type the values have. A tensor on a device is waited for.

    Raises:
        OptionError: There are no numbers in it.

    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return _from_torch(values, torch, what)
    if torch is not None and _holds_tensors(values, torch):
        values = [as_array(each, what) for each in values]
    try:
        array = np.array(values)
    except ValueError as error:
        cure = "Hand its tensors in one by one." if isinstance(values, list | tuple) else "Give rows of one length."
        raise OptionError(f"{what} got parts of different shapes, which make no tensor. {cure}") from error
    if not has_numbers(array.dtype):
        kind = type(values).__name__
        raise OptionError(f"{what} takes a tensor, an array or a list of numbers; got {kind} of {array.dtype}.")
    return array


def has_numbers(dtype: np.dtype[Any]) -> bool:
    """Say whether arrays of a type hold numbers: numpy's own, or those that ml_dtypes lends it."""
    return dtype.kind in "biufc" or is_lent(dtype)


def is_lent(dtype: np.dtype[Any]) -> bool:
    """Say whether a type is one of ml_dtypes, such as bfloat16."""
    return dtype.type.__module__.startswith("ml_dtypes")


def _holds_tensors(values: Any, torch: Any) -> bool:
    return isinstance(values, list | tuple) and any(isinstance(each, torch.Tensor) for each in values)


def _from_torch(tensor: Any, torch: Any, what: str) -> NDArray[Any]:
    host = _plain(tensor.detach(), torch, what).cpu().contiguous()
    borrowed = getattr(ml_dtypes, str(host.dtype).removeprefix("torch."), None)
    if host.dtype.is_floating_point and borrowed is not None:  # numpy has no such type; ml_dtypes lends it one
        bits: NDArray[Any] = host.view(torch.int16 if host.dtype.itemsize == 2 else torch.uint8).numpy()
        lent: NDArray[Any] = bits.view(borrowed).copy()
        return lent
    host = host.to(torch.complex64) if host.dtype == torch.complex32 else host
    array: NDArray[Any] = host.resolve_conj().resolve_neg().numpy()
    owned: NDArray[Any] = array.copy()
    return owned


def _plain(tensor: Any, torch: Any, what: str) -> Any:
    """Return a tensor that has its numbers one after the other, as numpy has; say so if there are none."""
    if tensor.is_meta:
        shape = tuple(tensor.shape)
        raise OptionError(
            f"{what} got a tensor {shape} on the meta device, which has no values. Move it to a real one."
        )
    if tensor.is_nested:
        raise OptionError(f"{what} got a nested tensor, whose parts differ in shape. Hand in its parts: .unbind().")
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout == torch.strided:
        return tensor
    size = tensor.numel() * tensor.element_size()
    if size > _MAX_DENSE_BYTES:
        raise OptionError(
            f"{what} got a sparse tensor {tuple(tensor.shape)} that takes {size / 2**30:.1f} GiB when written out. "
            "Hand in its values: .coalesce().values()."
        )
    return tensor.to_dense()


def as_floats(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values in one row, as float64; complex ones by magnitude."""
    flat = array.reshape(-1)
    return np.abs(flat).astype(np.float64) if np.iscomplexobj(flat) else flat.astype(np.float64)


def as_number(value: Any, what: str) -> float:
    """Return a single number from whatever stands for one. A tensor on a device is waited for.

    Raises:
        OptionError: It stands for none, or for several.

    """
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"{what} takes a number; got {value!r:.80}.") from None
