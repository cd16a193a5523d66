"""A scope that reports where NaN and infinities come from: forward, gradients or optimizer, with module and line.

Torch's anomaly mode finds only NaN in the backward pass. This scope also checks the result of every torch function of
the thread, every module output, every parameter's gradient when it is accumulated, and the parameters after every
optimizer step. That is slow and waits for the device each time: use it to find a fault, not to train.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from sonde.core import schema
from sonde.hooks.guard import Guard, Handle, remove_all, warn_of_fault
from sonde.hooks.names import ROOT_NAME, named_modules, named_parameters
from sonde.hooks.on_backward import on_accumulated
from sonde.hooks.on_call import ModuleCalls
from sonde.hooks.on_step import on_step
from sonde.hooks.unpack import unpack
from sonde.hooks.user_line import is_users, source_line
from sonde.probes.readings import Tally, readings_of
from sonde.records import Reading

Place = Literal["forward", "gradient", "optimizer"]
MAX_SIGHTINGS: Final = 64
"""Places that are reported; later ones are the same problem spreading, and are only counted."""

_BEGINS: Final = "Error detected in "
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Where a tensor that is not finite was first seen."""

    place: Place
    name: str
    """The module (forward) or the parameter (gradient, optimizer), as a path; empty outside any module."""
    kind: str
    """Class of the module, or of the parameter's owner, or of the optimizer."""
    operation: str
    """The torch function that made it, if it is known: `log`, `exp`, `linear`; else empty."""
    nan: int
    inf: int
    count: int
    source: str
    """`file:line in function` of the user's code; for a gradient, where its module was called."""
    also: tuple[str, ...] = ()
    """Further parameters that the same optimizer step wrote so."""

    @property
    def what(self) -> str:
        """`NaN`, `Inf` or `NaN and Inf`."""
        return " and ".join(word for word, count in (("NaN", self.nan), ("Inf", self.inf)) if count)

    def __str__(self) -> str:
        where = {
            "forward": self.name or "code outside any module",
            "gradient": f"the gradient of {self.name}",
            "optimizer": f"the parameter {self.name}, written by {self.kind}",
        }[self.place]
        origin = f" {self.operation}()" if self.operation else ""
        at = f"{origin} at {self.source}" if self.source else origin
        more = f", and {len(self.also)} more parameters" if self.also else ""
        return f"{self.what} in {where}{more} ({self.nan + self.inf} of {self.count} elements){at and ':'}{at}"


