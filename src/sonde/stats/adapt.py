"""Turn any tensor into memory that a kernel can read: real, floating point, dense, in a dtype the kernels know.

Statistics do not depend on the order of elements, so a tensor whose elements fill their storage without gaps or overlap
(contiguous, transposed, channels_last) is read as it lies. Everything else is converted, always on a detached tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

READABLE: Final = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
PLAIN_TYPES: Final = frozenset((Tensor, Parameter))

_SMALL_INTEGERS: Final = frozenset((torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16))


class Readable(NamedTuple):
    """A tensor's stored elements, and how many more zeros it has (those a sparse layout does not store)."""

    values: Tensor
    implicit_zeros: int = 0


def to_readable(tensor: Tensor) -> Readable | None:
    """Return the elements of `tensor` in a form that kernels can read, or None for a tensor without readable memory.

    None is the answer for meta and fake tensors, tensors inside a functorch transform, parameters that are not
    initialised yet and dtypes that torch itself cannot convert (float4).
    """
    if is_plain(tensor):
        return Readable(tensor.detach())
    if is_lazy(tensor):
        return None
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return _convert(tensor)
    except (RuntimeError, TypeError, AttributeError):
        return None  # torch refuses to read or convert it; so do we, rather than stop the training


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be read as it is; quick, for the usual case."""
    if type(tensor) not in PLAIN_TYPES or tensor.dtype not in READABLE:
        return False
    try:
        return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_nested) and tensor.data_ptr() != 0
    except RuntimeError:  # sparse, or inside a functorch transform: there is no pointer
        return False


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their stretch of memory exactly once, in any order."""
    return tensor.is_contiguous() or _fills_memory(tuple(tensor.shape), tensor.stride())


def widened(values: Tensor) -> Tensor:
    """Return the values in a dtype that is safe to subtract and sum in: float64 stays, all else becomes float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def difference(tensor: Tensor, shadow: Tensor) -> Tensor | None:
    """Return tensor minus shadow in a wide dtype, or None where that cannot be read off their stored elements."""
    now, before = to_readable(tensor), to_readable(shadow)
    if now is None or before is None or now.implicit_zeros or before.implicit_zeros:
        return None
    if now.values.shape != before.values.shape or now.values.device != before.values.device:
        return None
    return widened(now.values) - widened(before.values)


def _convert(tensor: Tensor) -> Readable | None:
    values = _local_shard(tensor).detach()
    if values.is_nested:
        values = values.values()
    if type(values).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # a fake tensor or a wrapper: the memory, if any, is that of other tensors
    elements = values.numel()
    values = _stored(values)
    stored = values.numel()
    values = _real_floating(values)
    if not is_dense(values):
        values = values.contiguous()
    # A C kernel would crash on the null pointer that meta tensors hand out without complaint.
    if values.numel() and values.data_ptr() == 0:
        return None
    return Readable(values, (elements - stored) * (values.numel() // stored if stored else 1))


def _local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor: anything else about it would run a collective."""
    while type(tensor) not in PLAIN_TYPES and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor


def _stored(values: Tensor) -> Tensor:
    if values.layout == torch.strided:
        return values.dequantize() if values.is_quantized else values
    if values.layout == torch.sparse_coo:
        return values.coalesce().values()  # uncoalesced values are summands, not elements
    if values.layout == torch._mkldnn:  # type: ignore[attr-defined]  # private, but the only name of this layout
        return values.to_dense()
    return values.values()


def _real_floating(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.resolve_neg()  # until then the memory holds the opposite sign
    if values.dtype in READABLE:
        return values
    exact_in_float32 = values.dtype in _SMALL_INTEGERS or values.dtype.is_floating_point
    return values.to(torch.float32 if exact_in_float32 else torch.float64)


@lru_cache(maxsize=4096)
def _fills_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
