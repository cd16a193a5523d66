"""Arrays back to torch tensors: only when asked for, so that reading needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.errors import MissingExtra, RunDamaged
from sonde.store.pages.nodes import TORCH


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
    # A pair of halves stands for a type that numpy lacks.
    shape = array.shape[:-1] if wanted.is_complex and array.dtype.kind != "c" else array.shape
    if not array.size:
        return torch.empty(shape, dtype=wanted)
    content = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return content.view(wanted).reshape(shape)
