"""Find the models and optimizers of an unmodified program, and watch them: `sonde run`.

Optimizers are found as they are made. The first call of a module that holds one of their parameters, or a step, starts
the recording before it runs, so that the first step is recorded whole. Without a torch optimizer the recording starts
after the first update of weights.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sonde.core import files
from sonde.core.forks import after_fork_in_child
from sonde.errors import SondeError
from sonde.hooks.guard import Guard, Handle, backward_id, is_capturing, remove_all, warn_of_fault
from sonde.hooks.names import unwrap
from sonde.hooks.replace_function import MODULE_CALL, NEW_OPTIMIZER, ReplacedFunction
from sonde.integrations.updates_by_hand import UpdatesByHand
from sonde.parallel.ranks import this_rank
from sonde.record.kinds import steps_counted

if TYPE_CHECKING:
    from sonde.session import Session

logger = logging.getLogger("sonde")

MOST_RUNS: Final = 16
"""Trainings of one program that are recorded, each in a run of its own."""


@dataclass(slots=True)
class _Training:
    """A session that was started here."""

    session: Session
    steps_before: int = 0
    """How many steps the training had taken before, by its optimizer's own count or the run's."""
    steps_then: int = 0
    """Its step when another training began."""


@dataclass(slots=True)
class _Alive:
    """Objects of the process that matter to a training."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)


