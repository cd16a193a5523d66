"""What a sensor is: it measures something at the moments it listens to, as often as its schedule says."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.nn import Parameter

from sonde.core.signals import part_of
from sonde.hooks.guard import Handle
from sonde.record.extensions import Watched
from sonde.record.modules import WatchedModule
from sonde.record.optimizers import WatchedOptimizer
from sonde.records import Phase
from sonde.schedule import Schedule, every
from sonde.sensors.facts import FactBook
from sonde.sensors.loss_functions import LossCall
from sonde.sensors.tensors import is_real, is_whole
from sonde.stats.protocol import Recorder


class Signals:
    """Writes signals to the recorder, by subject and name."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._sites: dict[tuple[str, str, Phase, int], int] = {}

    def put(self, subject: str, name: str, value: float, *, phase: Phase = "train", call: int = 0) -> None:
        """Write a plain number."""
        self.recorder.put(self._site(subject, name, phase, call, None), float(value))

    def see(self, subject: str, name: str, values: Tensor, *, phase: Phase = "train", call: int = 0) -> None:
        """Write numbers that are still on their device."""
        self.recorder.see(self._site(subject, name, phase, call, values), values)

    def _site(self, subject: str, name: str, phase: Phase, call: int, values: Tensor | None) -> int:
        key = (subject, name, phase, call)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self.recorder.site(
                subject, "vital", phase=phase, call=call, part=part_of(name), tensor=values
            )
        return site


@dataclass(slots=True, eq=False)
class Context:
    """What the sensors of a session share."""

    watched: Watched
    signals: Signals
    book: FactBook
    owners: dict[int, tuple[str, int]]
    """By the id of a parameter: the name of its optimizer, and the optimizer's id."""
    producers: dict[str, str]
    """By leaf module the class of the module that made its input; empty if there were several classes."""
    looked_at: dict[int, bool | None]
    """Keys of modules whose calls are reported. With a mode, training calls made in that mode are left out."""
    by_hand: set[int]
    """Keys of parts of a model that the program calls by themselves."""
    steps: int = 0
    """How many steps have ended."""
    finished: list[Sensor] = field(default_factory=list)
    """Sensors that have nothing left to do."""

    def leave_out(self, key: int, mode: bool) -> None:
        """Report a module's training calls no more, as long as they are made in this mode."""
        if key not in self.by_hand:
            self.looked_at[key] = mode

    def module_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the watched parameters that have values, by name."""
        return [(entry.name, entry.parameter) for entry in self.watched.table if entry.is_ready()]


@dataclass(frozen=True, eq=False)
class PassInputs:
    """The positional or the named tensors that a model is called with."""

    model: str
    phase: Phase
    call: int
    given: list[tuple[str, Tensor]]
    """Ordinary tensors and where they are in the arguments."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first training pass of a step or of a micro-batch."""
        return self.phase == "train" and not self.call

    @functools.cached_property
    def real(self) -> Tensor | None:
        """The first tensor of real numbers."""
        return next((tensor.detach() for _, tensor in self.given if is_real(tensor)), None)

    @functools.cached_property
    def tokens(self) -> Tensor | None:
        """The first tensor of whole numbers."""
        return next((tensor for _, tensor in self.given if is_whole(tensor)), None)


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Gradients that were clipped by their norm."""

    parameters: Iterable[Tensor]
    norm: Any
    max_norm: Any


@dataclass(frozen=True, slots=True, eq=False)
class Backward:
    """A backward pass that is about to run."""

    roots: tuple[Tensor, ...]
    is_scaled: bool
    """The loss is multiplied by a gradient scaler's scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The graph of the first backward pass, before it runs."""

    root: Tensor
    module_of: Callable[[int], str]
    """Returns the module that made an autograd node, by the node's number."""


