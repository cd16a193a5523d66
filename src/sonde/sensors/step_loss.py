"""The loss of every iteration, for programs that do not log it: what `backward()` was called on.

It is written as the number `loss`, so it is shown wherever a logged loss is. Nothing is written where the program logs
a number of that name, or a loss of another name in every step. A loss that is logged now and then, such as the mean of
an epoch or of the steps since the last log, does not replace the loss of each step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from sonde.hooks.autograd_graph import children_of, name_of
from sonde.hooks.guard import Guard, Handle, is_capturing
from sonde.hooks.replace_function import SCALING
from sonde.record.kinds import scale_of
from sonde.record.packer import Packer
from sonde.sensors.tensors import is_plain

NAME: Final = "loss"
FROM_BACKWARD: Final = "what backward() was called on"
FROM_MODEL: Final = "the model's own output 'loss'"
# Operations by which a loss is divided among the micro-batches of a step.
_SHARES: Final = ("DivBackward0", "MulBackward0")
# From what backward() is called on to the loss that a model returns there are a division and a scaling at most.
_MAX_CHAIN: Final = 4


class StepLoss:
    """Adds up what backward passes are called on, and writes it when the step is sent off without a logged loss.

    Passes whose loss was divided, as for accumulation, are added up; others are averaged. Where several optimizers have
    backward passes of their own, each has a loss: `loss/optimizer`, `loss/optimizer2`.
    """

    def __init__(self, packer: Packer, guard: Guard, scaler: Any, *, num_optimizers: int, num_models: int) -> None:
        self._packer = packer
        self._scaler: Callable[[], Any] = _nothing if scaler is None else weakref.ref(scaler)
        # Torch's own scalers are seen when they scale; of another nothing is known but that it is enabled.
        self._is_foreign = scaler is not None and not isinstance(scaler, torch.amp.GradScaler)
        self._was_scaled = False
        self._expected = num_optimizers
        self._is_undecided = not num_optimizers and num_models > 1
        """Whether an optimizer that is not known yet may have a loss of its own in the first step."""
        self._stepped: set[str] = set()
        self._owners: set[str] = set()
        self._passes: list[tuple[Tensor, int]] = []
        self._is_divided = False
        self._numbers: list[float] = []
        """The same in a step that is only counted, and what has come of it."""
        self._number: float | None = None
        self._by_owner: dict[str, Tensor] = {}
        self._sites: dict[str, int] = {}
        self._source = ""
        self._is_left_alone = False
        """Whether the program logs `loss` itself."""
        self._logged_at: int | None = None
        """The last step in which the program has logged a loss."""
        self._is_logged = False
        """Whether a loss is logged in every step, as far as the last two show."""
        self._returned: Any = None
        self._see_scaling = guard.wrap("gradient scaler", self._scale)
        packer.before_shipping = guard.wrap("the loss", self._write)

    def listen(self) -> Handle:
        """Listen to gradient scalers, of which a framework may have one that was not passed in."""
        return SCALING.listen(before=self._see_scaling)

    def _scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            self._scaler, self._was_scaled = weakref.ref(args[0]), True

    @property
    def is_scaled(self) -> bool:
        """Whether a gradient scaler has scaled the loss of the backward pass that is about to run."""
        scaler = self._scaler()
        return scaler is not None and bool(scaler.is_enabled()) and (self._was_scaled or self._is_foreign)

    def keep_output(self, output: Any) -> None:
        """Remember the loss that a model returns, to recognise it when it is differentiated."""
        loss = output.get(NAME) if isinstance(output, dict) else getattr(output, NAME, None)
        self._returned = loss.grad_fn if isinstance(loss, Tensor) else None

    @torch.no_grad()
    def before_backward(self, roots: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Remember the tensor that a backward pass is called on."""
        is_scaled, self._was_scaled = self.is_scaled, False
        returned, self._returned = self._returned, None
        if self._is_left_alone or self._is_logged:
            return
        if any(root.numel() != 1 or not is_plain(root) for root in roots):
            return
        scale = scale_of(self._scaler()) if is_scaled else None
        for root, gradient in zip(roots, gradients, strict=True):
            chain = _chain(root.grad_fn, skipped=scale is not None)
            self._is_divided |= bool(chain) and name_of(chain[0]) in _SHARES
            self._source = FROM_MODEL if returned is not None and returned in chain else FROM_BACKWARD
            value = root.detach() if gradient is None else root.detach() * gradient
            value = value if scale is None else value / scale.to(value.device)
            self._passes.append((value, value._version))

    @property
    def is_wanted(self) -> bool:
        """Whether the program logs no loss of its own."""
        return not (self._is_left_alone or self._is_logged)

    def before_backward_asleep(self, roots: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Remember the loss of a step that is only counted: quickly, where it is a number that is at hand."""
        root = roots[0]
        is_usual = NAME in self._sites and len(self._owners) < 2 and not self._was_scaled
        is_at_hand = len(roots) == 1 and gradients[0] is None and type(root) is Tensor and root.is_cpu
        if not is_usual or not is_at_hand or root.numel() != 1 or is_capturing():
            self.before_backward(roots, gradients)
            return
        self._numbers.append(_value_on_cpu(root))
        self._is_divided |= root.grad_fn is not None and name_of(root.grad_fn) in _SHARES

    def end_pass_of(self, optimizer: str) -> None:
        """Handle an optimizer step: the passes so far were for it."""
        self._stepped.add(optimizer)
        if self._passes:
            self._owners.add(optimizer)
            value = self._take()
            if value is not None:
                self._by_owner[optimizer] = value

    def end_dozed_step(self) -> None:
        """Handle the step of the only optimizer there is."""
        if self._passes and self._stepped:
            self.end_pass_of(next(iter(self._stepped)))
        if self._numbers:
            numbers, self._numbers = self._numbers, []
            self._number = math.fsum(numbers) / (1 if self._is_divided else len(numbers))
            self._is_divided = False

    @torch.no_grad()
    def _take(self) -> Tensor | None:
        passes, self._passes = self._passes, []
        is_divided, self._is_divided = self._is_divided, False
        # A loss that was written to since, such as `loss /= n`, is another number now.
        values = [value for value, version in passes if value._version == version]
        if len(values) != len(passes):
            return None
        total = values[0]
        for value in values[1:]:
            total = total + value.to(total.device)
        return total if is_divided or len(values) == 1 else total / len(values)

    def _write(self) -> None:
        found, self._by_owner = self._by_owner, {}
        number, self._number = self._number, None
        if self._passes and not self._stepped:  # no optimizer steps in this loop
            value = self._take()
            found = {} if value is None else {"": value}
        # Until all optimizers have stepped it is not known whether each has a loss of its own.
        is_undecided = self._is_undecided or len(self._stepped) < self._expected
        self._is_undecided &= not found
        self._take_logged()
        if self._is_left_alone or self._is_logged or is_undecided:
            return
        if number is not None:
            self._packer.put(self._sites[NAME], number)
        for optimizer, value in found.items():
            name = NAME if len(self._owners) < 2 else f"{NAME}/{optimizer}"
            self._packer.put_tensor(self._site(name), value)

    def _take_logged(self) -> None:
        logged, step = self._packer.logged_losses, self._packer.step
        self._is_left_alone |= NAME in logged
        if step != self._logged_at:  # a step that is opened again is sent off twice
            is_first = self._logged_at is None and not self._sites
            self._is_logged = bool(logged) and (is_first or self._logged_at == step - 1)
            self._logged_at = step if logged else self._logged_at
        logged.clear()
        if self._is_left_alone:  # for good, so that nothing is left to do when a step is sent off
            self._packer.before_shipping = None

    def _site(self, name: str) -> int:
        site = self._sites.get(name)
        if site is None:
            site = self._sites[name] = self._packer.site(name, "scalar", kind=self._source)
            message = f"no loss was logged: {name} is {self._source}"
            self._packer.put_event("loss_seen", message, {"name": name, "source": self._source})
        return site


def _nothing() -> None:
    return None


def _chain(node: Any, *, skipped: bool) -> list[Any]:
    """Return the first operations of a backward pass, without the one by which a gradient scaler scales the loss."""
    found: list[Any] = []
    while node is not None and len(found) < _MAX_CHAIN:
        found.append(node)
        node = next((child for child in children_of(node) if child is not None), None)
    return found[1:] if skipped else found


def _value_on_cpu(number: Tensor) -> float:
    """Return a number that is in the host's memory: nothing waits for a device."""
    return number.item()
