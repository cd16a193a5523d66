"""Whether gradients were cleared between steps, told without reading them.

A backward pass adds to a gradient that is there, which raises its version counter by exactly one, or makes a new one.
So a gradient that is the same object with a version one higher than when its optimizer stepped was not touched in
between: it still holds the gradient of the step before. Anything else that was done to it in between counts as clearing
it; only clipping, which Sonde sees, does not.

`p.grad.data.zero_()` does not count in the version. Where a gradient looks left over, one or two small ones are
therefore compared with zero just before the backward pass, on their device.

Clearing goes by the optimizer or by the module, so a few dozen parameters of an optimizer, spread over all it has, tell
the share that was left over; listening to thousands would slow the backward pass down for nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.hooks.on_backward import Reach
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import BACKWARDS_SEEN, LEFTOVER, NO_GRADIENT, THROWN_AWAY

MAX_TRACED: Final = 32
"""Parameters of one optimizer that are listened to."""
_PROBES: Final = 2
_FEW: Final = 8
# Gradients that somebody wrote to after the backward pass are compared with zero in these steps only: it reads them.
_FIRST_READS: Final = 3
_READ_EVERY: Final = 10
T = TypeVar("T")


class Trace:
    """What is known of one parameter's gradient."""

    __slots__ = (
        "accumulated",
        "cleared",
        "parameter",
        "reference",
        "stepped",
        "thrown",
        "unknown",
        "values",
        "version",
    )

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.values = -1
        """The parameter's own version when a backward pass last reached it."""
        self.thrown = False
        """A gradient for these very values was cleared before anybody stepped with it."""
        self.reference: weakref.ref[Tensor] | None = None
        self.version = -1
        self.accumulated = False
        """A backward pass has reached it since its optimizer's last step."""
        self.cleared = False
        """It was cleared since then."""
        self.unknown = False
        """It was replaced in a way that hides whether it was cleared."""
        self.stepped = False
        """Its optimizer has stepped with a gradient of it before."""

    def remember(self, grad: Tensor) -> None:
        """Note which object the gradient is and its version."""
        if self.reference is None or self.reference() is not grad:
            self.reference = weakref.ref(grad)
        self.version = grad._version

    def is_untouched(self, grad: Tensor) -> bool:
        """Say whether the gradient is the object with the version that was noted last."""
        return self.reference is not None and self.reference() is grad and grad._version == self.version

    def saw_accumulation(self, _: Tensor) -> None:
        """Look at the gradient just after a backward pass has added to it."""
        grad = self.parameter.grad
        if grad is None:  # a hook of the user's has taken it already
            self.cleared = True
            return
        # What was gathered before may have been meant for other weights, or for a step of somebody else's.
        again, self.accumulated = self.accumulated and self.parameter._version == self.values, True
        self.values = self.parameter._version
        version = grad._version
        reference = self.reference
        if reference is not None and reference() is grad:
            if version != self.version + 1:
                self.cleared, self.thrown = True, self.thrown or again
        else:
            # With create_graph, or if it is sparse, a backward replaces the gradient by the sum: old or new?
            if grad.requires_grad or grad.layout is not torch.strided:
                self.unknown = True
            else:
                self.cleared, self.thrown = True, self.thrown or again
            self.reference = weakref.ref(grad)
        self.version = version


