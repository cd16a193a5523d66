"""All that a diagnosis needs from the training thread, wired together. See `sonde.vitals` and `sonde.facts`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from sonde import facts, vitals
from sonde.hooks.guard import Handle, remove_all
from sonde.hooks.on_backward import before_backward, on_accumulated
from sonde.hooks.torch_state import backward_id, is_capturing
from sonde.record.modules import WatchedModule
from sonde.record.optimizers import WatchedOptimizer
from sonde.record.pipeline import Watched
from sonde.records import Phase
from sonde.taps.belonging import Belonging
from sonde.taps.clipping import ClippingTap
from sonde.taps.dropping import DroppingTap
from sonde.taps.facts import FactBook
from sonde.taps.first_looks import FirstLooks
from sonde.taps.inputs import ModelInputs
from sonde.taps.leftovers import Leftovers, spread
from sonde.taps.loss_functions import LossCall
from sonde.taps.loss_signs import LossSigns
from sonde.taps.losses import LossTap
from sonde.taps.modes import ModeSigns, cares
from sonde.taps.moments import Moments
from sonde.taps.neighbours import Neighbours
from sonde.taps.passes import PassTrace
from sonde.taps.units import UnitSigns, is_attention, is_look, is_rectifier, is_squashing
from sonde.taps.vital_sites import VitalSites
from sonde.taps.weight_rows import WeightRows

# Rounds of the loop in which the order of modules is noted.
TRACED_ROUNDS: Final = 2


class VitalSigns:
    """Listens where the session's taps do and writes vital signs and facts.

    Every method that taps call is guarded: if one fails, the others go on. `is_due` says of a phase whether the present
    step is recorded; `state` takes an event.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched: Watched | None = watched
        self._scaler = watched.helpers.scaler
        self._guard = guard = watched.guard
        self._reach = watched.reach
        self._is_due = watched.is_due
        self._packer = watched.packer
        self._sites = VitalSites(watched.packer)
        self._owners: dict[int, tuple[str, Optimizer]] = {}
        self._sizes: dict[str, int] = {}
        self._book: FactBook | None = None
        self._prepared = False
        self._make_parts(watched)
        self._listen_to(watched.modules)
        self._rounds = 0
        self._looks = 0
        self._forwards = self._loose_forwards = 0
        self._passes = 0
        """How many backward passes had reached a parameter when the last step ended."""
        self._handles: list[Handle] = []
        self.is_tracing = True
        """Whether the order of modules is being noted."""
        self._trace: PassTrace | None = PassTrace()
        self._producers = self._trace.producers
        self.enter = guard.wrap("module order", self._enter)
        self.leave = guard.wrap("module signs", self._leave)
        self.begin_pass = guard.wrap("model inputs", self._begin_pass)
        self.end_pass = guard.wrap("model inputs", self._end_pass)
        self.before_step = guard.wrap("gradient signs", self._before_step)
        self.after_step = guard.wrap("gradient signs", self._after_step)
        self.end_step = guard.wrap("loop signs", self._end_step)
        self.end_unstepped = guard.wrap("the end of the run", self._end_unstepped)
        self._see_rows = guard.wrap("rows of weights", self._rows.see_spread)

    def _make_parts(self, watched: Watched) -> None:
        sites, guard = self._sites, self._guard
        self._leftovers = Leftovers(sites, self._reach)
        self._units = UnitSigns(sites)
        self._modes = ModeSigns(sites)
        self._rows = WeightRows(sites)
        self._moments = Moments(sites)
        self._neighbours = Neighbours(sites)
        self._first = FirstLooks(sites)
        self._read_graph = guard.wrap("the graph of the loss", self._first.before_backward)
        self._inputs = ModelInputs(sites, self._neighbours.see_input, self._see_tokens)
        self._loss_signs = LossSigns(sites)
        self._belonging = Belonging(watched.models.values())
        self._losses = LossTap(
            watched.packer,
            guard,
            outputs=not watched.records_loss,
            belonging=self._belonging,
            is_due=self._is_due,
            heard=self._heard_loss,
            stated=self._heard_facts,
        )
        self._dropping = DroppingTap(sites, guard, is_due=self._is_due)
        self._clipping = ClippingTap(
            sites,
            guard,
            scaler=self._scaler,
            owner_of=lambda parameter: self._owners.get(id(parameter)),
            is_due=lambda: self._is_due("train"),
            clipped=self._saw_clipping,
        )

    def _listen_to(self, modules: list[WatchedModule]) -> None:
        roots = [entry.name for entry in modules if entry.is_root]
        self._only_root = roots[0] if len(roots) == 1 else ""
        self._called_by_hand: set[int] = set()
        self._leaves: set[int] = set()
        self._unit_keys: set[int] = set()
        self.looked_at: dict[int, bool | None] = {}
        """Modules whose calls `leave` is to be told of, and in which mode they are known to be."""
        for entry in modules:
            module = entry.module
            if not any(True for _ in module.children()):
                self._leaves.add(id(module))
            if entry.is_root or (entry.wanted and cares(module)):
                self.looked_at[entry.key] = None
            elif entry.wanted and _has_units(module):
                self._unit_keys.add(entry.key)
        self.looked_at |= dict.fromkeys(self._unit_keys)

    # ------------------------------------------------------------------ beginning and end

    def _prepare(self) -> None:
        """Look at the objects as they are before any step, and state the facts. May wait for devices."""
        watched = self._watched
        if watched is None:
            return
        for name, optimizer in watched.optimizers:
            self._own(name, optimizer)
        self._book = FactBook(
            watched.models,
            watched.optimizers,
            loader=watched.helpers.loader,
            scheduler=watched.helpers.scheduler,
            scaler=self._scaler,
        )
        self._state_facts()
        ready = [entry.parameter for entry in watched.table if entry.is_ready()]
        self._first.prepare(self._book, watched.models, ready)
        for entry in watched.table:
            if entry.is_ready():
                self._rows.follow(entry.name, entry.parameter)

    def see_initial(self) -> None:
        """State the facts and write what belongs to the state before the first step."""
        self._prepare_once()
        self._see_rows(0)

    def attach(self) -> None:
        """Begin to listen."""
        self._prepare_once()
        self._listen_for_backward()
        self._losses.attach()
        self._clipping.attach()
        self._dropping.attach()
        self._handles.append(before_backward(self._guard.wrap("backward passes", self._before_backward)))

    def _prepare_once(self) -> None:
        if not self._prepared:
            self._prepared = True
            self._guard.wrap("facts", self._prepare)()

    def remove(self) -> None:
        """Stop listening and forget the models."""
        self.end_unstepped()
        remove_all(self._handles)
        self._losses.remove()
        self._clipping.remove()
        self._dropping.remove()
        self._leftovers.clear()
        self._rows.clear()
        self._moments.clear()
        self._owners.clear()
        # What remembers tensors is made anew: a closed session must not hold memory of a device.
        self._units, self._loss_signs = UnitSigns(self._sites), LossSigns(self._sites)
        self._neighbours = Neighbours(self._sites)
        self._inputs = ModelInputs(self._sites, self._neighbours.see_input, self._see_tokens)
        self._first.clear()
        self._book = None
        self._belonging.forget()
        self._watched = self._scaler = None

    def _listen_for_backward(self) -> None:
        groups: dict[str, list[Parameter]] = {}
        for entry in self._watched.table if self._watched is not None else ():
            if entry.is_ready() and entry.parameter.requires_grad:
                name, _ = self._owners.get(id(entry.parameter), ("", None))
                groups.setdefault(name, []).append(entry.parameter)
        for name, parameters in groups.items():
            self._reach.listen(name, parameters)
            for parameter in spread(parameters):
                heard = self._guard.wrap("gradient signs", self._leftovers.listener(parameter))
                self._handles.append(on_accumulated(parameter, heard))

    def _own(self, name: str, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._sizes[name] = len(parameters)
        self._owners |= {id(parameter): (name, optimizer) for parameter in parameters}
        self._reach.claim(name, parameters)

    def _state_facts(self) -> None:
        if self._book is not None and self._book.is_new:
            plain = self._book.take().to_json()
            self._packer.put_event(facts.EVENT_TYPE, "what the program's objects say about themselves", plain)

    # ------------------------------------------------------------------ passes

    def _begin_pass(self, entry: WatchedModule, call: int, args: tuple[Any, ...], phase: Phase, due: bool) -> None:
        if due and entry.is_root:
            self._inputs.see(entry.name, phase, call, args)
        elif due and not self._forwards:
            self._begin_loose(entry, call, args, phase)
        if entry.name != vitals.LOSS:
            self._belonging.saw_pass(phase)
        if phase == "train":
            self._forwards += entry.is_root
            self._loose_forwards += not entry.is_root

    def _begin_loose(self, entry: WatchedModule, call: int, args: tuple[Any, ...], phase: Phase) -> None:
        """Take a part of a model that is called by hand: the first is given what the model is, the last answers."""
        self._called_by_hand.add(id(entry.module))
        self.looked_at[entry.key] = None
        self._unit_keys.discard(entry.key)
        if phase == "train" and not self._loose_forwards and self._only_root:
            self._inputs.see(self._only_root, phase, call, args)

    def _end_pass(self, entry: WatchedModule, call: int, kwargs: dict[str, Any], phase: Phase) -> None:
        if entry.is_root and kwargs:
            self._inputs.see(entry.name, phase, call, kwargs)
        if self._trace is not None:
            self._trace.end_pass()

    def _enter(self, entry: WatchedModule, args: tuple[Any, ...]) -> None:
        if self._trace is not None and id(entry.module) in self._leaves:
            self._trace.enter(entry.name, entry.kind, args)
            self._first.enter()

    def _leave(self, entry: WatchedModule, call: int, phase: Phase, args: tuple[Any, ...], output: Any) -> None:
        module = entry.module
        if self._trace is not None and id(module) in self._leaves:
            self._first.leave(entry.name, module, args, output)
            if phase == "train":
                self._trace.leave(entry.name, output)
        if id(module) not in self.looked_at:
            return
        if phase == "train" and (entry.is_root or id(module) in self._called_by_hand):
            self._losses.keep_output(output)
        if entry.is_root or cares(module):
            self._see_mode(entry, phase)
        elif phase == "train" and _has_units(module):
            self._units.see(module, entry.name, call, args, output, self._producers.get(entry.name, ""))

    def _see_mode(self, entry: WatchedModule, phase: Phase) -> None:
        is_known = self._modes.see(entry.module, entry.name, phase, self._packer.step)
        if is_known and phase == "train" and not entry.is_root and entry.key not in self._called_by_hand:
            self.looked_at[entry.key] = entry.module.training

    # ------------------------------------------------------------------ losses and backward passes

    def _heard_facts(self, loss: facts.LossFacts) -> None:
        if self._book is not None:
            self._book.add_loss(loss)

    def _heard_loss(self, call: LossCall) -> None:
        self._loss_signs.see(call)
        self._neighbours.see_loss(call)
        self._first.see_loss(call)

    def _see_tokens(self, tokens: Tensor) -> None:
        self._neighbours.see_tokens(tokens)
        self._first.see_tokens(tokens)

    def _before_backward(self, roots: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        # A checkpoint that is recomputed runs a backward pass inside the one that counts.
        if backward_id() != -1 or is_capturing() or not any(map(self._belonging.owns, roots)):
            return
        self._reach.settle()
        self._leftovers.before_backward()
        scaler = self._scaler
        # A scaled loss is not the loss.
        self._read_graph(roots)
        self._losses.before_backward(() if scaler is not None and scaler.is_enabled() else roots)

    def _saw_clipping(self, parameters: Iterable[Tensor]) -> None:
        self._leftovers.saw_clipping(parameters)

    # ------------------------------------------------------------------ steps

    def _before_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        if self._sizes.get(watched.name) != watched.size:
            self._own(watched.name, watched.optimizer)
            if self._book is not None:
                self._book.add_optimizer(watched.name, watched.optimizer)
        if not has_closure:
            self._judge(watched, due)

    def _after_step(self, watched: WatchedOptimizer, has_closure: bool, due: bool) -> None:
        if has_closure:
            self._judge(watched, due)
        self._leftovers.remember(watched.name)
        if due:
            parameters = [entry.parameter for entry in watched.entries]
            self._moments.see(watched.name, watched.optimizer, parameters)
            self._see_rows(watched.steps, parameters)

    def _judge(self, watched: WatchedOptimizer, due: bool) -> None:
        parameters = [entry.parameter for entry in watched.entries]
        self._reach.settle()
        self._leftovers.judge(watched.name, parameters, due=due)
        if due:
            self._rows.see_gradients(watched.steps, parameters)

    def _end_step(self) -> None:
        due = self._is_due("train")
        self._reach.settle()
        if due:
            # A model whose parts are called by hand has no pass of its own.
            self._sites.put(vitals.LOOP, vitals.FORWARDS, self._forwards or self._loose_forwards)
            self._sites.put(vitals.LOOP, vitals.BACKWARDS, self._reach.passes - self._passes)
            self._units.end_step()
            self._choose_units()
            self._end_round()
        self._forwards = self._loose_forwards = 0
        self._passes = self._reach.passes
        self._losses.end_step()
        self._belonging.end_step()
        self._first.end_step()
        self._state_facts()

    def _choose_units(self) -> None:
        """Look at units in the next step, or do not."""
        self._looks += 1
        if is_look(self._looks + 1):
            self.looked_at |= dict.fromkeys(self._unit_keys)
        else:
            for key in self._unit_keys:
                self.looked_at.pop(key, None)

    def _end_unstepped(self) -> None:
        """Write what is known of a run that ends without any step."""
        if (self._forwards or self._loose_forwards) and self._first.has_never_stepped():
            self._first.write_written()
            self._end_step()

    def _end_round(self) -> None:
        if self._trace is None:
            return
        self._rounds += 1
        if self._trace.order and self._book is not None:
            self._book.add_passes(self._trace)
        if self._rounds >= TRACED_ROUNDS * max(1, len(self._sizes)):
            self.is_tracing = False
            self._trace = None


def _has_units(module: nn.Module) -> bool:
    """Say whether the outputs of a module are looked at unit by unit."""
    return is_rectifier(module) or is_squashing(module) or is_attention(module)
