"""Decide which steps are taped, and note what happens in them beside operations.

A tape runs from the end of one round of the loop to the end of the next: it is begun and ended by the hook that tells
the end of a step. All other hooks are there for that round alone.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence, ValuesView
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import default_collate, default_convert

from sonde.core import tape as tapes
from sonde.core.collector import fewer_collections, uncollected
from sonde.core.tape import GroupInfo, Mark, MarkKind, ModuleInfo, OptimizerInfo, Reason, Tape
from sonde.forensics.tape.finish import Notes, write_tape
from sonde.forensics.tape.operations import MAX_OUTPUT, MAX_VALUES_BYTES, PART, Earlier, Known, Operations, pack_plain
from sonde.forensics.tape.unread import unread_arguments
from sonde.hooks.guard import Guard, Guarded, Handle, backward_id, is_capturing, remove_all
from sonde.hooks.names import is_compiled_wrapper, named_modules, named_parameters, unwrap
from sonde.hooks.on_call import ModuleCalls
from sonde.hooks.on_operation import OperationObserver
from sonde.hooks.on_step import on_step
from sonde.hooks.replace_function import BACKWARD, LOADING, ReplacedFunction
from sonde.hooks.unpack import unpack
from sonde.record.extensions import Watched
from sonde.records import Block, Event, Finding, Numbers, Site
from sonde.version import VERSION

EARLY: Final = (2, 3, 20)
"""Rounds that are taped in every run, or as soon after as can be afforded. In the first, optimizers make their state.
The second and third follow each other, which shows what is carried over from step to step."""
MAX_SUSPECTED: Final = 2
"""Rounds that are taped because a finding has come up."""
MAX_TURNS: Final = 2
"""Rounds that are taped because an optimizer steps in them that has not stepped on a tape."""
MAX_OPTIMIZERS: Final = 64
"""Optimizers whose turns are followed."""
MAX_ASKED: Final = 32
SECONDS_PER_MODULE: Final = 0.0012
"""What a tape is taken to cost before the first one: about ten operations a module, 120 us each on a slow host."""
FIRST_SECONDS: Final = 0.1
"""What the first tape of a run may cost whatever the budget: a run of a hundred steps would have none."""
_MAX_SETTINGS: Final = 24
_NOTING: Final = "taping a step"

_TRAIN: Final = ReplacedFunction(nn.Module, "train")
_GRAD: Final = ReplacedFunction(torch.autograd, "grad")
_CLIPPING: Final = ReplacedFunction(clip_grad, "_clip_grads_with_norm_")
_ZEROING: Final = (ReplacedFunction(Optimizer, "zero_grad"), ReplacedFunction(nn.Module, "zero_grad"))
_SCHEDULING: Final = tuple(
    ReplacedFunction(kind, "step")
    for kind in {id(each): each for each in vars(lr_scheduler).values()}.values()
    if isinstance(kind, type) and "step" in vars(kind) and issubclass(kind, lr_scheduler.LRScheduler)
)


class Taped(Protocol):
    """What a tape needs to know of the program."""

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name."""

    @property
    def optimizers(self) -> Sequence[tuple[str, Optimizer]]:
        """The optimizers with their names."""

    @property
    def guard(self) -> Guard:
        """What callbacks run in."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """A program without a session."""

    models: dict[str, nn.Module]
    optimizers: list[tuple[str, Optimizer]]
    guard: Guard


def tape_once(model: nn.Module, optimizer: Optimizer, run_step: Callable[[], None], *, max_bytes: int) -> Tape:
    """Tape one call that runs a forward and a backward pass, without a session. The optimizer is only described."""
    alone = _Alone({"": model}, [("optimizer", optimizer)], Guard("raise", lambda part, what: None))
    taping = _Taping(alone, "asked", Earlier(), max_bytes)
    try:
        if not taping.begin():
            raise RuntimeError("another observer of operations is active")
        run_step()
        taping.enter_optimizer(optimizer, (), {})
        taping.leave_optimizer(optimizer, (), {})
    finally:
        taping.end()
    with tempfile.TemporaryDirectory(prefix="sonde-") as folder:
        tape = tapes.read(write_tape(Path(folder), taping.notes(1, "")))
        tape.tensors  # noqa: B018 - reads them before the folder goes
    return tape


class TapeRecorder:
    """Tapes some rounds of a session's training loop; also a sink that asks for a tape when something is found."""

    def __init__(self, watched: Watched, *, max_bytes: int = MAX_VALUES_BYTES) -> None:
        self._watched: Watched | None = watched
        self._max_bytes = max_bytes
        self._asked: Reason | None = None
        self._left: Counter[Reason] = Counter(
            {"early": len(EARLY), "suspected": MAX_SUSPECTED, "turn": MAX_TURNS, "asked": MAX_ASKED}
        )
        self._stepped: set[int] = set()
        """The optimizers that stepped in the present round."""
        self._turns: dict[int, tuple[int, int] | None] = {}
        """By optimizer: the last two rounds in which it stepped, the first perhaps 0; None once it was on a tape."""
        self._suspected: set[str] = set()
        self._earlier = Earlier()
        self._taping: _Taping | None = None
        self.seconds = 0.0
        """What taping has taken so far in the training thread."""
        self._usual_seconds = SECONDS_PER_MODULE * len(watched.modules)
        self._handles: list[Handle] = []
        self.end_round = watched.guard.wrap("taping steps", self._end_round)

    def attach(self) -> None:
        """Begin to listen to optimizers, before those whose hooks end a step: torch goes through its hooks then."""
        if self._watched is not None:
            catch = self._watched.guard.catch  # what they do in a round that is taped is measured there
            self._handles = on_step(catch(_NOTING, self._before_step), catch(_NOTING, self._after_step), during="awake")

    @property
    def is_taping(self) -> bool:
        """Whether the present round is taped."""
        return self._taping is not None

    def _before_step(self, *args: Any) -> None:
        self._stepped.add(id(args[0]))
        if self._taping is not None:
            self._taping.enter_optimizer(*args)

    def _after_step(self, *args: Any) -> None:
        if self._taping is not None:
            self._taping.leave_optimizer(*args)

    # ------------------------------------------------------------------ when

    def request(self) -> None:
        """Tape the next round."""
        self._asked = "asked"

    def _end_round(self, number: int, step: int) -> None:
        """Handle the end of a round of the loop: end its tape, and begin one of the next if it is due."""
        self._note_turns(number)
        if self._taping is not None:
            self._end(step)
        reason = self._due(number + 1)
        if reason is not None and not is_capturing():
            self._left[reason] -= 1
            self._begin(reason)

    def _note_turns(self, number: int) -> None:
        stepped, self._stepped = self._stepped, set()
        for each in stepped:
            if each not in self._turns and len(self._turns) >= MAX_OPTIMIZERS:
                continue  # a program that makes optimizers again and again
            last = self._turns.get(each, (0, 0))
            self._turns[each] = None if self._taping is not None or last is None else (last[1], number)

    def _is_turn(self, number: int) -> bool:
        """Return whether an optimizer that is on no tape steps in a round, if it keeps to its rhythm."""
        return any(turns is not None and 0 < turns[0] == 2 * turns[1] - number for turns in self._turns.values())

    def _due(self, number: int) -> Reason | None:
        """Return why a round is taped, if it is. What cannot be afforded now waits; what the user asks for does not."""
        watched = self._watched
        if watched is None or not watched.guard.failed.isdisjoint({PART, _NOTING}):
            return None
        reason = self._asked
        if reason is None and self._left["early"] > 0 and number >= EARLY[-self._left["early"]]:
            reason = "early"
        if reason is None and self._is_turn(number):
            reason = "turn"
        if reason is None or self._left[reason] <= 0:
            self._asked = None
            return None
        is_first = self.seconds == 0 and self._usual_seconds <= FIRST_SECONDS
        if reason != "asked" and not is_first and not watched.affords(self._usual_seconds, self.seconds):
            return None
        self._asked = None
        return reason

    def _begin(self, reason: Reason) -> None:
        if self._watched is None:
            return
        began = time.perf_counter()
        taping = self._taping = _Taping(self._watched, reason, self._earlier, self._max_bytes)
        try:
            has_begun = taping.begin()
        except BaseException:
            taping.end()
            raise
        if not has_begun:
            self._taping = None
        taping.operations.seconds += time.perf_counter() - began

    def _end(self, step: int, truncated: str = "") -> None:
        with fewer_collections:
            self._end_tape(step, truncated)

    def _end_tape(self, step: int, truncated: str) -> None:
        taping, self._taping = self._taping, None
        watched = self._watched
        if taping is None or watched is None:
            return
        taping.end()
        self._earlier = taping.operations.remember()
        if not taping.operations.ops or not watched.guard.failed.isdisjoint({PART, _NOTING}):
            return  # a tape that failed is dropped: the guard has reported it, and no step is taped any more
        notes = taping.notes(step, truncated)
        run, count = watched.path, len(taping.operations.ops)
        watched.later("writing a tape", lambda: write_tape(run, notes))
        watched.packer.put_event(
            "tape", f"step {step} was taped: {count:,} operations", {"reason": notes.reason, "operations": count}
        )
        watched.guard.meter.span.seconds += notes.seconds  # notes of operations are not measured one by one
        self.seconds += notes.seconds
        self._usual_seconds = notes.seconds

    def remove(self) -> None:
        """End a tape that is not complete, stop listening and forget the models."""
        taping, watched = self._taping, self._watched
        if taping is not None and watched is not None:
            has_backward = any(mark.kind == "backward" for mark in taping.marks)
            if has_backward or taping.reason == "asked":
                end = watched.guard.wrap(_NOTING, self._end)
                end(watched.packer.step, "the session ended before the step did")
            taping.end()
        self._taping = self._watched = None
        self._earlier = Earlier()
        remove_all(self._handles)

    # ------------------------------------------------------------------ a sink

    def take_finding(self, finding: Finding) -> None:
        """Ask for a tape when something new is found."""
        if finding.severity != "info" and not finding.withdrawn and finding.kind not in self._suspected:
            self._suspected.add(finding.kind)
            self._asked = self._asked or "suspected"

    def take_sites(self, sites: list[Site]) -> None:
        """Ignore sites."""

    def take_block(self, block: Block) -> None:
        """Ignore readings."""

    def take_numbers(self, numbers: Numbers) -> None:
        """Ignore numbers."""

    def take_event(self, event: Event) -> None:
        """Ignore events."""

    def flush(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def close(self) -> None:
        """Do nothing: the session removes it."""


@dataclass(frozen=True, slots=True)
class _Inside:
    """A call of a module that has not ended."""

    key: int
    name: str
    number: int
    is_ours: bool
    """The module belongs to a watched model."""


class _Taping:
    """One round that is being taped."""

    def __init__(self, watched: Taped, reason: Reason, earlier: Earlier, max_bytes: int) -> None:
        self.reason = reason
        self.marks: list[Mark] = []
        self._watched = watched
        self._thread = threading.get_ident()
        self._parameters = {name: each for name, each, _ in named_parameters(watched.models)}
        self._paths = {id(module): name for name, module, _ in named_modules(watched.models)}
        known, size = self._known()
        self.operations = Operations(known, watched.guard, earlier, save=size <= max_bytes, max_bytes=max_bytes)
        self._incomplete = [] if size <= max_bytes else [f"the model has {size >> 20:,} MB; nothing was saved"]
        self._observer = OperationObserver(self.operations.observe, watched.guard)
        self._stack: list[_Inside] = []
        self._calls: Counter[str] = Counter()
        self._depths: Counter[str] = Counter()
        self._optimizers: dict[int, tuple[OptimizerInfo, list[list[Tensor]], dict[str, dict[str, Any]]]] = {}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._handles: list[Handle] = []
        self._collector = contextlib.ExitStack()
        self.enter_optimizer = self._wrap(self._enter_optimizer)
        self.leave_optimizer = self._wrap(self._leave_optimizer)
        self._modules: tuple[ModuleInfo, ...] = ()
        self._attributes = {name: found for name, each in self._parameters.items() if (found := _settings(each))}
        self._random: Tensor | None = None
        self._settings: dict[str, Any] = {}

    def _known(self) -> tuple[Known, int]:
        """Return what is known of tensors by their owners, and the bytes of parameters and buffers."""
        known, size = Known(), 0
        for name, parameter in self._parameters.items():
            known.add("parameter", name, parameter)
            known.add("gradient", f"{name}.grad", parameter.grad)
            size += parameter.numel() * parameter.element_size()
        for prefix, model in self._watched.models.items():
            for name, buffer in model.named_buffers():
                known.add("buffer", f"{prefix}.{name}" if prefix else name, buffer)
                size += buffer.numel() * buffer.element_size()
        return known, size

    # ------------------------------------------------------------------ beginning and end

    def begin(self) -> bool:
        """Begin to listen; return False if that is not possible here."""
        if not self._observer.attach():
            return False
        self._collector.enter_context(fewer_collections)
        self._random = uncollected(torch.get_rng_state)
        self._modules = tuple(
            ModuleInfo(
                path=name,
                kind=type(module).__name__,
                training=module.training,
                settings=_settings(module),
                unread=unread_arguments(module),
            )
            for name, module, _ in named_modules(self._watched.models)
        )
        self._settings = {
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "default_dtype": pack_plain(torch.get_default_dtype()),
        }
        self._listen()
        return True

    def _listen(self) -> None:
        wrap = self._wrap
        calls: ModuleCalls[nn.Module] = ModuleCalls(
            None, wrap(self._enter_module), wrap(self._leave_module), raised=wrap(self._module_raised)
        )
        calls.attach()
        self._handles = [
            calls,
            BACKWARD.listen(
                before=wrap(self._before_backward), end=wrap(self._end_backward), after=wrap(self._after_backward)
            ),
            _GRAD.listen(before=wrap(self._before_grad), end=wrap(self._end_backward)),
            LOADING.listen(
                before=wrap(self._before_loading), end=wrap(self._end_loading), after=wrap(self._after_loading)
            ),
            _TRAIN.listen(before=wrap(self._before_train), end=wrap(self._after_train)),
            *(each.listen(before=wrap(self._before_zeroing)) for each in _ZEROING),
            *(each.listen(after=wrap(self._after_schedule)) for each in _SCHEDULING),
        ]
        if _CLIPPING.exists:
            self._handles.append(_CLIPPING.listen(before=wrap(self._before_clipping)))

    def _wrap(self, function: Callable[..., None]) -> Guarded:
        return self._watched.guard.wrap(_NOTING, function)

    def end(self) -> None:
        """Stop listening; doing so twice is fine."""
        self._collector.close()
        self._observer.remove()
        remove_all(self._handles)

    def notes(self, step: int, truncated: str) -> Notes:
        """Return all that was noted, after the end."""
        find = self.operations.peek
        self._note_other_optimizers()
        optimizers = []
        for info, groups, state in self._optimizers.values():
            found = tuple(
                GroupInfo(settings=group.settings, names=group.names, parameters=tuple(map(find, tensors)))
                for group, tensors in zip(info.groups, groups, strict=True)
            )
            resolved = {name: self._resolve(each) for name, each in state.items()}
            optimizers.append(OptimizerInfo(name=info.name, kind=info.kind, groups=found, state=resolved))
        return Notes(
            step=step,
            reason=self.reason,
            operations=self.operations,
            marks=self.marks,
            modules=self._modules,
            attributes=self._attributes,
            optimizers=optimizers,
            random_state=self._random,
            settings=self._settings,
            versions={"torch": str(torch.__version__), "python": platform.python_version(), "sonde": VERSION},
            truncated=truncated,
            seconds=self.operations.seconds,
            incomplete=self._incomplete,
            wait=_device_event(self.operations),
        )

    def _resolve(self, state: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                number = self.operations.peek(value)
                if number >= 0:
                    found[key] = {"v": number}
            else:
                found[key] = pack_plain(value)
        return found

    # ------------------------------------------------------------------ marks

    def _mark(self, kind: MarkKind, data: dict[str, Any]) -> None:
        if not self.operations.truncated and threading.get_ident() == self._thread and not is_capturing():
            self.marks.append(Mark(index=len(self.operations.ops), kind=kind, data=data, line=self.operations.line()))

    def _refer(self, tensor: Tensor | None) -> Any:
        return None if tensor is None or is_capturing() else {"v": self.operations.value_of(tensor)}

    def _parts(self, value: Any) -> dict[str, Any]:
        return {part: self._refer(tensor) for part, tensor in unpack(value)}

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not self._is_listening():
            return
        place = self.operations.place
        if place.hidden:  # modules inside compiled code, or inside a loader
            place.hidden += is_compiled_wrapper(module)
            return
        path = self._paths.get(id(module)) or self._paths.get(id(unwrap(module)))
        name = path if path is not None else f"<{type(module).__name__}>"
        number = self._calls[name]
        self._calls[name] += 1
        data = {"path": name, "class": type(module).__name__, "call": number, "training": module.training}
        data["args"] = self._parts(args)
        if path is not None and not any(each.is_ours for each in self._stack):
            data["root"] = True
            self._note_autocast()
        self._mark("module_enter", data)
        self._stack.append(_Inside(id(module), name, number, path is not None))
        place.hidden += is_compiled_wrapper(module)
        self._set_place()

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside = self._pop(module)
        if inside is None:
            return
        given = self._parts(args) | {key: ref for key, value in kwargs.items() for key, ref in self._named(key, value)}
        self.operations.add_opaque(f"{type(module).__name__}.forward", given, [each for _, each in unpack(output)])
        outs = self._parts(output)
        if inside.is_ours and not any(each.is_ours for each in self._stack):
            for _, tensor in unpack(output):
                self.operations.keep(tensor, MAX_OUTPUT)
        self._mark("module_exit", {"path": inside.name, "call": inside.number, "outs": outs, "args": given})
        self._set_place()

    def _module_raised(self, module: nn.Module) -> None:
        inside = self._pop(module)
        if inside is not None:
            self._mark("module_exit", {"path": inside.name, "call": inside.number, "raised": True})
            self._set_place()

    def _is_listening(self) -> bool:
        return threading.get_ident() == self._thread and backward_id() == -1 and not is_capturing()

    def _pop(self, module: nn.Module) -> _Inside | None:
        """Return the call that ends, unless it was not noted. Calls inside that Ctrl-C ended are forgotten with it."""
        if not self._is_listening():
            return None
        place = self.operations.place
        place.hidden -= is_compiled_wrapper(module) and place.hidden > 0
        found = max((at for at, each in enumerate(self._stack) if each.key == id(module)), default=-1)
        if place.hidden or found < 0:
            return None
        inside = self._stack[found]
        del self._stack[found:]
        return inside

    def _named(self, key: str, value: Any) -> list[tuple[str, Any]]:
        return [(f"{key}{part}", self._refer(tensor)) for part, tensor in unpack(value)]

    def _set_place(self) -> None:
        place = self.operations.place
        last = self._stack[-1] if self._stack else None
        place.module, place.call = ("", 0) if last is None else (last.name, last.number)

    def _note_autocast(self) -> None:
        if "autocast" in self._settings:
            return
        kinds = {parameter.device.type for parameter in self._parameters.values()} - {"meta"}
        self._settings["autocast"] = {
            kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            for kind in sorted(kinds)
            if torch.is_autocast_enabled(kind)
        }

    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            self.operations.place.backwards += 1
        if backward_id() != -1:
            return
        given = dict(zip(("tensors", "grad_tensors", "retain_graph", "create_graph"), args, strict=False)) | kwargs
        roots = [each for _, each in unpack(given.get("tensors"))]
        gradients = [each for _, each in unpack(given.get("grad_tensors"))]
        for root in roots:
            self.operations.keep(root)
        self._mark(
            "backward",
            {
                "roots": [self._refer(each) for each in roots],
                "gradients": [self._refer(each) for each in gradients],
                "create_graph": bool(given.get("create_graph")),
            },
        )

    def _before_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            self.operations.place.backwards += 1
        if backward_id() != -1:
            return
        given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
        inputs = given.get("inputs")
        asked = [self._refer(each) for _, each in unpack(tuple(inputs) if isinstance(inputs, ValuesView) else inputs)]
        self._mark(
            "backward",
            {
                "roots": [self._refer(each) for _, each in unpack(given.get("outputs"))],
                # Never empty, as it is for backward(): a generator, such as parameters(), cannot be looked at.
                "inputs": asked or [None],
                "create_graph": bool(given.get("create_graph")),
            },
        )

    def _end_backward(self) -> None:
        if threading.get_ident() == self._thread:
            self.operations.place.backwards -= 1

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if backward_id() == -1:
            self._mark("backward_end", {"reached": self._gradients(self._parameters.items())})

    def _gradients(self, parameters: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            value = self.operations.value_of(gradient)
            about = self.operations.values[value]
            about.role, about.name = "gradient", f"{name}.grad"
            found[name] = {"v": value}
        return found

    def _note_other_optimizers(self) -> None:
        """Give tensors outside the models that get gradients their role if an optimizer holds them that did not step.

        Nobody handed it over, and only the garbage collector knows all: it is asked where there are such tensors.
        """
        leaves = self.operations.unknown_leaves()
        if leaves:
            optimizers = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            held = {id(each) for group in groups for each in group["params"]}
            for tensor, value in leaves:
                if id(tensor) in held:
                    value.role, value.name = "parameter", "(another optimizer)"

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.operations.place.optimizers += 1
        self.operations.place.line = self.operations.line()
        name = self._describe_optimizer(optimizer)
        parameters = [
            (self._names.get(id(each), f"{name}.{place}"), each)
            for place, each in enumerate(each for group in optimizer.param_groups for each in group["params"])
        ]
        data = {"name": name, "class": type(optimizer).__name__, "gradients": self._gradients(parameters)}
        self._mark("optimizer_enter", data)

    def _leave_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread and self.operations.place.optimizers:
            self.operations.place.optimizers -= 1
            info = self._optimizers.get(id(optimizer))
            self._mark("optimizer_exit", {"name": info[0].name if info else ""})

    def _describe_optimizer(self, optimizer: Optimizer) -> str:
        known = self._optimizers.get(id(optimizer))
        if known is not None:
            return known[0].name
        handed = {id(each): name for name, each in self._watched.optimizers}
        name = handed.get(id(optimizer), f"optimizer{len(self._optimizers) + 1}" if self._optimizers else "optimizer")
        groups, tensors, states = [], [], {}
        place = 0
        for group in optimizer.param_groups:
            names = []
            for parameter in group["params"]:
                label = self._names.get(id(parameter), f"{name}.{place}")
                place += 1
                names.append(label)
                self.operations.known.add("parameter", label, parameter)
                states[label] = dict(optimizer.state.get(parameter, {}))
                for key, value in states[label].items():
                    self.operations.known.add("optimizer_state", f"{key} of {label}", value)
            settings = {key: _plain(value) for key, value in group.items() if key != "params"}
            groups.append(GroupInfo(settings=settings, names=tuple(names)))
            tensors.append(list(group["params"]))
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._optimizers[id(optimizer)] = (OptimizerInfo(name=name, kind=kind, groups=tuple(groups)), tensors, states)
        return name

    def _before_loading(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == self._thread:
            self.operations.place.hidden += 1
            self.operations.place.fetches += 1

    def _end_loading(self) -> None:
        if threading.get_ident() == self._thread:
            self.operations.place.hidden -= 1
            self.operations.place.fetches -= 1
            self.operations.fetch_writes.end()

    def _after_loading(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = {}
        for part, tensor in unpack(result):
            self.operations.known.add("batch", f"batch{part}", tensor)
            found[part] = self._refer(tensor)
        self._mark("loader_next", {"values": found} | _collated(args[0] if args else None))
        writes = self.operations.fetch_writes.found
        for (kind, line), (size, whole) in writes.items() if threading.get_ident() == self._thread else ():
            data = {"operation": kind, "size": size, "of": whole}
            self.marks.append(Mark(index=len(self.operations.ops), kind="data_write", data=data, line=line))
        writes.clear()

    def _before_train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depths["train"] += 1
        if self._depths["train"] == 1 and args:
            module = args[0]
            mode = args[1] if len(args) > 1 else kwargs.get("mode", True)
            path = self._paths.get(id(module), f"<{type(module).__name__}>")
            self._mark("train" if mode else "eval", {"path": path, "class": type(module).__name__})

    def _after_train(self) -> None:
        self._depths["train"] -= 1

    def _before_zeroing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            owner = args[0]
            name = self._paths.get(id(owner)) or next(
                (name for name, each in self._watched.optimizers if each is owner), ""
            )
            set_to_none = bool(args[1] if len(args) > 1 else kwargs.get("set_to_none", True))
            self._mark("zero_grad", {"owner": name, "class": type(owner).__name__, "set_to_none": set_to_none})

    def _after_schedule(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if args:
            rates = [_plain(group.get("lr")) for group in getattr(args[0].optimizer, "param_groups", ())]
            self._mark("scheduler_step", {"class": type(args[0]).__name__, "lr": rates})

    def _before_clipping(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("parameters", "max_norm", "total_norm"), args, strict=False)) | kwargs
        self._mark("clip", {"kind": "norm", "max_norm": _plain(given.get("max_norm"))})


def _collated(batches: object) -> dict[str, int]:
    """Return the batch size of a loader that puts batches together in a way of its own; 0 if it has none.

    Torch's way puts samples first. One of the program's own may put the steps of a series there.
    """
    if getattr(batches, "_collate_fn", default_collate) in (default_collate, default_convert):
        return {}
    size = getattr(getattr(batches, "_index_sampler", None), "batch_size", None)
    return {"batch_size": size if isinstance(size, int) else 0}


def _plain(value: Any) -> Any:
    """Return a setting as plain data; a number in a tensor as the number."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.is_cpu and not value.is_meta else {"opaque": "Tensor"}
    return pack_plain(value)


def _settings(owner: nn.Module | Tensor) -> dict[str, Any]:
    found = {}
    for name, value in vars(owner).items():
        if name != "training" and not name.startswith("_") and isinstance(value, bool | int | float | str | tuple):
            found[name] = pack_plain(value) if not isinstance(value, str) else value[:100]
        if len(found) >= _MAX_SETTINGS:
            break
    return found


def _device_event(operations: Operations) -> Callable[[], None]:
    """Return a function that waits until copies on a device are complete."""
    if not any(value.copy is not None and value.copy.is_cuda for value in operations.values):
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch
    event.record()
    return event.synchronize
