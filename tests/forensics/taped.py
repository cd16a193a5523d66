"""Record the tape of a small training loop, and read it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import sonde
from sonde.core import tape as tapes
from sonde.core.tape import Tape

STEPS = 3
"""As many steps as the early tapes need; the last one is taped."""


def taped(
    folder: Path,
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor | tuple[Tensor, ...],
    y: Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> Tape:
    """Train for a few steps on one batch and return the tape of the last one."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = x if isinstance(x, tuple) else (x,)
    with sonde.watch(model, optimizer, run=folder, diagnose=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_fn(model(*inputs), y).backward()
            before_step()
            optimizer.step()
    return tapes.read(tapes.find(folder))
