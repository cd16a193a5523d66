"""Convert arrays back to torch tensors on request, so that reading needs no torch."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import MissingExtra, RunDamaged


def to_torch(array: NDArray[Any], dtype: str) -> Any:
    """Return the tensor that an array was made from, bit for bit.

    Args:
        array: Its elements.
        dtype: Its type, such as `torch.bfloat16`.

    """
    try:
        torch = import_module("torch")
    except ImportError:
        raise MissingExtra("torch", "torch", "Reading captures as torch tensors") from None
    wanted = getattr(torch, dtype.removeprefix(TORCH), None)
    if not isinstance(wanted, torch.dtype):
        raise RunDamaged(f"A tensor of type {dtype!r:.60}: this torch ({torch.__version__}) has no such type.")
    # A pair of halves represents a type that numpy lacks.
    shape = array.shape[:-1] if wanted.is_complex and array.dtype.kind != "c" else array.shape
    if not array.size:
        return torch.empty(shape, dtype=wanted)
    content = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return content.view(wanted).reshape(shape)


Dtype = np.dtype[Any]

TORCH: Final = "torch."
"""The origin of what was a tensor begins so; its type follows."""

# What every release of safetensors since 0.4.5 reads. Other types are stored as their bytes.
_KNOWN: Final = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_PAIRS: Final = {"complex64": "F32", "complex128": "F64"}  # as a last axis of two: real and imaginary
_PLAIN: Final = frozenset([*_KNOWN, *_PAIRS]) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
_SIMPLE: Final = re.compile(r"[<>|][biufcSUVMm]\d{1,9}(\[\d{0,9}[a-zA-Zμ]{1,3}\])?")
_MAX_ITEM_BYTES: Final = 1 << 30


@cache
def _extra() -> dict[str, Dtype]:
    """Return numpy's types for bfloat16 and its kin, by name."""
    # Imported late: watching a training needs no such type, and a training container may lack the package.
    import ml_dtypes

    names = [name for name in dir(ml_dtypes) if re.fullmatch(r"(bfloat|float|b?complex|u?int)\d+.*", name)]
    return {name: np.dtype(getattr(ml_dtypes, name)) for name in names}


def describe(dtype: Dtype) -> Any:
    """Return the stored form of a type: a name, or for records a list of fields as in a `.npy` file."""
    if dtype.isnative and dtype.name in _PLAIN:
        return dtype.name
    if dtype.fields is not None:
        return np.lib.format.dtype_to_descr(dtype)
    # Types that numpy did not bring along look like plain bytes ("<V2") by their code, so they go by name.
    return dtype.name if dtype.type.__module__ != "numpy" else dtype.str


def parse(described: Any) -> Dtype | None:
    """Undo `describe`; None for anything else, and for types that hold more than bytes."""
    try:
        if isinstance(described, list):
            dtype: Dtype = np.lib.format.descr_to_dtype(_with_tuples(described))
        elif not isinstance(described, str):
            return None
        elif described in _PLAIN or _SIMPLE.fullmatch(described):
            dtype = np.dtype(described)
        else:
            return _extra().get(described)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError):
        return None
    return None if dtype.hasobject or not 0 <= dtype.itemsize <= _MAX_ITEM_BYTES else dtype


def _with_tuples(fields: list[Any]) -> list[Any]:
    """Bring fields that JSON turned into lists back into the form numpy takes."""
    found = []
    for field in fields:
        name, kind, *shape = field
        name = tuple(name) if isinstance(name, list) else name
        kind = _with_tuples(kind) if isinstance(kind, list) else kind
        if isinstance(kind, str) and not _SIMPLE.fullmatch(kind):
            raise ValueError(kind)
        found.append((name, kind, *(tuple(each) if isinstance(each, list) else each for each in shape)))
    return found


def to_safetensors(dtype: Dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape under which safetensors shows elements of a type."""
    if dtype.name in _KNOWN:
        return _KNOWN[dtype.name], shape
    if dtype.name in _PAIRS:
        return _PAIRS[dtype.name], (*shape, 2)
    size = dtype.itemsize
    for length in shape:
        size *= length
    return "U8", (size,)


def item_bytes(dtype: Dtype) -> int:
    """Return the size to which elements of a type align."""
    return dtype.itemsize if dtype.name in _KNOWN else 8 if dtype.name in _PAIRS else 1


def is_numeric(dtype: Dtype) -> bool:
    """Return whether elements of a type can be added up."""
    return dtype.kind in "biufc" or dtype.name in _extra()


def to_little(array: NDArray[Any]) -> NDArray[Any]:
    """Return the elements in order, one after the other, as little-endian machines hold them."""
    dtype = array.dtype
    if dtype.fields is None and dtype.byteorder == ">":
        array = array.astype(dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(array.shape)