class Step:
    """A step of one optimizer: its name, how many steps it has taken with this one, and whether this is recorded."""

    __slots__ = ("_entries", "_parameters", "due", "name", "number", "optimizer", "replaced")

    def __init__(self, watched: WatchedOptimizer, *, due: bool) -> None:
        self.optimizer: Any = watched.optimizer
        self.name = watched.name
        self.number = watched.steps
        self.replaced = watched.replaced
        self.due = due
        self._entries = watched.entries
        self._parameters: list[Parameter] | None = None

    @property
    def parameters(self) -> list[Parameter]:
        """The watched parameters of the optimizer."""
        if self._parameters is None:
            self._parameters = [entry.parameter for entry in self._entries]
        return self._parameters


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step of the run."""

    due: bool
    forwards: int
    backwards: int


_MOST_MISSED: Final = 64
"""How many steps that were left out are looked through: no sensor looks less often by its own schedule."""


class Sensor:
    """Base class: override the moments to listen to. What is not overridden is not called.

    A sensor that fails is reported and disabled; the others continue.
    """

    produces: ClassVar[tuple[str, ...]] = ()
    """Signals (`sonde.core.signals`), and facts as `facts.name`."""
    when: ClassVar[Schedule] = every(1)
    """Which of the looks that it counts it takes: steps, passes or calls, as its docstring says."""
    cost: ClassVar[str] = ""
    """What a look costs, in a sentence."""

    samples_steps: ClassVar[bool] = False
    """Whether `when` chooses the recorded steps, counted from 1, in which `on_call` is called."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.signals = context.signals
        self._looks: Counter[Hashable] = Counter()
        self._looked_at: dict[Hashable, int] = {}
        """The step of the last look."""

    def is_look(self, about: Hashable = None) -> bool:
        """Count a look at something; return whether the schedule takes it.

        Where the budget leaves steps out, a look that the schedule would have taken in one of these is taken now.
        """
        number, step = self._looks[about], self.context.steps
        before = self._looked_at.get(about, step)
        self._looks[about], self._looked_at[about] = number + 1, step
        missed = range(max(before + 1, step - _MOST_MISSED), step) if step > before + 1 else ()
        return self.when.test(number) or any(map(self.when.test, missed))

    def finish(self) -> None:
        """Stop being called from the next step on: there is nothing left to measure."""
        self.context.finished.append(self)

    def start(self) -> None:
        """Look at the program's objects before the first step; may wait for devices."""

    def on_initial(self) -> None:
        """Write what belongs to the state before the first step of a fresh run."""

    def listen(self) -> Iterator[Handle]:
        """Yield hooks of its own; they are removed with the sensor."""
        yield from ()

    def pause(self, paused: bool) -> None:
        """Remove callbacks that cost time in steps that are not looked at, or put them back."""

    def looks_at(self, entry: WatchedModule) -> bool:
        """Return whether `on_call` wants the calls of a module."""
        return False

    def on_pass(self, inputs: PassInputs) -> None:
        """Handle the arguments of a model."""

    def on_tokens(self, tokens: Tensor) -> None:
        """Handle the first tensor of whole numbers among a model's arguments in a training pass."""

    def on_call(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Handle a call of a module chosen by `looks_at`; `call` counts its calls in this step from 0."""

    def on_traced_enter(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        """Handle the arguments of a leaf module, in the first training passes."""

    def on_traced_call(self, entry: WatchedModule, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Handle a call of a leaf module, in the first passes."""

    def on_pass_end(self) -> None:
        """Handle the end of a pass."""

    def on_forgotten(self) -> None:
        """Forget what the passes of the present step have shown: nothing came of them."""

    def on_loss(self, call: LossCall) -> None:
        """Handle a training call of a loss."""

    def on_backward(self, backward: Backward) -> None:
        """Look before a backward pass runs."""

    def on_graph(self, graph: Graph) -> None:
        """Read the graph of the first backward pass."""

    def on_clip(self, clip: Clip) -> None:
        """Handle gradients that were clipped."""

    def on_gradients(self, step: Step) -> None:
        """Look at gradients as an optimizer is about to use them, or has used them if it made them itself."""

    def on_step(self, step: Step) -> None:
        """Look after an optimizer has stepped, or was held back."""

    def on_step_end(self, end: StepEnd) -> None:
        """Handle the end of a step of the run."""

    def on_end(self) -> None:
        """Write what is known only when the session ends."""

    def on_close(self, end: StepEnd) -> None:
        """Write what is known at the end of a session that ran the model but ended no step."""
