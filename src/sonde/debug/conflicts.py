"""The gradients of several losses through one model, for comparing their directions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def loss_gradients(model: nn.Module, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of each loss over all trainable parameters, as one row; `.grad` is left alone.

    The graph is kept, so that `backward` can follow.

    Example:
        gradients = loss_gradients(model, {"class": class_loss, "box": box_loss})
        debugger.analyze_gradient_conflicts(gradients)

    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = {}
    for name, loss in losses.items():
        found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = [
            torch.zeros_like(parameter).flatten() if gradient is None else gradient.detach().flatten()
            for parameter, gradient in zip(parameters, found, strict=True)
        ]
        rows[name] = torch.cat(parts)
    return rows
