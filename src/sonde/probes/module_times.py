"""Time per module, forward and backward, on the host and, by events that nobody waits for, on a CUDA device.

Forward is timed between the hooks before and after each call. Backward has no such pair of hooks that leaves the graph
alone; there the arrival of an output's gradient says that the module's own backward begins now, which ends the one of
the module before. So operations between modules (a residual sum, a reshape) count for the module whose gradient came
last, and what comes before the first gradient, the loss, counts for none.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from sonde.handles import remove_all

_MOST_PENDING: Final = 100_000
_MOST_FREE: Final = 1024
Pass = str  # "forward" or "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """Milliseconds of one module over the whole scope. `self_` is without the modules inside it."""

    name: str
    kind: str
    calls: int
    forward_ms: float
    self_forward_ms: float
    backward_ms: float | None
    """With the modules inside it; None if no gradient came to it."""
    cuda_forward_ms: float | None = None
    cuda_backward_ms: float | None = None
    """On the device; None without one."""


@dataclass(slots=True)
class _Tally:
    kind: str
    calls: int = 0
    forward: float = 0.0
    below: float = 0.0
    backward: float | None = None
    cuda_forward: float | None = None
    cuda_backward: float | None = None


@dataclass(slots=True)
class _Call:
    name: str
    began: float
    event: torch.cuda.Event | None
    below: float = 0.0


class ModuleTimes:
    """Times every module that is called between `attach` and `remove`, in one thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        guard: Callable[[str, Callable[..., None]], Callable[..., None]] = lambda _, function: function,
    ) -> None:
        self._clock = clock
        self._guard = guard
        self._guarded_turn = guard("module times", self._turn)
        self._tallies: dict[str, _Tally] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, str] = {}
        self._stack: list[_Call] = []
        self._in_backward: _Call | None = None
        self._handles: list[RemovableHandle] = []
        self._free: deque[torch.cuda.Event] = deque(maxlen=_MOST_FREE)
        self._pending: deque[tuple[str, Pass, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MOST_PENDING)
        self._on_cuda = False

    def attach(self) -> None:
        """Begin to listen."""
        enter, leave = self._guard("module times", self._enter), self._guard("module times", self._leave)

        def before(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
                enter(module)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
                leave(module, output)

        self._handles = [
            torch_module.register_module_forward_pre_hook(before),
            torch_module.register_module_forward_hook(after, always_call=True),
        ]

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)
        self._stack.clear()
        self._in_backward = None

    def end_backward(self) -> None:
        """Say that a backward pass has ended, so that what follows counts for no module."""
        self._turn(None)

    def collect(self) -> None:
        """Take in the device's times that have arrived; never waits."""
        while self._pending and self._pending[0][2].query() and self._pending[0][3].query():  # type: ignore[no-untyped-call]
            name, which, begin, end = self._pending.popleft()
            tally, spent = self._tallies[name], begin.elapsed_time(end)
            if which == "forward":
                tally.cuda_forward = (tally.cuda_forward or 0.0) + spent
            else:
                tally.cuda_backward = (tally.cuda_backward or 0.0) + spent
            self._free.extend((begin, end))

    def table(self) -> list[ModuleTime]:
        """Return modules, the most expensive first."""
        self.collect()
        rows = [self._row(name, tally) for name, tally in self._tallies.items()]
        return sorted(rows, key=lambda row: -(row.forward_ms + (row.backward_ms or 0.0)))

    def _row(self, name: str, tally: _Tally) -> ModuleTime:
        inside = [each for other, each in self._tallies.items() if self._is_inside(other, name)]
        backwards = [each.backward for each in (tally, *inside) if each.backward is not None]
        device = [each.cuda_backward for each in (tally, *inside) if each.cuda_backward is not None]
        return ModuleTime(
            name=name,
            kind=tally.kind,
            calls=tally.calls,
            forward_ms=tally.forward * 1e3,
            self_forward_ms=max(tally.forward - tally.below, 0.0) * 1e3,
            backward_ms=sum(backwards) * 1e3 if backwards else None,
            cuda_forward_ms=tally.cuda_forward,
            cuda_backward_ms=sum(device) if device else None,
        )

    def _is_inside(self, name: str, outer: str) -> bool:
        return name != outer and (name.startswith(f"{outer}.") or self._roots.get(name) == outer)

    def _enter(self, module: nn.Module) -> None:
        name = self._name(module)
        if name not in self._tallies:
            self._tallies[name] = _Tally(type(module).__name__)
        self._stack.append(_Call(name, self._clock(), self._event()))

    def _leave(self, module: nn.Module, output: Any) -> None:
        if not self._stack:
            return
        call = self._stack.pop()
        spent = self._clock() - call.began
        tally = self._tallies[call.name]
        tally.calls += 1
        tally.forward += spent
        tally.below += call.below
        if self._stack:
            self._stack[-1].below += spent
        else:
            self.collect()
        self._queue(call.name, "forward", call.event)
        for tensor in _tensors(output):
            self._on_cuda = self._on_cuda or tensor.is_cuda
            if tensor.requires_grad and not list(module.children()):
                self._listen(tensor, call.name)

    def _listen(self, tensor: Tensor, name: str) -> None:
        turn = self._guarded_turn

        def arrived(_: Tensor) -> None:
            turn(name)

        tensor.register_hook(arrived)  # type: ignore[no-untyped-call] # torch

    def _turn(self, name: str | None) -> None:
        now, before = self._clock(), self._in_backward
        if before is not None:
            tally = self._tallies[before.name]
            tally.backward = (tally.backward or 0.0) + now - before.began
            self._queue(before.name, "backward", before.event)
        self._in_backward = None if name is None else _Call(name, now, self._event())

    def _event(self) -> torch.cuda.Event | None:
        if not self._on_cuda:
            return None
        event = self._free.popleft() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _queue(self, name: str, which: Pass, begin: torch.cuda.Event | None) -> None:
        end = self._event() if begin is not None else None
        if begin is not None and end is not None:
            self._pending.append((name, which, begin, end))

    def _name(self, module: nn.Module) -> str:
        found = self._names.get(module)
        if found is None:
            found = self._name_all(module)
        return found

    def _name_all(self, root: nn.Module) -> str:
        """Name a module that was called from outside any other, and all it holds; return its own name."""
        taken = set(self._names.values())
        kind = type(root).__name__
        number = 2
        own = kind
        while own in taken:
            own, number = f"{kind}{number}", number + 1
        for path, inner in root.named_modules():
            name = own if not path else path if path not in taken else f"{own}.{path}"
            self._roots.setdefault(self._names.setdefault(inner, name), own)
        return self._names[root]


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [each for each in output if isinstance(each, Tensor)] if isinstance(output, list | tuple) else []
