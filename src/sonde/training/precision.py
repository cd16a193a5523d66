"""Mixed precision: autocast around the forward, and a gradient scaler where the format needs one."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch
from torch import Tensor

from sonde.errors import OptionError

_FORMATS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of the forward and backward pass.

    Args:
        amp: None for full precision, `"bf16"` or `"fp16"`. Only fp16 needs a scaler: its range is small.
        device: Where the model is.

    Raises:
        OptionError: There is no such format.

    """

    def __init__(self, amp: str | None, device: torch.device) -> None:
        if amp is not None and amp not in _FORMATS:
            raise OptionError(f"amp={amp!r}: choose 'bf16', 'fp16' or None.")
        self.dtype = None if amp is None else _FORMATS[amp]
        self._device = device
        self.scaler: torch.amp.GradScaler | None = torch.amp.GradScaler(device.type) if amp == "fp16" else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for the model and the criterion, for one thread."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call] # torch

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients, so that they can be clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless the scaler found an infinity."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
