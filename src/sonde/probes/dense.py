"""Tensors of unusual layouts as plain ones."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """Return a detached tensor whose elements can be read one after another: quantized and sparse ones are expanded."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
