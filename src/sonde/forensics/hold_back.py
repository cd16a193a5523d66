"""Hold an optimizer back from writing an update made of gradients that are not finite."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from sonde.forensics.values import any_nonfinite
from sonde.record.kinds import gradients_of, skip_flag, skips_on_device


class HoldBack:
    """Makes one `optimizer.step` do nothing, and restores everything afterwards.

    Without gradients every torch optimizer leaves a parameter and its state alone, so they are taken away for the step.
    A fused optimizer on a GPU can decide by itself: it gets a flag that is computed on the device, as a gradient
    scaler does, and nothing waits.
    """

    def __init__(self) -> None:
        self.is_holding = False
        self.flag: Tensor | None = None
        """The number on the device by which a fused optimizer decides."""
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._flagged: Optimizer | None = None

    def begin(self, optimizer: Optimizer, bad: bool | Tensor | None) -> bool:
        """Hold this step back if a gradient is not finite; return whether it was held back, as far as that is known.

        `bad` is whether a gradient is not finite, as a bool or as a number on the device; None if not known yet.
        """
        self.release()
        found = [] if bad is False else list(gradients_of(optimizer))
        if not found or skip_flag(optimizer) is not None:
            return False  # a gradient scaler does this already
        flag = any_nonfinite(gradient for _, gradient in found) if bad is None else bad
        if isinstance(flag, Tensor) and flag.device.type == "cuda" and skips_on_device(optimizer):
            optimizer.found_inf = flag  # type: ignore[attr-defined] # torch's own protocol with GradScaler
            self._flagged, self.flag = optimizer, flag
            return False
        if not bool(flag):
            return False
        self.is_holding = True
        for parameter, gradient in found:
            self._taken.append((parameter, gradient))
            parameter.grad = None
        return True

    def release(self) -> None:
        """Put everything back. Without a step that was held back, this does nothing."""
        for parameter, gradient in self._taken:
            parameter.grad = gradient
        self._taken.clear()
        if self._flagged is not None:
            vars(self._flagged).pop("found_inf", None)
            self._flagged = self.flag = None
        self.is_holding = False
