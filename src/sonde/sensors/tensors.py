"""Decide which tensors can be measured with torch operations, and sample large ones."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

MAX_ROWS: Final = 256
MAX_ELEMENTS: Final = 1 << 20
# Enough for the statistics of what is read elsewhere too: logits are an output of the model.
ENOUGH_ELEMENTS: Final = 1 << 18


def is_plain(tensor: object) -> bool:
    """Return whether a value is an ordinary tensor with memory: not sparse, fake, sharded or inside a transform."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized or tensor.is_nested:
        return False
    try:
        return bool(tensor.data_ptr()) or not tensor.numel()
    except RuntimeError:  # inside a functorch transform: there is no memory
        return False


def is_real(tensor: object) -> bool:
    """Return whether a value is a plain tensor of floating-point numbers."""
    return isinstance(tensor, Tensor) and is_plain(tensor) and tensor.is_floating_point()


def is_whole(tensor: object) -> bool:
    """Return whether a value is a plain tensor of whole numbers, such as class labels or token ids."""
    if not isinstance(tensor, Tensor) or not is_plain(tensor):
        return False
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def spread_rows(values: Tensor, dim: int) -> Tensor:
    """Return rows along `dim`, at most MAX_ROWS and MAX_ELEMENTS, evenly chosen over the other dimensions.

    >>> spread_rows(torch.zeros(1000, 10), 1).shape
    torch.Size([250, 10])
    """
    values = values.detach().movedim(dim, -1)
    others = values.dim() - 1
    share = max(1, round(MAX_ROWS ** (1 / max(1, others))))
    # A step per dimension keeps this a view: flattening a whole image batch would copy it.
    steps = tuple(slice(None, None, max(1, -(-size // share))) for size in values.shape[:-1])
    rows = values[steps].reshape(-1, values.shape[-1])
    most = max(1, min(MAX_ROWS, MAX_ELEMENTS // max(1, rows.shape[-1])))
    return rows[:: -(-len(rows) // most)] if len(rows) > most else rows


def some_elements(values: Tensor) -> Tensor:
    """Return a tensor itself, or of a large one evenly chosen rows."""
    values = values.detach()
    if values.numel() <= ENOUGH_ELEMENTS:
        return values
    if values.dim() == 1:
        return values[:: -(-len(values) // ENOUGH_ELEMENTS)]
    rows = spread_rows(values, -1)
    return rows[:: max(1, -(-rows.numel() // ENOUGH_ELEMENTS))]


def sample_columns(values: Tensor) -> Tensor:
    """Return at most MAX_ROWS samples as rows, with as many of their elements as MAX_ELEMENTS allows, in float32."""
    rows = values.detach()[:MAX_ROWS].flatten(1) if values.dim() > 1 else values.detach()[:MAX_ROWS, None]
    columns = max(1, MAX_ELEMENTS // max(1, len(rows)))
    return rows[:, :: max(1, -(-rows.shape[1] // columns))].float()
