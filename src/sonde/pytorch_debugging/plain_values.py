"""Turn whatever an event carries into what strict JSON holds, small and without tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from torch import Tensor

from sonde.probes.readings import readings_of
from sonde.records import Reading

MAX_TEXT: Final = 8000
MAX_ITEMS: Final = 1000
MAX_DEPTH: Final = 8
_STATISTICS: Final = ("mean", "std", "min", "max", "norm")


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return `value` as JSON-ready data; a tensor becomes its shape, type and statistics.

    Numbers that are not finite become "nan", "inf" or "-inf".

    >>> plain({"loss": float("nan"), "shape": (2, 3)})
    {'loss': 'nan', 'shape': [2, 3]}
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT // 2]} ... {value[-MAX_TEXT // 2 :]}"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return _array(np.asarray(value))
    return _nested(value, depth)


def statistics(reading: Reading | None) -> dict[str, Any]:
    """Return the usual numbers of a reading; what is not known is None.

    Counts of elements that are not finite come along only where there are some.
    """
    if reading is None:
        return {}
    found: dict[str, Any] = {name: reading.get(name) for name in _STATISTICS}
    if reading.nonfinite:
        found |= {"nan": int(reading.get("nan") or 0), "inf": int(reading.get("inf") or 0)}
    return found


def _nested(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        if not depth:
            return f"<{type(value).__name__} of {len(value)}>"
        items = list(value.items())[:MAX_ITEMS]
        return {str(key): plain(item, depth - 1) for key, item in items} | _rest(len(value))
    if isinstance(value, list | tuple | set | frozenset):
        if not depth:
            return f"<{type(value).__name__} of {len(value)}>"
        kept = [plain(item, depth - 1) for item in list(value)[:MAX_ITEMS]]
        return kept + [f"... and {len(value) - MAX_ITEMS} more"] * (len(value) > MAX_ITEMS)
    if isinstance(value, BaseException):
        return plain(f"{type(value).__name__}: {value}")
    return plain(str(value))


def _rest(size: int) -> dict[str, Any]:
    return {"...": f"and {size - MAX_ITEMS} more"} if size > MAX_ITEMS else {}


def _tensor(tensor: Tensor) -> Any:
    if tensor.numel() == 1 and not tensor.is_complex() and tensor.device.type != "meta":
        return plain(tensor.detach().item())
    reading = readings_of({"": tensor.detach()}, histogram=False).get("")
    about = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    return about | plain(statistics(reading))


def _array(array: np.ndarray[Any, Any]) -> Any:
    if array.size <= 64 and array.dtype.kind in "biufU":
        return plain(array.tolist())
    about: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
    if array.dtype.kind in "biuf":
        about |= plain(statistics(Reading.of(array)))
    return about
