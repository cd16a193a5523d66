"""Whether gradients were cleared between steps, told without reading them.

A backward pass adds to a gradient that is there, which raises its version counter by exactly one, or makes a new one.
So a gradient that is the same object with a version one higher than when its optimizer stepped was not touched in
between: it still holds the gradient of the step before. Anything else that was done to it in between counts as clearing
it; only clipping, which Sonde sees, does not.

`p.grad.data.zero_()` does not count in the version. Where a gradient looks left over, one or two small ones are
therefore compared with zero just before the backward pass, on their device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.taps.vital_sites import VitalSites
from sonde.vitals import BACKWARDS_SEEN, LEFTOVER, NO_GRADIENT

_PROBES: Final = 2
_FEW: Final = 8
# Gradients that somebody wrote to after the backward pass are compared with zero in these steps only: it reads them.
_FIRST_READS: Final = 3
_READ_EVERY: Final = 10


class BackwardCount:
    """Counts the backward passes of the program; those inside another one (checkpoints) belong to that one."""

    def __init__(self) -> None:
        self.serial = 0
        """The number of the backward pass that runs now or ran last."""
        self.reached = 0
        """How many since the step before reached a watched parameter."""
        self.last_reached = 0


class Trace:
    """What is known of one parameter's gradient."""

    __slots__ = ("accumulated", "cleared", "owner", "parameter", "reference", "stepped", "unknown", "version")

    def __init__(self, parameter: Parameter, owner: Owner) -> None:
        self.parameter = parameter
        self.owner = owner
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

    def saw_accumulation(self) -> None:
        """Look at the gradient just after a backward pass has added to it."""
        grad = self.parameter.grad
        if grad is None:  # a hook of the user's has taken it already
            self.cleared = True
            return
        self.accumulated = True
        version = grad._version
        reference = self.reference
        if reference is not None and reference() is grad:
            if version != self.version + 1:
                self.cleared = True
        else:
            # With create_graph, or if it is sparse, a backward replaces the gradient by the sum: old or new?
            if grad.requires_grad or grad.layout is not torch.strided:
                self.unknown = True
            else:
                self.cleared = True
            self.reference = weakref.ref(grad)
        self.version = version


class Owner:
    """An optimizer as the tests of its gradients see it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.traces: list[Trace] = []
        self.steps = 0
        self.backwards = 0
        self.serial = 0
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
    """Follows the gradients of all watched parameters and writes what each optimizer found them to be."""

    def __init__(self, sites: VitalSites, backwards: BackwardCount) -> None:
        self._sites = sites
        self._backwards = backwards
        self._nobody = Owner("")
        self._traces: dict[int, Trace] = {}
        self._owners: dict[str, Owner] = {}
        self._claims: dict[int, Owner] = {}

    def claim(self, name: str, parameters: Iterable[Tensor]) -> None:
        """Say which parameters an optimizer has, before any of them is listened to."""
        owner = self._owners.setdefault(name, Owner(name))
        self._claims |= {id(parameter): owner for parameter in parameters}

    def listener(self, parameter: Parameter) -> Callable[[], None]:
        """Return what to call after each accumulation into a parameter's gradient."""
        trace = self._traces[id(parameter)] = Trace(parameter, self._claims.get(id(parameter), self._nobody))
        count = self._backwards

        def heard() -> None:
            trace.saw_accumulation()
            owner = trace.owner
            serial = count.serial
            if owner.serial != serial:
                owner.serial = serial
                owner.backwards += 1
                if count.last_reached != serial:
                    count.last_reached = serial
                    count.reached += 1

        return heard

    def clear(self) -> None:
        """Forget the parameters."""
        self._traces.clear()
        self._owners.clear()
        self._claims.clear()

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
        self._sites.put(name, BACKWARDS_SEEN, owner.backwards)

    def remember(self, name: str) -> None:
        """Note how an optimizer leaves the gradients behind after its step."""
        owner = self._owners.get(name)
        if owner is None:
            return
        owner.backwards = 0
        owner.probed_zero = None
        for trace in owner.traces:
            grad = trace.parameter.grad
            trace.accumulated = trace.cleared = trace.unknown = False
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
            # What has been heard before this optimizer was known was heard for it.
            owner.backwards, owner.serial = self._nobody.backwards, self._nobody.serial
        if len(owner.traces) != len(parameters):
            owner.traces = [trace for each in parameters if (trace := self._traces.get(id(each))) is not None]
            for trace in owner.traces:
                trace.owner = owner
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

    def _judge_missing(self, owner: Owner) -> None:
        missing, written = 0, []
        for trace in owner.traces:
            if trace.parameter.requires_grad:
                grad = trace.parameter.grad
                if grad is None:
                    missing += 1
                elif trace.accumulated and not trace.is_untouched(grad):
                    written.append(grad.detach())
        if not written:
            self._sites.put(owner.name, NO_GRADIENT, missing)
        elif (owner.steps <= _FIRST_READS or owner.steps % _READ_EVERY == 0) and _can_be_read_together(written):
            with torch.no_grad():
                zero = torch.stack(torch._foreach_norm(written, math.inf)) == 0
                self._sites.see(owner.name, NO_GRADIENT, missing + zero.sum())


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
