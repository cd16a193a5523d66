"""Describe the values of one tensor: whether it is finite, where it is not, and how large it is.

For use while a step is repeated, when waiting for a device no longer matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

NAN: Final = 1
INF: Final = 2
MAX_SHOWN: Final = 8


def badness(value: Any) -> int:
    """Return 0 for what is finite, else which of `NAN` and `INF` it holds.

    Of a tensor that is spread over processes this looks at the part that lies here, and asks nobody.
    """
    if not _has_values(value):
        return 0
    value = local_part(value)
    if value.numel() == 1 and not value.is_complex():
        number = float(value.detach())
        return NAN if math.isnan(number) else INF if math.isinf(number) else 0
    with torch.no_grad():
        plain = value.detach()
        if bool(torch.isfinite(plain).all()):
            return 0
        return (NAN if bool(torch.isnan(plain).any()) else 0) | (INF if bool(torch.isinf(plain).any()) else 0)


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return what tells the storage of a tensor from others, and its bytes: what holding the tensor keeps alive.

    A tensor may be a small view of it. One without a plain storage (sparse, a subclass) is taken for its elements.
    """
    try:
        storage = tensor.untyped_storage()
        return int(storage._cdata), storage.nbytes()
    except RuntimeError:  # NotImplementedError is one
        return id(tensor), tensor.numel() * tensor.element_size()


def any_nonfinite(tensors: Iterable[Tensor]) -> Tensor:
    """Return 1 if any element is not finite, else 0, as a number on the first tensor's device. Nothing waits for it.

    Of a tensor that is spread over processes this looks at the part that lies here, and asks nobody.
    """
    with torch.no_grad():
        plain = [_elements(each) for each in tensors if each.is_floating_point() or each.is_complex()]
        full = [each for each in plain if each.numel() and each.device.type != "meta"]
        if not full:
            return torch.zeros(())
        # The largest magnitude of each, all in few launches; unlike a sum it cannot overflow.
        largest = torch._foreach_norm(full, math.inf)
        together = torch.stack([each.to(full[0].device, torch.float32) for each in largest])
        return (~torch.isfinite(together).all()).to(torch.float32)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that is spread over several. All else about it may wait for the others."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_masking(value: Tensor) -> bool:
    """Return whether the only values that are not finite are minus infinity, as in an additive mask."""
    bad = value.detach()[~torch.isfinite(value.detach())]
    return bool((bad == -math.inf).all())


def offending(value: Tensor, kind: int) -> Tensor:
    """Return which elements are NaN, or infinite."""
    plain = value.detach()
    return torch.isnan(plain) if kind == NAN else torch.isinf(plain)


def first_indices(mask: Tensor) -> list[list[int]]:
    """Return the positions of the first true elements."""
    found: list[list[int]] = torch.nonzero(mask)[:MAX_SHOWN].tolist()
    return found


def samples(mask: Tensor, batch_size: int | None) -> list[int]:
    """Return which samples of the batch the true elements belong to, or nothing if that is unknown.

    A first dimension that is a multiple of the batch size is taken for samples times heads or positions.
    """
    if not batch_size or mask.dim() == 0:
        return []
    if mask.shape[0] % batch_size == 0 and mask.shape[0]:
        per_sample = mask.reshape(batch_size, -1).any(1)
    elif mask.dim() > 1 and mask.shape[1] == batch_size:
        per_sample = mask.transpose(0, 1).reshape(batch_size, -1).any(1)
    else:
        return []
    found: list[int] = torch.nonzero(per_sample).flatten().tolist()
    return found


def describe(name: str, value: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """Return the shape, type and range of a tensor, and its values where `mask` is true if the shapes allow that."""
    plain = value.detach()
    about: dict[str, Any] = {"name": name, "shape": list(plain.shape), "dtype": _name(plain.dtype)}
    if _has_values(plain):
        finite = plain[torch.isfinite(plain)]
        about["nonfinite"] = plain.numel() - finite.numel()
        if finite.numel() and not plain.is_complex():
            wide = finite.double()
            about |= {"min": wide.min().item(), "max": wide.max().item(), "zeros": int((finite == 0).sum())}
            about["abs_min"] = wide.abs().min().item()
    at = values_at(plain, mask)
    if at is not None:
        about["at"] = at
    return about


def values_at(value: Tensor, mask: Tensor | None) -> list[float] | None:
    """Return the first values where `mask` is true, or None if the tensor cannot be laid over it."""
    if mask is None or value.is_complex() or value.layout != torch.strided:
        return None
    try:
        over = value.detach().expand(mask.shape)
    except RuntimeError:
        return None
    found: list[float] = over[mask][:MAX_SHOWN].double().tolist()
    return found


def _has_values(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and type(value).__name__ != "FakeTensor"
        and value.layout == torch.strided
        and value.device.type != "meta"
        and (value.is_floating_point() or value.is_complex())
        and value.numel() > 0
    )


def _elements(tensor: Tensor) -> Tensor:
    local = local_part(tensor.detach())
    return local._values() if local.is_sparse else local


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
