"""Sensors for the training loop: passes, steps, and whether gradients are cleared between steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.core.signals import (
    BACKWARDS,
    BACKWARDS_ADDED,
    BACKWARDS_SEEN,
    FORWARDS,
    GRAPHS_KEPT,
    LEFTOVER,
    LOOP,
    NO_GRADIENT,
    REPLACED,
    STEPS_TAKEN,
    THROWN_AWAY,
    TURNS,
    WEIGHTS_SET,
    WRITTEN,
)
from sonde.hooks.autograd_graph import LEAF, first_nodes, name_of, walk
from sonde.hooks.guard import Handle, Handles
from sonde.hooks.on_backward import after_backward, on_accumulated
from sonde.parallel.ranks import is_connected
from sonde.record.kinds import InBackward
from sonde.schedule import at, every, first
from sonde.sensors.sensor import Backward, Clip, Context, Graph, Sensor, Step, StepEnd

MAX_GRAPHS: Final = 64
"""Earlier steps whose graphs are looked for."""
_MARKED: Final = 8
"""Nodes of a graph that are marked."""
MAX_TRACED: Final = 32
"""Parameters of one optimizer that are listened to."""
_PROBES: Final = 2
_FEW: Final = 8
T = TypeVar("T")


class PassCounts(Sensor):
    """Forward and backward passes of each step."""

    produces = (FORWARDS, BACKWARDS)
    cost = "two numbers per step"

    def on_step_end(self, end: StepEnd) -> None:
        """Write the counts of a step."""
        if end.due:
            self.signals.put(LOOP, FORWARDS, end.forwards)
            self.signals.put(LOOP, BACKWARDS, end.backwards)


class OptimizerSteps(Sensor):
    """Which optimizers step in an iteration, how often each has, and whether the program has replaced one."""

    produces = (STEPS_TAKEN, REPLACED, TURNS)
    cost = "a few numbers per step where several optimizers step"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._names: set[str] = set()
        self._replaced: dict[str, int] = {}
        self._renewed: dict[str, int] = {}
        """How many of the new optimizers came with other weights, as for the next fold."""
        self._versions: dict[str, int] = {}
        """By optimizer: the version of its first parameter after its last step."""
        self._steps = self._turns = self._passes = 0

    def on_gradients(self, step: Step) -> None:
        """Count a step that has a backward pass of its own."""
        passes = self.context.watched.reach.passes
        self._turns += passes != self._passes
        self._passes = passes
        if step.replaced != self._replaced.get(step.name, 0):
            new = _version(step) != self._versions.get(step.name)
            self._renewed[step.name] = self._renewed.get(step.name, 0) + new

    def on_step(self, step: Step) -> None:
        """Write how often an optimizer has stepped."""
        self._names.add(step.name)
        self._steps += 1
        if step.replaced != self._replaced.get(step.name, 0):
            self._replaced[step.name] = step.replaced
            self.signals.put(step.name, REPLACED, step.replaced - self._renewed.get(step.name, 0))
        self._versions[step.name] = _version(step)
        if step.due and (len(self._names) > 1 or isinstance(step.optimizer, InBackward)):
            self.signals.put(step.name, STEPS_TAKEN, step.number)

    def on_step_end(self, end: StepEnd) -> None:
        """Write how many optimizers had a backward pass of their own."""
        if end.due and self._steps > 1:
            self.signals.put(LOOP, TURNS, self._turns)
        self._steps = self._turns = 0


def _version(step: Step) -> int:
    """Return how often the first parameter of an optimizer was written to; 0 if that is not known."""
    groups = getattr(step.optimizer, "param_groups", None) or [{}]
    first = next(iter(groups[0].get("params", ())), None)
    return first._version if isinstance(first, Tensor) and not first.is_inference() else 0


class Written(Sensor):
    """How many trainable parameters were written to in a run without a step: an average of them is frozen."""

    produces = (WRITTEN,)
    when = at(0)
    cost = "one number at the end of such a run"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._versions: list[tuple[Parameter, int]] = []

    def start(self) -> None:
        """Remember the version of each parameter."""
        known = [each for _, each in self.context.module_parameters() if not each.is_inference()]
        self._versions = [(each, each._version) for each in known if each.requires_grad]

    def on_step_end(self, end: StepEnd) -> None:
        """Forget the parameters: a step was taken."""
        self._versions = []
        self.finish()

    def on_close(self, end: StepEnd) -> None:
        """Write the number."""
        written = sum(parameter._version != version for parameter, version in self._versions)
        self.signals.put(LOOP, WRITTEN, written)


class InputGradient(Sensor):
    """Whether the first backward pass also stores a gradient in something that is not a parameter, such as an input."""

    produces = ("facts.input_gradient",)
    when = at(0)
    cost = "a walk over the graph of the first backward pass"

    def on_graph(self, graph: Graph) -> None:
        """Look at the leaves of the graph."""
        leaves = (getattr(node, "variable", None) for node in walk(graph.root.grad_fn) if name_of(node) == LEAF)
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, Parameter) for leaf in leaves):
            self.context.book.add(input_gradient=True)


class _Mark:
    """Lives as long as the node of a graph that holds it."""

    __slots__ = ("__weakref__",)


class KeptGraphs(Sensor):
    """How many earlier steps' graphs still exist, found by marks in the nodes next to the loss.

    A node holds its mark until the graph is freed. What keeps a graph, such as a sum of losses or a list of outputs,
    may hold one of the nodes before the loss instead of the loss itself, so the first few nodes are marked.
    """

    produces = (GRAPHS_KEPT,)
    cost = "marks at eight nodes of the graph, and one number per step"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._now: list[weakref.ref[_Mark]] = []
        self._before: list[tuple[int, list[weakref.ref[_Mark]]]] = []
        """The numbers of earlier steps of which a mark is left, and these marks."""
        self._noted = 0

    def on_backward(self, backward: Backward) -> None:
        """Mark the nodes next to what the pass starts from."""
        for root in backward.roots:
            for node in first_nodes(root.grad_fn, _MARKED):
                mark = _Mark()
                node.metadata[_Mark] = mark
                self._now.append(weakref.ref(mark))

    def on_step_end(self, end: StepEnd) -> None:
        """Count the steps before this one of which a mark is left."""
        if not end.due or not self._now:
            self._now = []
            return
        # A graph that was freed does not come back: its step is not looked at again.
        oldest = self._noted - MAX_GRAPHS
        left = ((number, [mark for mark in marks if mark() is not None]) for number, marks in self._before)
        self._before = [(number, marks) for number, marks in left if marks and number >= oldest]
        # Not this step: the variables of the loop still hold its loss.
        self.signals.put(LOOP, GRAPHS_KEPT, len(self._before))
        self._before.append((self._noted, self._now))
        self._noted += 1
        self._now = []


class Trace:
    """What is known of one parameter's gradient."""

    __slots__ = (
        "accumulated",
        "added",
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
        self.added = 0
        """How many backward passes the gradient holds, as far as is known."""
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
        """Return whether the gradient is the object with the version that was noted last."""
        return self.reference is not None and self.reference() is grad and grad._version == self.version

    def saw_accumulation(self, _: Tensor) -> None:
        """Look at the gradient just after a backward pass has added to it."""
        grad = self.parameter.grad
        if grad is None:  # a hook of the user's has taken it already
            self.cleared = True
            return
        # What was gathered before may belong to other weights, or to a step of another model.
        again, self.accumulated = self.accumulated and self.parameter._version == self.values, True
        self.values = self.parameter._version
        self.added += 1
        version = grad._version
        reference = self.reference
        if reference is not None and reference() is grad:
            if version != self.version + 1:
                self._was_cleared(again)
        else:
            # With create_graph, or if it is sparse, a backward replaces the gradient by the sum: old or new?
            if grad.requires_grad or grad.layout is not torch.strided:
                self.unknown = True
            else:
                self._was_cleared(again)
            self.reference = weakref.ref(grad)
        self.version = version

    def _was_cleared(self, again: bool) -> None:
        self.cleared, self.thrown, self.added = True, self.thrown or again, 1


class Owner:
    """An optimizer and what is known of its gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parameters: list[Parameter] = []
        self.traces: list[Trace] = []
        self.steps = 0
        self.version = -1
        """The version of the first parameter after the last step; -1 before the first."""
        self.times_set = 0
        """How often that parameter was written to between steps."""
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


class Leftovers(Sensor):
    """Whether gradients were cleared between steps, found without reading them. Counts an optimizer's steps.

    A backward pass adds to a gradient that is there, which raises its version counter by exactly one, or makes a new
    one. So a gradient that is the same object with a version one higher than when its optimizer stepped was not touched
    in between: it still holds the gradient of the step before. Anything else that was done to it in between counts as
    clearing it; only clipping does not.

    `p.grad.data.zero_()` does not count in the version. Where a gradient looks left over, one or two small ones are
    therefore compared with zero just before the backward pass, on their device.

    Gradients are cleared by the optimizer or by the module, so a few dozen parameters of an optimizer, spread over all
    it has, show the share that was left over; listening to thousands would slow the backward pass down for nothing.
    """

    produces = (LEFTOVER, NO_GRADIENT, THROWN_AWAY, BACKWARDS_SEEN, BACKWARDS_ADDED, WEIGHTS_SET)
    # Gradients that were written to after the backward pass are compared with zero in these steps only: it reads them.
    when = first(4) | every(10)
    cost = "a Python callback at 32 parameters of each optimizer; reads gradients only where they were written to"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._traces: dict[int, Trace] = {}
        self._owners: dict[str, Owner] = {}
        self._callbacks = Handles()

    def listen(self) -> Iterator[Handle]:
        """Listen to accumulation at some parameters of each optimizer."""
        groups: dict[str, list[Parameter]] = {}
        for _, parameter in self.context.module_parameters():
            if parameter.requires_grad:
                name, _ = self.context.owners.get(id(parameter), ("", 0))
                groups.setdefault(name, []).append(parameter)
        for parameter in (each for parameters in groups.values() for each in spread(parameters)):
            self._traces[id(parameter)] = Trace(parameter)
        yield self._callbacks
        if is_connected():
            yield after_backward(self.context.watched.guard.wrap("Leftovers", self._after_backward))
        self.pause(paused=False)

    def pause(self, paused: bool) -> None:
        """Listen to no accumulation, or listen again: callbacks slow the backward pass down."""
        if paused:
            self._callbacks.remove()
        elif not self._callbacks.handles:
            wrap = self.context.watched.guard.wrap
            self._callbacks.handles += [
                on_accumulated(trace.parameter, wrap("Leftovers", trace.saw_accumulation))
                for trace in self._traces.values()
            ]

    def on_backward(self, backward: Backward) -> None:
        """Look at gradients before a backward pass adds to them."""
        for owner in self._owners.values():
            if owner.probes:
                owner.probe()

    def _after_backward(self) -> None:
        """Note what the backward pass itself did to the gradients: where ranks train together it also reduces them."""
        for trace in self._traces.values():
            grad = trace.parameter.grad
            if trace.accumulated and grad is not None:
                trace.remember(grad)

    def on_clip(self, clip: Clip) -> None:
        """Note that gradients were written to without being cleared."""
        for parameter in clip.parameters:
            trace = self._traces.get(id(parameter))
            grad = parameter.grad
            if trace is not None and grad is not None and trace.reference is not None and trace.reference() is grad:
                trace.version = grad._version

    def on_gradients(self, step: Step) -> None:
        """Write what an optimizer finds when it steps."""
        owner = self._owner(step.name, step.parameters)
        owner.steps += 1
        owner.times_set += bool(owner.traces and 0 <= owner.version != owner.traces[0].parameter._version)
        if not step.due:
            return
        self.signals.put(step.name, WEIGHTS_SET, owner.times_set)
        self._judge_leftovers(owner)
        self._judge_missing(owner)
        passes = self.context.watched.reach.passes_of(step.name) - owner.passes
        self.signals.put(step.name, BACKWARDS_SEEN, passes)
        if passes > 1:
            self._judge_thrown(owner)
            added = [trace.added for trace in owner.traces if trace.accumulated and not trace.unknown]
            if added:
                self.signals.put(step.name, BACKWARDS_ADDED, max(added))

    def on_step(self, step: Step) -> None:
        """Note how an optimizer leaves the gradients behind after its step."""
        owner = self._owners.get(step.name)
        if owner is None:
            return
        owner.passes = self.context.watched.reach.passes_of(step.name)
        owner.probed_zero = None
        owner.version = owner.traces[0].parameter._version if owner.traces else -1
        for trace in owner.traces:
            grad = trace.parameter.grad
            trace.accumulated = trace.cleared = trace.unknown = trace.thrown = False
            trace.added = 0
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
        followed = [trace for trace in owner.traces if trace.stepped and trace.accumulated and not trace.unknown]
        if not followed:
            return
        left = [trace for trace in followed if not trace.cleared]
        share = len(left) / len(followed)
        if not left:
            self.signals.put(owner.name, LEFTOVER, 0.0)
        elif owner.probed_zero is not None and any(trace in left for trace in owner.probes):
            self.signals.see(owner.name, LEFTOVER, share * (~owner.probed_zero).float())
        else:
            owner.probes = _smallest(left)

    def _judge_thrown(self, owner: Owner) -> None:
        """Write the share of gradients that hold only the last of several backward passes."""
        followed = [trace for trace in owner.traces if trace.accumulated and not trace.unknown]
        lost = [
            trace
            for trace in followed
            if trace.thrown and (grad := trace.parameter.grad) is not None and trace.is_untouched(grad)
        ]
        if followed:
            self.signals.put(owner.name, THROWN_AWAY, len(lost) / len(followed))

    def _judge_missing(self, owner: Owner) -> None:
        trainable = [each for each in owner.parameters if each.requires_grad]
        missing = sum(each.grad is None for each in trainable)
        traced = [(trace, grad) for trace in owner.traces if (grad := trace.parameter.grad) is not None]
        written = [grad.detach() for trace, grad in traced if trace.accumulated and not trace.is_untouched(grad)]
        if not written:
            self.signals.put(owner.name, NO_GRADIENT, missing)
        elif self.when(owner.steps) and _can_be_read_together(written):
            with torch.no_grad():
                zero = torch.stack(torch._foreach_norm(written, math.inf)) == 0
                each = (len(trainable) - missing) / len(traced)  # how many parameters a traced one represents
                self.signals.see(owner.name, NO_GRADIENT, missing + zero.sum() * each)


def spread(items: Sequence[T], most: int = MAX_TRACED) -> list[T]:
    """Return at most `most` items, evenly spread."""
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