class Discovery:
    """Watches whatever trains in this process, from `install` to `finish`.

    Args:
        place: The folder of the run. A star becomes a number; further trainings of the program get a number too.
        options: Options of `sonde.watch`.
        on_start: Called when the first recording starts.
        is_ours: Returns whether an optimizer belongs to what is to be recorded.

    """

    def __init__(
        self,
        place: str,
        options: Mapping[str, Any],
        on_start: Callable[[], None] = lambda: None,
        is_ours: Callable[[Optimizer], bool] = lambda optimizer: True,
    ) -> None:
        self._place = place
        self._options = dict(options)
        self._on_start = on_start
        self._is_ours = is_ours
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._made = 0
        self._is_watched_already = False
        self._is_first_rank = False
        self._trainings: list[_Training] = []
        self._problem = ""
        self._guard = Guard("isolate", warn_of_fault)
        self._making: list[Handle] = []
        self._waiting: list[Handle] = []
        self._by_hand = UpdatesByHand(self._guard, self._find_updated_by_hand, self._start_by_hand)

    @property
    def session(self) -> Session | None:
        """The session of the training that began last."""
        return self._trainings[-1].session if self._trainings else None

    def set_option(self, name: str, value: Any) -> None:
        """Set an option of `sonde.watch` for trainings that have yet to begin, unless it was given."""
        self._options.setdefault(name, value)

    def install(self, *, existing: bool = False) -> None:
        """Start looking; `existing` has optimizers found that were made before."""
        self._making = [NEW_OPTIMIZER.listen(after=self._guard.wrap("finding optimizers", self._take_optimizer))]
        self._by_hand.listen()
        after_fork_in_child(self.remove)
        if existing:
            gc.collect()  # optimizers of trainings that are over often wait in cycles to be collected
            for optimizer in _find_alive().optimizers:
                self._await(optimizer)

    def finish(self, error: BaseException | None = None) -> str:
        """Close the recordings and print what was found; return why there is none.

        `error` is what ended the program.
        """
        self.remove()
        for training in self._trainings:
            if error is not None and not training.session.is_closed:
                training.session._note_exception(error)
            training.session.close()
        if self._is_first_rank:
            self._print_findings()
        return "" if self._trainings or this_rank() else self._why_not()

    def remove(self) -> None:
        """Stop looking; recordings go on."""
        remove_all(self._making)
        remove_all(self._waiting)
        self._by_hand.remove()

    # ------------------------------------------------------------------ finding

    def _take_optimizer(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        optimizer = args[0] if args else kwargs.get("self")
        if isinstance(optimizer, Optimizer):
            self._await(optimizer)

    def _await(self, optimizer: Optimizer) -> None:
        """Wait for a call of a module with parameters of this optimizer."""
        self._made += 1
        self._optimizers.append(weakref.ref(optimizer))
        if not self._waiting:
            self._waiting = [MODULE_CALL.listen(before=self._guard.wrap("finding models", self._take_call))]
        # A step that is given a closure runs the model inside: then the recording has to start before the step.
        step = ReplacedFunction(type(optimizer), "step")
        self._waiting.append(step.listen(before=self._guard.wrap("finding models", self._take_step)))

    def _take_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = args[0] if args else None
        if isinstance(module, nn.Module) and backward_id() == -1 and not is_capturing():
            called = _ids(module)
            optimizers, wanted = self._wanted(called)
            if not wanted.isdisjoint(called):
                self._start(module, optimizers, wanted)

    def _take_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizers, wanted = self._wanted(_parameters([args[0]]))
        if any(each is args[0] for each in optimizers) and not is_capturing():
            self._start(None, optimizers, wanted)

    def _wanted(self, used: set[int]) -> tuple[list[Optimizer], set[int]]:
        """Return the optimizers that wait for their models, and their parameters that no session watches.

        Optimizers of an earlier training, whose session is closed, count only if their parameters are used now.
        """
        optimizers = [each for ref in self._optimizers if (each := ref()) is not None and self._is_ours(each)]
        over = _of_models(_watched_models(closed=True))
        if over:
            optimizers = [o for o in optimizers if over.isdisjoint(p := _parameters([o])) or not used.isdisjoint(p)]
        wanted = _unwatched(_parameters(optimizers))
        if optimizers and not wanted:
            self._is_watched_already = True
            self._rest()
        return optimizers, wanted

    def _find_updated_by_hand(self) -> list[nn.Parameter] | None:
        """Return the parameters that have a gradient, if no torch optimizer was made."""
        if self._made:
            return None
        watched = _of_models(_watched_models())
        found = {id(each): each for module in _find_alive().modules for each in module._parameters.values()}
        return [
            each for key, each in found.items() if each is not None and each.grad is not None and key not in watched
        ]

    def _start_by_hand(self, called: nn.Module, parameters: set[int]) -> None:
        if self._made:
            return
        num_before = len(self._trainings)
        self._start(called, [], parameters)
        if len(self._trainings) > num_before:
            self._trainings[-1].session._skip_to(1)  # the first update was made before

    def _rest(self) -> None:
        """Stop listening to calls until another optimizer is made."""
        remove_all(self._waiting)
        self._optimizers.clear()

    def _start(self, called: nn.Module | None, optimizers: list[Optimizer], wanted: set[int]) -> None:
        self._rest()
        if len(self._trainings) == MOST_RUNS:
            self._problem = f"after {MOST_RUNS} trainings, others were not recorded"
            return
        self._close_idle()
        alive = _find_alive()
        models = _choose_models(called, wanted, alive.modules)
        if not models:
            return  # what is optimized is not part of a module
        held = {id(parameter) for model in models for parameter in model.parameters()}
        chosen = [each for each in optimizers if not held.isdisjoint(_parameters([each]))]
        named = {"": models[0]} if len(models) == 1 else _named(models, sys._getframe())
        try:
            with torch.inference_mode(False):  # copies of parameters must be ordinary tensors
                self._watch(named, chosen, alive)
        except (SondeError, OSError) as error:  # the user's options, or a folder that cannot be written
            self._problem = str(error)
            logger.warning("this training is not recorded: %s", error)

    def _watch(self, models: dict[str, nn.Module], optimizers: list[Optimizer], alive: _Alive) -> None:
        # Imported late: the program may be importing Sonde itself while this module is loaded.
        from sonde.watching import watch

        chosen = set(map(id, optimizers))
        schedulers = [each for each in alive.schedulers if id(each.optimizer) in chosen]
        scalers = [each for each in alive.scalers if each.is_enabled()]
        session = watch(
            models if len(models) > 1 else models[""],
            optimizers,
            run=self._next_place(),
            scheduler=schedulers[0] if len(schedulers) == 1 else None,
            scaler=scalers[0] if len(scalers) == 1 else None,
            **self._options,
        )
        session.is_automatic = True
        # A script that continues from a checkpoint in a new run counts on; a run that is resumed knows its step itself.
        steps = session.current_step - 1
        if steps < 0:
            steps = int(steps_counted(optimizers[0]) or 0) if optimizers else 0
            session._skip_to(steps)
        self._trainings.append(_Training(session, steps))
        self._is_first_rank = this_rank() == 0  # later the process group may be gone
        if len(self._trainings) == 1:
            self._on_start()

    def _close_idle(self) -> None:
        """Close recordings that have not gone on since the last training began: they keep their models in memory."""
        for training in self._trainings:
            step = training.session.current_step
            if step == training.steps_then and step > training.steps_before:
                training.session.close()
            training.steps_then = step

    def _next_place(self) -> str:
        number = len(self._trainings) + 1
        return self._place if number == 1 or "*" in self._place else f"{self._place}-{number}"

    # ------------------------------------------------------------------ telling

    def _print_findings(self) -> None:
        from sonde.views.terminal.findings import finding_card
        from sonde.views.terminal.style import Look, make_console, plural

        console = make_console(stderr=True)
        look = Look.of(console)
        for training in self._trainings:
            session = training.session
            grave = [each for each in session.findings if each.severity != "info"]
            found = plural(len(grave), "finding") if grave else "no findings"
            steps = plural(session.current_step - training.steps_before, "step")
            after = f" after step {training.steps_before}" if training.steps_before else ""
            _print(f"sonde: {steps} recorded in {files.short(session.path)}{after}, {found}")
            for finding in grave:
                console.print(finding_card(finding, look))
            _print(f"Run: sonde diagnose {files.short(session.path)}")
        if self._problem:
            _print(f"sonde: {self._problem}")

    def _why_not(self) -> str:
        if self._problem:
            return self._problem
        if self._is_watched_already:
            return "it has a session of its own"
        if not self._made:
            return "no torch optimizer was made, and no module's weights changed after a backward pass"
        return "no module that holds an optimizer's parameters was called"


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _parameters(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}


def _watched_models(*, closed: bool = False) -> Iterator[nn.Module]:
    watching = sys.modules.get("sonde.watching")
    return iter(()) if watching is None else watching.watched_models(closed=closed)


def _of_models(models: Iterable[nn.Module]) -> set[int]:
    return {id(each) for model in models for each in model.parameters()}


def _unwatched(parameters: set[int]) -> set[int]:
    return parameters - _of_models(_watched_models())


def _find_alive() -> _Alive:
    alive = _Alive()
    kinds: tuple[tuple[type, list[Any]], ...] = (
        (nn.Module, alive.modules),
        (Optimizer, alive.optimizers),
        (LRScheduler, alive.schedulers),
        (torch.amp.GradScaler, alive.scalers),
    )
    for each in gc.get_objects():
        bases = type(each).__mro__  # `isinstance` would run code of lazy objects
        for kind, found in kinds:
            if kind in bases:
                found.append(each)
    return alive


def _choose_models(called: nn.Module | None, wanted: set[int], modules: list[nn.Module]) -> list[nn.Module]:
    """Return the module that was called if it holds all wanted parameters, else the outermost ones that hold them."""
    if called is not None and wanted <= _ids(called):
        return [called]
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = {id(module): _ids(module) & wanted for module in modules if id(module) not in inner}
    outermost = sorted(
        (module for module in modules if roots.get(id(module))),
        key=lambda module: (-len(roots[id(module)]), sum(1 for _ in module.modules())),
    )
    chosen: list[nn.Module] = []
    missing = set(wanted)
    for module in outermost:
        if missing & roots[id(module)]:
            missing -= roots[id(module)]
            chosen.append(module)
    return chosen or ([] if called is None else [called])


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _named(models: list[nn.Module], frame: FrameType | None) -> dict[str, nn.Module]:
    """Return the models by the names of the program's variables or attributes that hold them, or by their classes."""
    names: dict[int, str] = {}
    wanted = {id(each): id(model) for model in models for each in (model, unwrap(model))}
    for variables in _scopes(frame):
        for name, value in variables.items():
            key = wanted.get(id(value))
            if key is not None and name.isidentifier() and not name.startswith("_") and name != "self":
                names.setdefault(key, name)
    named: dict[str, nn.Module] = {}
    for model in models:
        name = base = names.get(id(model), type(unwrap(model)).__name__.lower())
        number = 1
        while name in named:
            number += 1
            name = f"{base}{number}"
        named[name] = model
    return named


def _scopes(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the variables of the program: those of `__main__`, of its functions from outside in, and attributes."""
    yield dict(vars(sys.modules["__main__"]))
    frames = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("sonde", "torch"):
            frames.append(dict(frame.f_locals))
        frame = frame.f_back
    frames.reverse()
    yield from frames
    for variables in frames:
        for value in variables.values():
            attributes = getattr(type(value), "__dict__", None) and getattr(value, "__dict__", None)
            if type(attributes) is dict and not isinstance(value, Tensor | type):
                yield dict(attributes)
