"""Time per module, forward and backward, on the host and, by events without waiting for them, on a CUDA device.

Forward is timed between the hooks before and after each call. Backward has no such pair of hooks that leaves the graph
alone; there the arrival of an output's gradient says that the module's own backward begins now, which ends the one of
the module before. So operations between modules (a residual sum, a reshape) count for the module whose gradient came
last, and what comes before the first gradient, the loss, counts for none.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from sonde.hooks.guard import UNGUARDED, Guard, backward_id, is_capturing
from sonde.hooks.on_backward import on_gradient
from sonde.hooks.on_call import ModuleCalls
from sonde.hooks.unpack import unpack
from sonde.probes.profile.cuda_timing import EventPool
from sonde.stats.cuda.driver import beside_captures

# Times on a device that have not arrived yet; beyond that the oldest are dropped.
_MOST_PENDING: Final = 100_000
Pass = Literal["forward", "backward"]


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
    """On the device of its output; None without one."""


@dataclass(slots=True)
class _Tally:
    kind: str
    device: torch.device | None = None
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
    events: _DeviceTimes | None
    event: torch.cuda.Event | None
    below: float = 0.0


class _DeviceTimes:
    """Times on one device: events of its own, and those that have not been read yet."""

    def __init__(self, device: torch.device) -> None:
        self.pool = EventPool(device)
        self.pending: deque[tuple[str, Pass, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MOST_PENDING)

    def arrived(self) -> Iterator[tuple[str, Pass, float]]:
        """Yield the times that have arrived, in milliseconds; never waits."""
        while self.pending and self.pending[0][2].query() and self.pending[0][3].query():  # type: ignore[no-untyped-call]
            name, which, begin, end = self.pending.popleft()
            yield name, which, begin.elapsed_time(end)
            self.pool.give_back((begin, end))


class ModuleTimes:
    """Times every module that is called between `attach` and `remove`, in one thread."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, guard: Guard = UNGUARDED) -> None:
        self._clock = clock
        self._guarded_turn = guard.wrap("module times", self._turn)
        self._tallies: dict[str, _Tally] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: dict[str, str] = {}
        self._stack: list[_Call] = []
        self._in_backward: _Call | None = None
        self._turning = threading.Lock()
        self._devices: dict[torch.device, _DeviceTimes] = {}
        enter, leave = guard.wrap("module times", self._enter), guard.wrap("module times", self._leave)
        self._calls: ModuleCalls[nn.Module] = ModuleCalls(None, enter, leave, leave)

    def attach(self) -> None:
        """Begin to listen."""
        self._calls.attach()

    def remove(self) -> None:
        """Stop listening."""
        self._calls.remove()
        self._stack.clear()
        self._in_backward = None

    def end_backward(self) -> None:
        """Note that a backward pass has ended, so that what follows counts for no module."""
        self._turn(None)

    def collect(self) -> None:
        """Add the times of devices that have arrived; never waits."""
        if is_capturing() or not any(each.pending for each in self._devices.values()):
            return
        with beside_captures():
            for name, which, spent in itertools.chain.from_iterable(each.arrived() for each in self._devices.values()):
                tally = self._tallies[name]
                if which == "forward":
                    tally.cuda_forward = (tally.cuda_forward or 0.0) + spent
                else:
                    tally.cuda_backward = (tally.cuda_backward or 0.0) + spent

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

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if backward_id() == -1:
            name = self._name(module)
            if name not in self._tallies:
                # Until its output tells, what it is given and holds must.
                device = _cuda_device([*_tensors(args), *itertools.islice(module.parameters(), 1)])
                self._tallies[name] = _Tally(type(module).__name__, device)
            self._stack.append(self._begin(name))

    def _leave(self, module: nn.Module, *returned: Any) -> None:
        if not self._stack or backward_id() != -1:
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
        self._end(call, "forward")
        tensors = _tensors(returned[-1]) if returned else []  # nothing if it raised
        if tensors:
            tally.device = _cuda_device(tensors)
        if not any(module.children()):
            for tensor in tensors:
                if tensor.requires_grad:
                    on_gradient(tensor, self._guarded_turn, call.name)

    def _turn(self, name: str | None, _: Tensor | None = None) -> None:
        with self._turning:  # each device has a backward thread of its own
            before = self._in_backward
            if before is not None:
                tally = self._tallies[before.name]
                tally.backward = (tally.backward or 0.0) + self._clock() - before.began
                self._end(before, "backward")
            self._in_backward = None if name is None else self._begin(name)

    def _begin(self, name: str) -> _Call:
        device = self._tallies[name].device
        if device is None:
            return _Call(name, self._clock(), None, None)
        if device not in self._devices:
            self._devices[device] = _DeviceTimes(device)
        events = self._devices[device]
        return _Call(name, self._clock(), events, events.pool.record())

    def _end(self, call: _Call, which: Pass) -> None:
        if call.events is not None and call.event is not None:
            end = call.events.pool.record()
            if end is not None:
                call.events.pending.append((call.name, which, call.event, end))

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


def _tensors(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in unpack(value)]


def _cuda_device(tensors: list[Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)
