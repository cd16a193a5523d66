"""Hold an optimizer back from writing an update made of gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from sonde.forensics.values import any_nonfinite


class HoldBack:
    """Makes one `optimizer.step` do nothing, and restores everything afterwards.

    Without gradients every torch optimizer leaves a parameter and its state alone, so they are taken away for the step.
    A fused optimizer on a GPU can decide by itself: it is handed a flag that is computed on the device, as a gradient
    scaler does, and nothing waits.
    """

    def __init__(self) -> None:
        self.is_holding = False
        self.flag: Tensor | None = None
        """The number on the device by which a fused optimizer decides."""
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._flagged: Optimizer | None = None

    def begin(self, optimizer: Optimizer, bad: bool | Tensor | None) -> bool:
        """Hold this step back if a gradient is not finite; say whether it was held back, as far as that is known.

        `bad` says whether one is not finite, or is a number on the device that says so; None if nobody has looked.
        """
        self.release()
        found = [] if bad is False else list(gradients_of(optimizer))
        if not found or getattr(optimizer, "found_inf", None) is not None:
            return False  # a gradient scaler does this already
        flag = any_nonfinite(gradient for _, gradient in found) if bad is None else bad
        if isinstance(flag, Tensor) and flag.device.type == "cuda" and decides_itself(optimizer):
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


def gradients_of(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of an optimizer that have a gradient, with it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad


def decides_itself(optimizer: Optimizer) -> bool:
    """Say whether an optimizer can be left to skip a step by a number on the device."""
    # Others may call something of theirs fused that knows nothing of `found_inf`.
    knows = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not knows or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # Torch makes the momentum of a fused SGD without filling it, and does not fill it in a step that is skipped: it may
    # skip only if it has stepped before.
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return not has_momentum or all(
        "momentum_buffer" in optimizer.state.get(parameter, {}) for parameter, _ in gradients_of(optimizer)
    )
