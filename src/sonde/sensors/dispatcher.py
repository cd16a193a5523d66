"""Call sensors at the moments of a training that they listen to. See `sonde.core.signals` and `sonde.core.facts`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from sonde.core import facts
from sonde.core.signals import LOSS
from sonde.hooks.guard import Guarded, Handle, backward_id, is_capturing, remove_all
from sonde.hooks.on_backward import before_backward, what_is_differentiated
from sonde.hooks.replace_function import BACKWARD, OverridableFunction
from sonde.hooks.unpack import unpack
from sonde.record.extensions import Watched
from sonde.record.kinds import parameters_of
from sonde.record.modules import WatchedModule
from sonde.record.optimizers import WatchedOptimizer
from sonde.record.plan import Helpers
from sonde.records import Phase
from sonde.sensors.catalogue import SENSORS
from sonde.sensors.data import distinct, marks_of
from sonde.sensors.facts import FactBook
from sonde.sensors.graph import Spans
from sonde.sensors.loss_calls import Belonging, LossCalls
from sonde.sensors.loss_functions import LossCall
from sonde.sensors.sensor import Backward, Clip, Context, Graph, PassInputs, Sensor, Signals, Step, StepEnd
from sonde.sensors.step_loss import StepLoss
from sonde.sensors.targets import entropy_of, spread_of, tally
from sonde.sensors.tensors import is_plain

# What `clip_grad_norm_` calls once it knows the norm. Where a version of torch lacks it, clipping is not seen.
_CLIPPING: Final = OverridableFunction(clip_grad, "_clip_grads_with_norm_")
_CLIP_ARGUMENTS: Final = ("parameters", "max_norm", "total_norm")


class Sensors:
    """Attaches the sensors that someone wants. Each is guarded by itself: if one fails, the others go on.

    `wanted` holds signals, quantities and facts (as `facts.name`); None attaches every sensor.
    """

    def __init__(self, watched: Watched, wanted: Set[str] | None = None) -> None:
        self.looked_at: dict[int, bool | None] = {}
        """Keys of modules whose calls are reported; with a mode, training calls made in that mode are left out."""
        self._watched = watched
        self._guard = watched.guard
        self._book = FactBook()
        self._context = Context(watched, Signals(watched.packer), self._book, {}, {}, self.looked_at, set())
        self._sensors: list[Sensor] = [
            kind(self._context) for kind in SENSORS if wanted is None or not wanted.isdisjoint(kind.produces)
        ]
        self._belonging = Belonging(watched.models.values())
        self._losses = LossCalls(
            watched.packer,
            self._guard,
            outputs=not watched.records_loss,
            belonging=self._belonging,
            is_due=watched.is_due,
            is_skipped=watched.is_skipped,
            on_loss=self._on_loss,
            on_facts=self._book.add_loss,
        )
        self._step_loss = StepLoss(
            watched.packer,
            self._guard,
            watched.helpers.scaler,
            num_optimizers=len(watched.optimizers),
            num_models=len(watched.models),
        )
        self._has_others = False
        """Whether a backward pass of another model has been seen."""
        self.has_backward = False
        """Whether a backward pass has begun in the present step."""
        self._spans: Spans | None = Spans()
        self._sizes: dict[str, tuple[int, int]] = {}
        self._forwards = self._forwards_by_hand = self._passes_before = 0
        self._steps_traced = self._looks = 0
        self._missed: set[str] = set()
        """Optimizers whose last step was skipped: their next one has nothing to be compared with."""
        self._is_prepared = self._is_paused = False
        self._process = os.getpid()
        self._handles: list[Handle] = []
        self._keep_output = self._guard.wrap("losses", self._see_output)
        self._choose_moments()
        self._choose_modules(watched.modules)
        traced = ("on_traced_enter", "on_traced_call")
        self._tracing = [each for each in self._sensors if any(_overrides(each, moment) for moment in traced)]
        self.is_tracing = bool(self._tracing) or any(_overrides(each, "on_graph") for each in self._sensors)
        """Whether all leaf modules are looked at, in the first rounds of the loop."""
        wrap = self._guard.wrap
        self.begin_pass = wrap("model inputs", self._begin_pass)
        self.end_pass = wrap("model inputs", self._end_pass)
        self.before_step = wrap("optimizer facts", self._before_step)
        self.after_step = wrap("optimizer facts", self._after_step)
        self.end_step = wrap("the end of a step", self._end_step)
        self._state = wrap("facts", self._state_facts)

    # ------------------------------------------------------------------ which sensor gets which callback

    def _choose_moments(self) -> None:
        self._on_pass = self._all("on_pass")
        self._on_tokens = self._all("on_tokens")
        self._wants_tokens = any(_overrides(each, "on_tokens") for each in self._sensors)
        self._on_enter = self._all("on_traced_enter")
        self._on_traced = self._all("on_traced_call")
        self._on_pass_end = self._all("on_pass_end")
        self._on_forgotten = self._all("on_forgotten")
        self._on_losses = self._all("on_loss")
        self._on_backward = self._all("on_backward")
        self._on_graph = self._all("on_graph")
        self._on_clip = self._all("on_clip")
        self._on_gradients = self._all("on_gradients")
        self._on_step = self._all("on_step")
        self._on_step_end = self._all("on_step_end")
        self._pause = self._all("pause")

    def _all(self, moment: str) -> Guarded:
        """Return what calls the sensors that listen to a moment, each guarded by itself."""
        chosen = [each for each in self._sensors if _overrides(each, moment)]
        return self._guard.wrap_all([(type(each).__name__, getattr(each, moment)) for each in chosen])

    def _choose_modules(self, modules: list[WatchedModule]) -> None:
        roots = [entry.name for entry in modules if entry.is_root]
        self._only_root = roots[0] if len(roots) == 1 else ""
        self._leaves = {entry.key for entry in modules if next(entry.module.children(), None) is None}
        self._calls: dict[int, tuple[Guarded, ...]] = {}
        self._sampled: list[tuple[Sensor, set[int]]] = []
        """Sensors that look at modules in some steps only, and those modules."""
        for entry in modules:
            if entry.is_root:
                self._keep_outputs_of(entry.key)
        for sensor in (each for each in self._sensors if _overrides(each, "on_call")):
            on_call = self._guard.wrap(type(sensor).__name__, sensor.on_call)
            keys = {each.key for each in modules if (each.wanted or each.is_root) and sensor.looks_at(each)}
            for key in keys:
                self._calls[key] = (*self._calls.get(key, ()), on_call)
            self.looked_at |= dict.fromkeys(keys)
            if type(sensor).samples_steps:
                self._sampled.append((sensor, keys))

    def _keep_outputs_of(self, key: int) -> None:
        """Report what a module returns to those who read losses that are written by hand."""
        self.looked_at[key] = None
        self._calls[key] = (*self._calls.get(key, ()), self._keep_output)

    # ------------------------------------------------------------------ beginning and end

    def see_initial(self) -> None:
        """State the facts and write what belongs to the state before the first step."""
        self._prepare()
        self._all("on_initial")()

    def attach(self) -> None:
        """Start listening."""
        watched = self._watched
        self._prepare()
        groups: dict[str, list[Tensor]] = {}
        for _, parameter in self._context.module_parameters():
            groups.setdefault(self._context.owners.get(id(parameter), ("", 0))[0], []).append(parameter)
        for name, parameters in groups.items():
            watched.reach.listen(name, parameters)
        for sensor in self._sensors:
            self._guard.wrap(type(sensor).__name__, lambda each: self._handles.extend(each.listen()))(sensor)
        self._losses.attach()
        self._handles.append(self._losses)
        if _CLIPPING.exists and any(_overrides(each, "on_clip") for each in self._sensors):
            see = self._guard.wrap("gradient clipping", self._see_clipping)
            self._handles.append(_CLIPPING.listen(after=see, during="awake"))
        self._handles.append(self._step_loss.listen())
        wrap = self._guard.wrap
        self._handles += [
            before_backward(wrap("backward passes", self._before_backward), during="awake"),
            BACKWARD.listen(before=wrap("backward passes", self._before_backward_asleep), during="asleep"),
        ]

    def _prepare(self) -> None:
        if not self._is_prepared:
            self._is_prepared = True
            devices = {parameter.device for _, parameter in self._context.module_parameters()}
            for device in (each for each in devices if each.type == "cuda"):
                self._guard.wrap("loading operations", load_operations)(device)
            self._guard.wrap("facts", self._gather)()
            self._all("start")()
            self._state()

    def _gather(self) -> None:
        for name, optimizer in self._watched.optimizers:
            self._own(name, optimizer)
        self._book.gather(self._watched)
        # A program may replace its optimizer, which shows if nothing here holds it.
        self._watched = self._context.watched = replace(self._watched, optimizers=[])

    def remove(self) -> None:
        """Stop listening, and forget the models and everything measured of them."""
        forwards = self._forwards or self._forwards_by_hand
        if forwards and not self._context.steps and os.getpid() == self._process:
            self._all("on_close")(self._step_end(due=True))
            self.end_step()
        if os.getpid() == self._process:
            self._all("on_end")()
        remove_all(self._handles)
        self._sensors = []
        self._calls, self._sampled, self._tracing, self._spans = {}, [], [], None
        self._choose_moments()
        self._context.owners.clear()
        self._belonging.forget()
        # A closed session must hold neither the models nor memory of a device.
        self._watched = self._context.watched = replace(
            self._watched, models={}, modules=[], optimizers=[], helpers=Helpers()
        )

    def pause(self, paused: bool) -> None:
        """Pause what the sensors listen to by themselves, in steps that are skipped, or resume it."""
        paused = paused and len(self._sizes) < 2  # see `_is_step_skipped`
        if paused is not self._is_paused:
            self._is_paused = paused
            self._pause(paused)

    def _own(self, name: str, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        self._sizes.setdefault(name, (0, 0))
        self._context.owners |= {id(parameter): (name, id(optimizer)) for parameter in parameters}
        self._watched.reach.claim(name, parameters)

    def _state_facts(self) -> None:
        if self._book.is_new:
            plain = self._book.take().to_json()
            self._watched.packer.put_event(facts.EVENT_TYPE, "what the program's objects say about themselves", plain)

    # ------------------------------------------------------------------ passes

    def _begin_pass(self, entry: WatchedModule, call: int, args: tuple[Any, ...], phase: Phase, due: bool) -> None:
        if self._watched.is_skipped() and phase == "train":
            return
        if due and entry.is_root:
            self._give(entry.name, phase, call, args)
        elif due and not self._forwards:
            self._begin_by_hand(entry, call, args, phase)
        if entry.name != LOSS:
            self._belonging.saw_pass(phase)
        if phase == "train":
            self._forwards += entry.is_root
            self._forwards_by_hand += not entry.is_root

    def _begin_by_hand(self, entry: WatchedModule, call: int, args: tuple[Any, ...], phase: Phase) -> None:
        """Take a part of a model that is called by itself: the first is given what the model is, the last answers."""
        if entry.key not in self._context.by_hand:
            self._context.by_hand.add(entry.key)
            self._keep_outputs_of(entry.key)
            for _, keys in self._sampled:
                keys.discard(entry.key)
        if phase == "train" and not self._forwards_by_hand and self._only_root:
            self._give(self._only_root, phase, call, args)

    def _give(self, model: str, phase: Phase, call: int, inputs: tuple[Any, ...] | Mapping[str, Any]) -> None:
        given = [(part, tensor) for part, tensor in unpack(inputs) if is_plain(tensor)]
        passed = PassInputs(model, phase, call, given)
        self._on_pass(passed)
        if self._wants_tokens and passed.is_first and passed.tokens is not None:
            self._on_tokens(passed.tokens)

    def enter(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        """Handle the arguments of a module in a training pass, while all modules are traced."""
        if entry.key in self._leaves:
            self._on_enter(entry, args)
            if self._spans is not None:
                self._spans.enter()

    def leave(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        """Handle the arguments and the output of a module."""
        if self.is_tracing and entry.key in self._leaves:
            self._on_traced(entry, phase, args, output)
            if self._spans is not None:
                self._spans.leave(entry.name)
        if entry.key in self.looked_at:
            for each in self._calls.get(entry.key, ()):
                each(entry, call, phase, args, output)

    def _see_output(self, entry: WatchedModule, call: int, phase: Phase, args: Any, output: Any) -> None:
        if phase == "train":
            self._losses.keep_output(output)
            self._step_loss.keep_output(output)

    def _end_pass(self, entry: WatchedModule, call: int, kwargs: dict[str, Any], phase: Phase) -> None:
        if entry.is_root and kwargs:
            self._give(entry.name, phase, call, kwargs)
        if self.is_tracing:
            self._on_pass_end()

    def forget_passes(self) -> None:
        """Forget the passes of the present step: nothing came of them."""
        self._begin_count()
        self._on_forgotten()

    # ------------------------------------------------------------------ losses and backward passes

    @property
    def has_loss(self) -> bool:
        """Whether a loss was computed in the present step."""
        return self._losses.seen_in_step

    def _on_loss(self, call: LossCall) -> None:
        self._on_losses(call)

    def _see_clipping(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = dict(zip(_CLIP_ARGUMENTS, args, strict=False)) | kwargs
        parameters = given.get("parameters")
        parameters = [parameters] if isinstance(parameters, Tensor) else parameters
        # A generator has been used up by the call itself.
        if isinstance(parameters, list | tuple) and not is_capturing():
            clip = Clip(parameters, given.get("total_norm"), given.get("max_norm"))
            self._on_clip(clip)

    def _before_backward(self, roots: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        # A checkpoint that is recomputed runs a backward pass inside the one that counts.
        if backward_id() != -1 or is_capturing():
            return
        self.has_backward = True
        is_skipped, is_scaled = self._watched.is_skipped(), self._step_loss.is_scaled
        # In a skipped step it is not looked up whose loss this is.
        is_ours = not self._has_others if is_skipped else any(map(self._belonging.owns, roots))
        self._has_others |= not is_ours
        if is_ours:
            self._step_loss.before_backward(roots, gradients)
        if is_skipped or not is_ours:
            return
        self._watched.reach.settle()
        backward = Backward(roots, is_scaled)
        self._on_backward(backward)
        if self._spans is not None and len(roots) == 1:
            graph, self._spans = Graph(roots[0], self._spans.module_of), None
            self._on_graph(graph)
        self._losses.before_backward(() if is_scaled else roots)  # a scaled loss is not the loss

    def _before_backward_asleep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.has_backward = True
        if self._step_loss.is_wanted and not self._has_others and backward_id() == -1:
            roots, gradients = what_is_differentiated(args, kwargs)
            if roots:
                self._step_loss.before_backward_asleep(roots, gradients)

    # ------------------------------------------------------------------ steps

    def _before_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        if self._is_step_skipped():
            self._missed.add(watched.name)
            return
        self._know(watched)
        if not has_closure:
            self._look_at_gradients(Step(watched, due=due and watched.name not in self._missed))

    def _after_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        self._step_loss.end_pass_of(watched.name)
        if self._is_step_skipped():
            return
        self._know(watched)
        step = Step(watched, due=due and watched.name not in self._missed)
        self._missed.discard(watched.name)
        if has_closure:
            self._look_at_gradients(step)
        self._on_step(step)

    def _know(self, watched: WatchedOptimizer) -> None:
        """Take an optimizer that is new, has other parameters, or has replaced another of the same name."""
        if self._sizes.get(watched.name) != (id(watched), watched.size):
            self._own(watched.name, watched.optimizer)
            self._sizes[watched.name] = (id(watched), watched.size)
            self._book.add_optimizer(watched.name, watched.optimizer)

    def drop(self, name: str) -> None:
        """Forget an optimizer that does not step its parameters."""
        self._sizes.pop(name, None)
        self._book.drop_optimizer(name)

    def continue_step(self) -> None:
        """Handle an optimizer step that does not end the iteration: another optimizer is expected to step."""
        self._losses.continue_step()

    def end_dozed_step(self) -> None:
        """Handle the end of a step that is only counted."""
        self._step_loss.end_dozed_step()

    def _is_step_skipped(self) -> bool:
        # With several optimizers the last step of one may be many rounds back, so each is followed.
        return self._watched.is_skipped() and len(self._sizes) < 2

    def _look_at_gradients(self, step: Step) -> None:
        self._watched.reach.settle()
        self._on_gradients(step)

    def _end_step(self) -> None:
        self._watched.reach.settle()
        self._context.steps += 1
        due = self._watched.is_due("train")
        end = self._step_end(due=due)
        self._on_step_end(end)
        if due:
            self._choose_samples()
            self._end_round()
        self._begin_count()
        self._passes_before = self._watched.reach.passes
        if self._context.finished:
            self._sensors = [each for each in self._sensors if each not in self._context.finished]
            self._context.finished.clear()
            self._choose_moments()
        self._state()

    def _begin_count(self) -> None:
        self.has_backward = False
        self._forwards = self._forwards_by_hand = 0
        self._losses.end_step()
        self._belonging.end_step()

    def _step_end(self, *, due: bool) -> StepEnd:
        # A model whose parts are called by hand has no pass of its own.
        backwards = self._watched.reach.passes - self._passes_before
        return StepEnd(due, self._forwards or self._forwards_by_hand, backwards)

    def _choose_samples(self) -> None:
        """Look at sampled modules in the next step, or do not."""
        self._looks += 1
        for sensor, keys in self._sampled:
            if sensor.when(self._looks + 1):
                self.looked_at |= dict.fromkeys(keys)
            else:
                for key in keys:
                    self.looked_at.pop(key, None)

    def _end_round(self) -> None:
        if self.is_tracing:
            self._steps_traced += 1
            self.is_tracing = any(each.when(self._steps_traced) for each in self._tracing)


@torch.no_grad()
def load_operations(device: torch.device) -> None:
    """Compute once, on a few numbers, what sensors compute: CUDA loads the code of each operation at its first use.

    That takes up to 100 ms for some, which would be taken from the first step of the training.
    """
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.ones(4, 4, device=device, dtype=dtype)
        labels = values.argmax(1)
        wide = values.float()
        distinct(marks_of(values))
        distinct(marks_of(labels[:, None].expand(4, 4)))
        entropy_of(tally(labels, 2).double())
        entropy_of(tally(wide.argmax(1), 2))
        spread_of(values)
        torch.stack([wide.logsumexp(1), wide.amin(1), wide.sum(0), wide.std(0), (wide == 0).float().mean(1)])
        torch.linalg.vector_norm(values, math.inf, dim=1).ne(0)
        values.amax([0]).gt(0).logical_or(values.abs().gt(1).any(0))
        labels.where(labels.ne(-100), -1)[1:].eq(labels[:-1]).float().mean()


def _overrides(sensor: Sensor, moment: str) -> bool:
    return getattr(type(sensor), moment) is not getattr(Sensor, moment)