class NonFiniteScope:
    """Look for what is not finite until `close`; `report` is called for each in the thread in which it occurred."""

    def __init__(self, report: Callable[[NonFinite], None]) -> None:
        self.sightings = 0
        self.spread = 0
        """Gradients that were not finite because of what was reported before."""
        self._report = report
        self._guard = Guard("isolate", warn_of_fault)
        self._here = _Here()
        self._known_roots: dict[int, nn.Module] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._parameters: dict[int, tuple[str, str]] = {}
        self._call_lines: dict[str, str] = {}
        self._reported_places: set[tuple[str, ...]] = set()
        self._reported_modules: set[str] = set()
        self._bad_parameters: set[str] = set()
        self._checked: set[int] = set()
        self._in_trouble = False
        """Something was reported since the last optimizer step, so gradients that are not finite follow from it."""
        self._calls: ModuleCalls[nn.Module] = ModuleCalls(
            None,
            self._guard.wrap("looking at module calls", self._enter),
            self._guard.wrap("looking at module outputs", self._leave),
            raised=self._guard.wrap("looking at module calls", self._forget),
        )
        self._handles: list[Handle] = []
        self._mode = _Functions(self._guard.wrap("looking at operations", self._see_operation))

    def open(self) -> Self:
        """Begin to look. Only the thread that opens the scope has its operations looked at."""
        before_step = self._guard.wrap("looking at parameters", self._before_step)
        after_step = self._guard.wrap("looking at updates", self._after_step)
        self._calls.attach()
        self._handles += [self._calls, *on_step(before_step, after_step)]
        self._mode.__enter__()  # type: ignore[no-untyped-call] # torch
        return self

    def close(self) -> None:
        """Stop looking; nothing is left on the model."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call] # torch
        remove_all(self._handles)
        self._known_roots.clear()
        self._report = _ignore  # lets the receiver be freed, though this object is part of a cycle

    # ------------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, args: Any) -> None:
        stack = self._here.stack
        if not stack:
            self._meet(module)
        name, kind = self._names.get(id(module), (type(module).__name__, type(module).__name__))
        self._call_lines[name] = source_line()
        stack.append(_Frame(id(module), name, kind))

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        stack = self._here.stack
        if not stack or stack[-1].module != id(module):
            return
        frame = stack.pop()
        # Operations that Python does not see, such as a custom autograd function's, show here only.
        if output is not None and not frame.reported:
            reading = _made_here((output,), (*args, *kwargs.values(), *module.parameters()))
            if reading is not None:
                self._report_forward(frame, reading, "", self._call_lines.get(frame.name, ""))

    def _forget(self, module: nn.Module) -> None:
        """Leave a module that has raised."""
        stack = self._here.stack
        if stack and stack[-1].module == id(module):
            stack.pop()

    def _see_operation(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._here.in_optimizer or operation == "__get__":
            return
        reading = _made_here((result,), (*args, *kwargs.values()), on_purpose=_is_on_purpose)
        if reading is not None:
            stack = self._here.stack
            self._report_forward(stack[-1] if stack else _OUTSIDE, reading, operation, source_line())

    def _report_forward(self, frame: _Frame, reading: Reading, operation: str, source: str) -> None:
        for outer in self._here.stack:
            outer.reported = True  # the modules around it pass on what this one was reported for
        self._in_trouble = True
        # A pass may be repeated outside Python; what an operation was reported for is not reported for its module too.
        is_known = not operation and frame.name in self._reported_modules
        self._reported_modules.add(frame.name)
        if not is_known and ("forward", frame.name, operation, source) not in self._reported_places:
            self._reported_places.add(("forward", frame.name, operation, source))
            self._report_place("forward", frame.name, frame.kind, reading, source, operation=operation)

    def _meet(self, root: nn.Module) -> None:
        """Collect the names inside a model at its first call, and hook the gradients of its parameters."""
        if id(root) in self._known_roots or id(root) in self._names:
            return
        self._known_roots[id(root)] = root  # keeps it alive, so that its id stays its own
        for name, module, _ in named_modules({"": root}):
            self._names[id(module)] = (name, type(module).__name__)
        kinds = dict(self._names.values())
        for name, parameter, _ in named_parameters({"": root}):
            self._parameters[id(parameter)] = (name, kinds.get(name.rpartition(".")[0], type(root).__name__))
            if parameter.requires_grad and not isinstance(parameter, nn.parameter.UninitializedParameter):
                see = self._guard.wrap("looking at gradients", self._see_gradient)
                self._handles.append(on_accumulated(parameter, see))

    # ------------------------------------------------------------------ backward and optimizer

    def _see_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        reading = None if gradient is None else _first_bad((gradient,))
        if reading is None:
            return
        if self._in_trouble:
            self.spread += 1
            return
        # Gradients come from the loss backwards, so the first one is nearest to the cause.
        self._in_trouble = True
        name, kind = self._parameters[id(parameter)]
        if ("gradient", name) not in self._reported_places:
            self._reported_places.add(("gradient", name))
            self._report_place(
                "gradient", name, kind, reading, self._call_lines.get(name.rpartition(".")[0] or ROOT_NAME, "")
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before its first step, note what is bad already: that was not the optimizer's doing."""
        self._here.in_optimizer = True
        if id(optimizer) not in self._checked:
            self._checked.add(id(optimizer))
            self._bad_parameters |= set(self._find_bad(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._here.in_optimizer = False
        self._in_trouble = False
        found = {name: each for name, each in self._find_bad(optimizer).items() if name not in self._bad_parameters}
        if found:
            self._bad_parameters |= set(found)
            first, *rest = found
            self._report_place(
                "optimizer", first, type(optimizer).__name__, found[first], source_line(), also=tuple(rest)
            )

    def _find_bad(self, optimizer: Optimizer) -> dict[str, Reading]:
        named = {
            self._parameters.get(id(parameter), (f"group {number}, parameter {index}", ""))[0]: parameter
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        readings = readings_of(named, histogram=False)
        return {name: reading for name, reading in readings.items() if reading.nonfinite}

    def _report_place(
        self,
        place: Place,
        name: str,
        kind: str,
        reading: Reading,
        source: str,
        *,
        operation: str = "",
        also: tuple[str, ...] = (),
    ) -> None:
        self.sightings += 1
        if self.sightings > MAX_SIGHTINGS:
            return
        nan = int(reading.row[schema.NAN])
        self._report(
            NonFinite(
                place=place,
                name=name,
                kind=kind,
                operation=operation,
                nan=nan,
                inf=reading.nonfinite - nan,
                count=reading.count,
                source=source,
                also=also,
            )
        )


@dataclass(slots=True, eq=False)
class _Frame:
    """A module that is running."""

    module: int
    name: str
    kind: str
    reported: bool = False


_OUTSIDE: Final = _Frame(0, "", "")


class _Here(threading.local):
    """Which modules this thread is inside of."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        self.in_optimizer = False


class _Functions(TorchFunctionMode):
    """Hands every torch function's result to `see`, unless that itself is at work."""

    def __init__(self, see: Callable[..., None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor | tuple) and not torch.compiler.is_compiling():
            # Inside this method the mode is off, so looking does not look at itself.
            self._see(getattr(func, "__name__", str(func)), args, kwargs, result)
        return result


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [tensor for value in values for _, tensor in unpack(value)]


def _first_bad(tensors: Iterable[Tensor], *, nan_only: bool = False) -> Reading | None:
    """Return the reading of the first tensor that is not finite."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    if not floating:
        return None
    tally = Tally(histogram=False)
    tally.add_all(floating)
    for reading in tally.readings():
        if reading is not None and (reading.row[schema.NAN] if nan_only else reading.nonfinite):
            return reading
    return None


def _made_here(
    results: tuple[Any, ...],
    given: tuple[Any, ...],
    *,
    on_purpose: Callable[[tuple[Any, ...], list[Tensor]], bool] = lambda values, tensors: False,
) -> Reading | None:
    """Return the reading of a result that is not finite, if it was made here and not handed on.

    NaN is made from tensors without NaN (infinities may be among them: inf - inf, a fully masked softmax), an infinity
    from finite ones.
    """
    reading = _first_bad(_tensors(results))
    if reading is None:
        return None
    tensors = _tensors(given)
    if on_purpose(given, tensors):
        return None
    return None if _first_bad(tensors, nan_only=bool(reading.row[schema.NAN])) is not None else reading


def _is_on_purpose(values: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Return whether a value that is not finite is intended: a plain number, as in a mask, or without any input."""
    return not tensors or any(isinstance(value, float) and not math.isfinite(value) for value in values)


def _ignore(found: NonFinite) -> None: ...


class AnomalyTraces:
    """Where in the forward pass torch's anomaly mode locates NaN gradients: it issues a warning beside the error."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @property
    def source(self) -> str:
        """`file:line in function` of the innermost line of the user's that made the last bad operation, or ""."""
        frames = _FRAME.findall(self.texts[-1]) if self.texts else []
        users = [frame for frame in frames if is_users(frame[0])]
        return "{}:{} in {}".format(*users[-1]) if users else ""


@contextlib.contextmanager
def collect_anomaly_traces() -> Iterator[AnomalyTraces]:
    """Collect torch's warnings about anomalies while the block runs."""
    traces, show = AnomalyTraces(), warnings.showwarning

    def collect(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith(_BEGINS):
            traces.texts.append(str(message)[-8000:])  # the innermost lines come last
        show(message, *args, **kwargs)

    warnings.showwarning = collect
    try:
        yield traces
    finally:
        if warnings.showwarning is collect:  # else code inside the block has replaced it
            warnings.showwarning = show
