"""Ways to continue after trouble. Each acts only when it is called, and is noted as an event.

They change the training on purpose. They treat a symptom: find the cause as well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.errors import OptionError
from sonde.probes.readings import gradients, parameters, read_gradients, read_parameters, readings_of, total_norm

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger


def replace_nonfinite_(
    what: nn.Module | Tensor | Iterable[Tensor],
    value: float = 0.0,
    *,
    of: Literal["parameters", "gradients"] = "gradients",
    debugger: PyTorchDebugger | None = None,
) -> int:
    """Replace every NaN and infinity by `value`, and return how many there were.

    Args:
        what: A model, whose gradients (or parameters, by `of`) are changed, or tensors.
        value: The replacement.
        of: Which tensors of a model.
        debugger: Notes it as an event.

    >>> x = torch.tensor([1.0, float("nan"), float("-inf")])
    >>> replace_nonfinite_(x), x.tolist()
    (2, [1.0, 0.0, 0.0])

    """
    tensors = _named(what, of)
    bad = {name: count for name, each in readings_of(tensors, histogram=False).items() if (count := each.nonfinite)}
    with torch.no_grad():
        for name in bad:
            tensors[name].nan_to_num_(nan=value, posinf=value, neginf=value)
    total = sum(bad.values())
    if total:
        message = f"{total} elements that were not finite were replaced by {value:g} in {len(bad)} tensors"
        _note(debugger, "recovery_replaced_nonfinite", message, {"counts": bad, "value": value})
    return total


def clip_gradients_(model: nn.Module, max_norm: float, *, debugger: PyTorchDebugger | None = None) -> float:
    """Scale all gradients down so that their total norm is at most `max_norm`; return the norm before.

    If one of them is not finite, none is changed: scaling would make all of them NaN.
    """
    if not max_norm > 0:
        raise OptionError(f"max_norm takes a number above 0; got {max_norm!r}.")
    norm = total_norm(read_gradients(model).values())
    if not math.isfinite(norm):
        message = f"Gradients were not clipped: their norm is {norm}. Replace what is not finite, or skip the step."
        _note(debugger, "recovery_clip_refused", message, {"gradient_norm": norm, "max_norm": max_norm})
    elif norm > max_norm:
        with torch.no_grad():
            for gradient in gradients(model).values():
                gradient.mul_(max_norm / norm)
        message = f"Gradients were scaled from norm {norm:.4g} to {max_norm:g}"
        _note(debugger, "recovery_clipped", message, {"gradient_norm": norm, "max_norm": max_norm})
    return norm


def step_if_finite(model: nn.Module, optimizer: Optimizer, *, debugger: PyTorchDebugger | None = None) -> bool:
    """Step if all gradients of the model are finite; else skip the step and clear them. Return whether it stepped."""
    bad = {name: each.nonfinite for name, each in read_gradients(model).items() if each.nonfinite}
    if not bad:
        optimizer.step()
        return True
    optimizer.zero_grad()
    message = f"A step was skipped: {len(bad)} gradients are not finite, first {next(iter(bad))}"
    _note(debugger, "recovery_skipped_step", message, {"counts": bad})
    return False


def lower_learning_rate(
    optimizer: Optimizer, factor: float = 0.5, *, minimum: float = 0.0, debugger: PyTorchDebugger | None = None
) -> list[float]:
    """Multiply every group's learning rate by `factor`, but not below `minimum`; return the new ones.

    A scheduler that computes its rate from the initial one, as most do, sets it again at its next step.
    """
    if not 0 < factor < 1:
        raise OptionError(f"factor takes a number between 0 and 1; got {factor!r}.")
    before = [float(group["lr"]) for group in optimizer.param_groups]
    after = [max(rate * factor, min(minimum, rate)) for rate in before]
    for group, rate in zip(optimizer.param_groups, after, strict=True):
        # A rate that is a tensor is changed in place, because a captured graph reads it from there.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    message = f"The learning rate was lowered from {before[0]:.3g} to {after[0]:.3g}"
    _note(debugger, "recovery_lowered_learning_rate", message, {"before": before, "after": after})
    return after


class LastGood:
    """Keeps copies of a model's last finite weights, and of its optimizer's state, for restoring them.

    Args:
        model: The model.
        optimizer: Its optimizer, whose state is restored along with the weights.
        keep: How many copies to keep; each takes as much memory as the model (and the optimizer's state).
        device: Where to keep them; "cpu" saves device memory and costs a copy, None keeps them on their device.
        debugger: Notes what is done as events.

    Example:
        good = LastGood(model, optimizer, debugger=debugger)
        good.remember()
        ...
        if not math.isfinite(loss.item()):
            good.restore()

    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        keep: int = 1,
        device: str | torch.device | None = "cpu",
        debugger: PyTorchDebugger | None = None,
    ) -> None:
        if keep < 1:
            raise OptionError(f"keep takes a whole number of at least 1; got {keep!r}.")
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._debugger = debugger
        self._copies: deque[tuple[Any, Any]] = deque(maxlen=keep)

    def __len__(self) -> int:
        return len(self._copies)

    def remember(self) -> bool:
        """Keep the current weights if they are finite; return whether they were kept."""
        if any(each.nonfinite for each in read_parameters(self._model).values()):
            return False
        state = None if self._optimizer is None else _copied(self._optimizer.state_dict(), self._device)
        self._copies.append((_copied(self._model.state_dict(), self._device), state))
        return True

    def restore(self, steps_back: int = 1) -> None:
        """Restore the weights that were kept last (or, with `steps_back`, earlier ones); the copies stay.

        Raises:
            OptionError: Nothing that old is kept.

        """
        if not 1 <= steps_back <= len(self._copies):
            raise OptionError(f"restore({steps_back}): {len(self._copies)} copies are kept. Call remember() before.")
        weights, state = self._copies[-steps_back]
        self._model.load_state_dict(weights)
        if self._optimizer is not None:
            # Loading does not copy tensors where it can avoid it, and the next step would write into ours.
            self._optimizer.load_state_dict(_copied(state, None))
        _note(self._debugger, "recovery_rolled_back", f"Rolled back to copy {steps_back} of the last good weights", {})


def _copied(value: Any, device: str | torch.device | None) -> Any:
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy if device is None else copy.to(device)
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    return [_copied(item, device) for item in value] if isinstance(value, list) else value


def _named(what: nn.Module | Tensor | Iterable[Tensor], of: str) -> dict[str, Tensor]:
    if isinstance(what, nn.Module):
        if of not in ("parameters", "gradients"):
            raise OptionError(f"of={of!r}: choose 'parameters' or 'gradients'.")
        return gradients(what) if of == "gradients" else dict(parameters(what))
    tensors = [what] if isinstance(what, Tensor) else list(what)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _note(debugger: PyTorchDebugger | None, event_type: str, message: str, data: dict[str, Any]) -> None:
    if debugger is not None:
        debugger._log_debug_event(event_type, message, data)