class Owner:
    """An optimizer as the tests of its gradients see it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parameters: list[Parameter] = []
        self.traces: list[Trace] = []
        self.steps = 0
        self.passes = 0
        """How many backward passes had reached it when it stepped last."""
        self.probes: list[Trace] = []
        self.probed_zero: Tensor | None = None
        """Whether all probes were zero before some backward pass since the last step; None if they were not read."""

    def probe(self) -> None:
        """Compare probes that look untouched with zero; called just before a backward pass."""
        grads = [
            grad
            for trace in self.probes
            if (grad := trace.parameter.grad) is not None and not trace.cleared and trace.is_untouched(grad)
        ]
        if grads:
            with torch.no_grad():
                here = [grad.detach() for grad in grads if grad.device == grads[0].device]
                zero = torch.stack([(grad == 0).all() for grad in here]).all()
                self.probed_zero = zero if self.probed_zero is None else self.probed_zero | zero


class Leftovers:
    """Follows gradients of the watched parameters and writes what each optimizer found them to be."""

    def __init__(self, sites: VitalSites, reach: Reach) -> None:
        self._sites = sites
        self._reach = reach
        self._traces: dict[int, Trace] = {}
        self._owners: dict[str, Owner] = {}

    def listener(self, parameter: Parameter) -> Callable[[Tensor], None]:
        """Return what to call after each accumulation into a parameter's gradient."""
        trace = self._traces[id(parameter)] = Trace(parameter)
        return trace.saw_accumulation

    def clear(self) -> None:
        """Forget the parameters."""
        self._traces.clear()
        self._owners.clear()

    def before_backward(self) -> None:
        """Look at gradients before a backward pass adds to them."""
        for owner in self._owners.values():
            if owner.probes:
                owner.probe()

    def saw_clipping(self, parameters: Iterable[Tensor]) -> None:
        """Note that gradients were written to without being cleared."""
        for parameter in parameters:
            trace = self._traces.get(id(parameter))
            grad = parameter.grad
            if trace is not None and grad is not None and trace.reference is not None and trace.reference() is grad:
                trace.version = grad._version

    def judge(self, name: str, parameters: list[Parameter], *, due: bool) -> None:
        """Write what an optimizer finds when it steps."""
        owner = self._owner(name, parameters)
        owner.steps += 1
        if not due:
            return
        self._judge_leftovers(owner)
        self._judge_missing(owner)
        passes = self._reach.passes_of(name) - owner.passes
        self._sites.put(name, BACKWARDS_SEEN, passes)
        if passes > 1:
            self._judge_thrown(owner)

    def remember(self, name: str) -> None:
        """Note how an optimizer leaves the gradients behind after its step."""
        owner = self._owners.get(name)
        if owner is None:
            return
        owner.passes = self._reach.passes_of(name)
        owner.probed_zero = None
        for trace in owner.traces:
            grad = trace.parameter.grad
            trace.accumulated = trace.cleared = trace.unknown = trace.thrown = False
            if grad is None:
                trace.reference = None
            else:
                trace.remember(grad)
                trace.stepped = True
        if not owner.probes:
            owner.probes = _smallest(owner.traces)

    def _owner(self, name: str, parameters: list[Parameter]) -> Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name)
        if len(owner.parameters) != len(parameters):
            owner.parameters = parameters
            owner.traces = [trace for each in parameters if (trace := self._traces.get(id(each))) is not None]
        return owner

    def _judge_leftovers(self, owner: Owner) -> None:
        told = [trace for trace in owner.traces if trace.stepped and trace.accumulated and not trace.unknown]
        if not told:
            return
        left = [trace for trace in told if not trace.cleared]
        share = len(left) / len(told)
        if not left:
            self._sites.put(owner.name, LEFTOVER, 0.0)
        elif owner.probed_zero is not None and any(trace in left for trace in owner.probes):
            self._sites.see(owner.name, LEFTOVER, share * (~owner.probed_zero).float())
        else:
            owner.probes = _smallest(left)

    def _judge_thrown(self, owner: Owner) -> None:
        """Say how many gradients hold the last of several backward passes only, as that pass has left them."""
        told = [trace for trace in owner.traces if trace.accumulated and not trace.unknown]
        lost = [
            trace
            for trace in told
            if trace.thrown and (grad := trace.parameter.grad) is not None and trace.is_untouched(grad)
        ]
        if told:
            self._sites.put(owner.name, THROWN_AWAY, len(lost) / len(told))

    def _judge_missing(self, owner: Owner) -> None:
        trainable = [each for each in owner.parameters if each.requires_grad]
        missing = sum(each.grad is None for each in trainable)
        traced = [(trace, grad) for trace in owner.traces if (grad := trace.parameter.grad) is not None]
        written = [grad.detach() for trace, grad in traced if trace.accumulated and not trace.is_untouched(grad)]
        if not written:
            self._sites.put(owner.name, NO_GRADIENT, missing)
        elif (owner.steps <= _FIRST_READS or owner.steps % _READ_EVERY == 0) and _can_be_read_together(written):
            with torch.no_grad():
                zero = torch.stack(torch._foreach_norm(written, math.inf)) == 0
                each = (len(trainable) - missing) / len(traced)  # how many parameters a traced one stands for
                self._sites.see(owner.name, NO_GRADIENT, missing + zero.sum() * each)


def spread(items: Sequence[T], most: int = MAX_TRACED) -> list[T]:
    """Return at most so many items, evenly spread."""
    if len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def _can_be_read_together(grads: list[Tensor]) -> bool:
    return len({grad.device for grad in grads}) == 1 and all(grad.layout == torch.strided for grad in grads)


def _smallest(traces: list[Trace]) -> list[Trace]:
    """Return the parameters with the fewest elements among those that have a gradient.

    A handful of elements may well be zero without having been cleared, so those come last.
    """
    dense = [
        trace
        for trace in traces
        if (grad := trace.parameter.grad) is not None and grad.layout == torch.strided and grad.numel()
    ]
    return sorted(dense, key=lambda trace: (trace.parameter.numel() < _FEW, trace.parameter.numel()))[:_PROBES]
