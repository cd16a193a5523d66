"""Compute the loss of each sample with criteria that return one number for a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sonde.training.datapoints import tensors_in
from sonde.training.tensor_ops import apply_tensor_op


def per_sample_loss(criterion: Callable[[Any, Any], Tensor], outputs: Any, labels: Any) -> Tensor:
    """Return the loss of every sample of a batch.

    A criterion with a `reduction`, as torch's losses have, is asked not to reduce. Any other is called for one sample
    after the other, which is slow but right for whatever treats samples apart.
    """
    if getattr(criterion, "reduction", None) in ("mean", "sum", "none"):
        apart = copy.copy(criterion)
        apart.reduction = "none"  # type: ignore[attr-defined] # checked above
        losses = apart(outputs, labels)
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
    size = next(tensors_in(outputs)).shape[0]
    return torch.stack([criterion(_one(outputs, i), _one(labels, i)).reshape(()) for i in range(size)])


def _one(value: Any, index: int) -> Any:
    return apply_tensor_op(lambda tensor: tensor[index : index + 1], inputs=value)
