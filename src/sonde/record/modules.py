"""Watch module outputs, and their gradients.

Which call is which:
- A *pass* begins when a watched module is called from outside any watched module. Its phase is `train` if gradients are
  enabled there, else `eval`; what an inner `no_grad` (reentrant checkpointing) does to the inside does not matter.
- Calls of a module are numbered from 0 until a backward pass has run; then numbering begins anew and the next
  micro-batch is merged into the readings of the first. In evaluation it begins anew with every pass.
- A forward that runs inside a backward is a checkpoint being recomputed. It has been seen already and is left out.
- From the beginning of a training pass that is not recorded to the end of its step nothing is listened to. Evaluations
  come between steps, so they are seen whether or not the steps around them are.
- A training pass that nothing came of is forgotten when the same model runs again: its graph is gone and no gradient
  has reached a parameter. So it is with passes before the first step that reach no loss (summaries, warm-up calls) and
  with those that only a gradient of the inputs was taken of, as a pipeline does to learn shapes from empty tensors.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from sonde.hooks.autograd_graph import layouts_behind
from sonde.hooks.guard import Guard, backward_id, is_capturing
from sonde.hooks.names import is_wrapper, named_modules, unwrap
from sonde.hooks.on_backward import OutputGraph, Reach, on_gradient
from sonde.hooks.on_call import ModuleCalls
from sonde.hooks.unpack import plain_values, unpack
from sonde.parallel.placements import WHOLE, Holding, data_of, holding_of_output
from sonde.parallel.ranks import is_connected
from sonde.record.doze import Doze
from sonde.record.governor import EVERYTHING, OUTPUTS
from sonde.records import Phase, Quantity
from sonde.select import Selector
from sonde.stats.outputs import ANY_MODE, NO_MODE, Outputs, PlainOutputs, outputs_in_c
from sonde.stats.protocol import Recorder


@dataclass(frozen=True, slots=True, eq=False)
class WatchedModule:
    """A module with what its sites need to know. `is_root` marks a model the user passed in."""

    module: nn.Module
    name: str
    kind: str
    aliases: tuple[str, ...]
    wanted: bool
    is_root: bool
    key: int = field(init=False)
    """A key for the module where holding it would keep it alive."""

    def __post_init__(self) -> None:
        """Set the key."""
        object.__setattr__(self, "key", id(self.module))


class PassObserver(Protocol):
    """Looks at passes beyond the outputs: what modules are called with, in which order, in which mode."""

    is_tracing: bool
    """Whether to report calls of every module; else only of those in `looked_at`."""
    looked_at: dict[int, bool | None]
    """Keys of modules. None: report every call. A mode: in training, report only calls made in the other mode."""

    @property
    def has_loss(self) -> bool:
        """Whether a loss was computed in the present step."""

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass has begun in the present step; `torch.autograd.grad` does not count."""

    def begin_pass(self, entry: WatchedModule, call: int, args: tuple[Any, ...], phase: Phase, due: bool) -> None:
        """Handle the beginning of a pass at this module."""

    def enter(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        """Handle the arguments of a module in a training pass."""

    def leave(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Handle the arguments and the output of a module."""

    def end_pass(self, entry: WatchedModule, call: int, kwargs: dict[str, Any], phase: Phase) -> None:
        """Handle the end of a pass that is recorded, with the named arguments of its outermost module."""


_PHASES: Final[dict[Phase, int]] = {"train": 0, "eval": 1}
_MAX_FORGOTTEN: Final = 16
"""How often passes are forgotten: a program may run its model a thousand times before the first step."""


class _Pass(threading.local):
    """Where each thread is in a forward pass."""

    def __init__(self) -> None:
        self.outermost: int | None = None
        """The module at which the pass began, by its key; None between passes."""
        self.phase: Phase = "train"
        self.recording = True
        self.observed = True
        """Whether the observer takes part in the pass."""
        self.is_whole = False
        """Whether the pass is that of a whole model, not of a part that is called by itself."""
        self.backward_seen = 0
        self.outputs: Outputs = PlainOutputs()
        """The numbers of calls, and the last recorded output: a container may return its child's tensor."""


class _UnusedPasses:
    """The training passes of the present step, until a gradient reaches a parameter."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._graphs: list[tuple[int, OutputGraph]] = []
        self._passes_before = 0
        self._steps = 0
        self._last = -2
        """The step in which nothing came of a pass but a gradient of its inputs."""
        self._left = _MAX_FORGOTTEN

    def add(self, key: int, output: Any) -> None:
        """Take what a pass returned."""
        if self._left:
            self._graphs.append((key, OutputGraph(output)))

    def end_step(self) -> None:
        """Begin the next step."""
        self._graphs.clear()
        self._steps += 1
        self._reach.settle()
        self._passes_before = self._reach.passes

    def are_forgotten(self, key: int, observer: PassObserver | None) -> bool:
        """Return whether nothing came of the passes so far, now that a pass of one of their models begins."""
        graphs = self._graphs
        if not graphs or not any(each == key for each, _ in graphs) or any(graph.exists for _, graph in graphs):
            return False
        self._reach.settle()
        gradients = [graph.has_gradient for _, graph in graphs]
        graphs.clear()
        # A parameter that the program has put in place of another is not known.
        if self._reach.passes != self._passes_before or observer is None or observer.has_backward:
            return False
        if all(gradients):
            # Where it is so in every step, as with adversarial examples, it is a part of the loop.
            is_habit, self._last = self._last == self._steps - 1, self._steps
            is_dry = not is_habit
        else:
            is_dry = not self._steps and not observer.has_loss
        self._left -= is_dry
        return is_dry


class ModuleTap:
    """Reports the outputs of wanted modules to the recorder, in those passes that `before_pass` says yes to."""

    def __init__(
        self,
        watched: list[WatchedModule],
        recorder: Recorder,
        guard: Guard,
        *,
        outputs: bool,
        output_gradients: bool,
        max_calls: int,
        reach: Reach,
        before_pass: Callable[[Phase], int],
        doze: Doze,
        after_pass: Callable[[Phase], None],
        forget_passes: Callable[[], None],
        observer: PassObserver | None = None,
    ) -> None:
        self.gradient_sites: list[int] = []
        self._recorder = recorder
        self._outputs = outputs
        self._output_gradients = output_gradients
        # Without either this tap only counts calls and calls its observer.
        self._wants_tensors = outputs or output_gradients
        self._max_calls = max_calls
        self._reach = reach
        self._before_pass = before_pass
        self._doze = doze
        self._after_pass = after_pass
        self._forget_passes = forget_passes
        self._unused = _UnusedPasses(reach)
        self._observer = observer
        self._wrappers = {entry.key for entry in watched if is_wrapper(entry.module)}
        self._pass = _Pass()
        # C code takes the ordinary outputs of the first thread that runs a pass; other threads go through Python.
        self._outputs_in_c: Outputs | None = outputs_in_c() if outputs and not output_gradients else None
        self._is_in_use = False
        self._last_looked_at: dict[int, bool | None] = {}
        self._sites: dict[tuple[int, Quantity, Phase, int, str], int] = {}
        # The usual case of these, found quickly: outputs of first calls that are a tensor.
        self._plain_sites: dict[Phase, dict[int, int]] = {"train": {}, "eval": {}}
        # Which samples ranks share in a tensor-parallel model, known when it is first called.
        self._roots: list[nn.Module] | None = [entry.module for entry in watched if entry.is_root]
        self._data = WHOLE
        self._held: dict[tuple[int, int, str], Holding] = {}
        self._gradient = guard.wrap("output gradients", self._see_gradient)
        self._enter_awake = guard.wrap("module calls", self._enter)
        self._calls = ModuleCalls(
            {entry.key: entry for entry in watched},
            self._enter_awake,
            guard.wrap("module outputs", self._leave),
            raised=guard.wrap("module calls", self._forget),
            always=[entry.key for entry in watched if entry.is_root],
            asleep=guard.wrap("module calls", self._enter_asleep),
            take=None if self._outputs_in_c is None else self._outputs_in_c.take,
        )
        self.await_pass = functools.partial(self._calls.nap, on=False)
        """In a doze, report the next beginning of a pass. Called in every step, where steps are short."""

    def attach(self) -> None:
        """Begin to listen."""
        self._calls.attach()

    def remove(self) -> None:
        """Stop listening and forget the modules."""
        self._calls.remove()
        self._roots = None

    @property
    def is_observed(self) -> bool:
        """Whether the observer takes part in the pass that runs, or ran last in this thread."""
        return self._pass.observed

    @property
    def seconds_in_c(self) -> float:
        """Time spent recording outputs in C, which no guard measures."""
        return 0.0 if self._outputs_in_c is None else self._outputs_in_c.seconds

    def end_step(self) -> None:
        """Begin to number calls from 0 again, and to listen."""
        self._unused.end_step()
        here = self._pass
        here.outputs.clear_calls(_PHASES["train"])
        here.outputs.end_pass()
        here.outermost = None
        self._calls.wake()
        self._calls.widen()

    def wake(self) -> None:
        """Listen to the next pass, though the step is not recorded."""
        self._calls.wake()

    def continue_step(self) -> None:
        """Continue to count calls in this step: further ones are made for another optimizer."""
        self._reach.settle()
        self._pass.backward_seen = self._reach.passes

    @property
    def saw_model(self) -> bool:
        """Whether the last pass was that of a whole model."""
        return self._pass.is_whole

    def doze(self) -> None:
        """Report nothing but that passes begin, until `wake`."""
        self._calls.doze()

    def _enter_asleep(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        """Handle the beginning of a pass in a doze; an evaluation ends it."""
        if torch.is_grad_enabled():
            self._doze.begin_pass()
            self._calls.nap(on=True)
        else:
            self._doze.end()
            self._enter_awake(entry, args)

    def _enter(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        here = self._pass
        if backward_id() != -1 or is_capturing():
            return
        observer = self._observer
        # A pass that Ctrl-C ended is still open; the model's own next call, or the end of the step, ends it.
        if entry.is_root or here.outermost is None:
            inside_wrapper = here.outermost in self._wrappers
            here.is_whole = entry.is_root
            self._begin_pass(here, entry.key)
            if observer is not None and not inside_wrapper:
                call = here.outputs.calls(entry.key, _PHASES[here.phase])
                observer.begin_pass(entry, call, args, here.phase, here.observed)
            if not here.recording and here.phase == "train":
                self._calls.rest()
                return
            here.outermost = entry.key
            if observer is None or not observer.is_tracing:
                self._calls.narrow()  # there is nothing to do where modules inside a pass begin
        if observer is not None and observer.is_tracing and here.observed and here.phase == "train":
            observer.enter(entry, args)

    def _forget(self, entry: WatchedModule) -> None:
        """End a pass whose outermost module has raised."""
        here = self._pass
        if here.outermost == entry.key:
            here.outermost = None
            self._calls.widen()

    def _begin_pass(self, here: _Pass, outermost: int) -> None:
        here.outermost = None
        here.phase = "train" if torch.is_grad_enabled() else "eval"
        if here.phase == "train" and self._unused.are_forgotten(outermost, self._observer):
            here.outputs.clear_calls(_PHASES["train"])
            self._forget_passes()
        level = self._before_pass(here.phase)
        here.recording, here.observed = level >= OUTPUTS, level >= EVERYTHING
        if self._outputs_in_c is not None and not self._is_in_use:
            self._is_in_use = True
            here.outputs = self._outputs_in_c
        if here.phase == "eval":
            here.outputs.clear_calls(_PHASES["eval"])
        else:
            self._reach.settle()
            if here.backward_seen != self._reach.passes:
                here.outputs.clear_calls(_PHASES["train"])
                here.backward_seen = self._reach.passes
        here.outputs.end_pass()  # a compiled model may return the very same tensor object in every pass
        observer = self._observer if here.observed else None
        if here.recording and not (observer is not None and observer.is_tracing):
            if observer is not None and observer.looked_at != self._last_looked_at:
                self._look_at_others(here.outputs, observer.looked_at)
            here.outputs.begin_pass(_PHASES[here.phase], outermost, observer is not None)

    def _look_at_others(self, outputs: Outputs, looked_at: Mapping[int, bool | None]) -> None:
        """Change the modules whose outputs the observer gets."""
        before, self._last_looked_at = self._last_looked_at, dict(looked_at)
        for key, _ in looked_at.items() ^ before.items():
            for phase, number in _PHASES.items():
                outputs.set_mode(key, number, self._mode_left_to_c(key, phase))

    def _leave(self, entry: WatchedModule, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if backward_id() != -1:
            return
        here = self._pass
        if here.outermost is None and is_capturing():
            return  # so was its beginning
        key = entry.key
        call = here.outputs.count(key, _PHASES[here.phase])
        if here.recording:
            call = min(call, self._max_calls - 1)
            if entry.wanted and self._wants_tensors:
                if isinstance(output, Tensor):
                    self._see(here, entry, call, "", output)
                else:
                    for part, tensor in unpack(output):
                        self._see(here, entry, call, part, tensor)
            observer = self._observer if here.observed else None
            if observer is not None and (observer.is_tracing or _is_observed(entry, here.phase, observer.looked_at)):
                observer.leave(entry, call, here.phase, args, output)
        if here.outermost == key or here.outermost is None:
            if here.recording and here.phase == "train":
                self._unused.add(key, output)
            self._end_pass(here, entry, call, kwargs)

    def _end_pass(self, here: _Pass, entry: WatchedModule, call: int, kwargs: dict[str, Any]) -> None:
        here.outermost = None
        here.outputs.end_pass()
        self._calls.widen()
        if not here.recording:
            return
        if self._observer is not None and here.observed:
            self._observer.end_pass(entry, call, kwargs, here.phase)
        self._after_pass(here.phase)

    def _see(self, here: _Pass, entry: WatchedModule, call: int, part: str, tensor: Tensor) -> None:
        try:
            version = tensor._version
        except RuntimeError:  # made in inference mode
            version = -1
        values = plain_values(tensor)
        last, last_version, last_site = here.outputs.last()
        if last is not None and last() is tensor and version == last_version != -1:
            self._site(entry, "output", here.phase, call, part, values, same_as=last_site)
            if not call and not part:
                mode = self._mode_left_to_c(entry.key, here.phase)
                here.outputs.know_passing(entry.key, _PHASES[here.phase], mode)
            return
        is_plain = values is tensor and not call and not part
        plain = self._plain_sites[here.phase] if is_plain else None
        site = None if plain is None else plain.get(entry.key)
        if site is None:
            site = self._site(entry, "output", here.phase, call, part, values)
            if plain is not None:
                plain[entry.key] = site
        here.outputs.set_last(weakref.ref(tensor), version, site)
        if self._outputs:
            self._recorder.see(site, values)
            if is_plain and here.outputs is self._outputs_in_c:
                self._leave_to_c(here, entry, site, tensor.device)
        if self._output_gradients and tensor.requires_grad:
            gradient_site = self._site(entry, "output_gradient", here.phase, call, part, values)
            on_gradient(tensor, self._gradient, gradient_site)

    def _leave_to_c(self, here: _Pass, entry: WatchedModule, site: int, device: torch.device) -> None:
        """Let C code take such outputs from now on, except those that the observer needs."""
        mode = self._mode_left_to_c(entry.key, here.phase)
        here.outputs.know(entry.key, _PHASES[here.phase], site, self._recorder.has_histogram(site), mode)
        self._recorder.open_outputs(here.outputs, device)

    def _mode_left_to_c(self, key: int, phase: Phase) -> int:
        """Return in which mode of a module the observer need not see its outputs."""
        observer = self._observer
        if observer is None or key not in observer.looked_at:
            return ANY_MODE
        wanted = observer.looked_at[key]
        return NO_MODE if wanted is None or phase == "eval" else int(wanted)

    def _see_gradient(self, site: int, grad: Tensor | None) -> None:
        if grad is not None:  # an operation may pass none on
            self._recorder.see(site, plain_values(grad))

    def _site(
        self,
        entry: WatchedModule,
        quantity: Quantity,
        phase: Phase,
        call: int,
        part: str,
        tensor: Tensor,
        same_as: int | None = None,
    ) -> int:
        key = (entry.key, quantity, phase, call, part)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._recorder.site(
                entry.name,
                quantity,
                phase=phase,
                call=call,
                part=part,
                kind=entry.kind,
                tensor=tensor,
                aliases=entry.aliases,
                same_as=same_as,
                held=self._holding(tensor, phase, (entry.key, call, part)),
            )
            if quantity == "output_gradient":
                self.gradient_sites.append(site)
        return site

    def _holding(self, tensor: Tensor, phase: Phase, where: tuple[int, int, str]) -> Holding:
        """Return what this rank holds of an output. In a pass without a graph it is what a training pass showed."""
        if self._roots is not None:
            found = map(data_of, self._roots) if is_connected() else iter(())
            self._data, self._roots = next((each for each in found if each is not WHOLE), WHOLE), None
        if self._data is WHOLE:
            return WHOLE
        if phase == "train" and where not in self._held:
            self._held[where] = holding_of_output(layouts_behind(tensor), self._data)
        return self._held.get(where, WHOLE)


def _is_observed(entry: WatchedModule, phase: Phase, looked_at: Mapping[int, bool | None]) -> bool:
    if entry.key not in looked_at:
        return False
    mode = looked_at[entry.key]
    return mode is None or phase == "eval" or entry.module.training is not mode


def watched_modules(models: dict[str, nn.Module], chosen: Selector, loss_fn: Any) -> list[WatchedModule]:
    """Return all modules of the models, and the loss if it is a module; `chosen` selects whose outputs are recorded."""
    roots = {id(root) for model in models.values() for root in (model, unwrap(model))}
    watched = [
        WatchedModule(
            module, name, type(module).__name__, aliases, chosen(name, type(module).__name__), id(module) in roots
        )
        for name, module, aliases in named_modules(models)
    ]
    if isinstance(loss_fn, nn.Module):
        watched.append(WatchedModule(loss_fn, "loss_fn", type(loss_fn).__name__, (), wanted=True, is_root=False))
    return watched
