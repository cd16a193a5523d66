"""A table of what the modules of a model did in one forward pass: one line per call."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.names import named_modules
from sonde.hooks.on_call import on_module
from sonde.hooks.unpack import unpack
from sonde.probes.readings import Tally
from sonde.records import Reading

logger = logging.getLogger("sonde")

# A loop over time steps calls a module very often; the table stays readable and bounded.
MAX_CALLS: Final = 2000


@dataclass(slots=True, eq=False)
class Seen:
    """One tensor that a module was given or returned."""

    part: str
    """Where it sits in a nested value: `[0]`, `.logits`, `['loss']`; empty for a plain tensor."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    num_bytes: int
    reading: Reading | None = None
    """None if the tensor has no memory to read."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module."""

    name: str
    kind: str
    call: int
    """Which call of this module it is, from 0."""
    inputs: list[Seen] = field(default_factory=list)
    outputs: list[Seen] = field(default_factory=list)
    time_ms: float | None = None
    """On a CUDA device the device's own time; None if the call did not return."""
    cuda_bytes: int | None = None
    """How much more CUDA memory was allocated after the call than before it; None without a CUDA device."""

    @property
    def output_bytes(self) -> int:
        """Bytes of the tensors it returned."""
        return sum(seen.num_bytes for seen in self.outputs)


class CallTable:
    """Listens to the leaf modules of a model. Use as `with listen_to_calls(model) as table:`."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.left_out = 0
        """Calls beyond `MAX_CALLS`."""
        self._watched = {
            id(module): (name, module) for name, module, _ in named_modules({"": model}) if _is_leaf(module)
        }
        self.faults: list[str] = []
        """Tracebacks of Sonde's own faults; what failed is missing from the table."""
        self._counts: dict[int, int] = {}
        self._tally = Tally()
        self._unread: list[tuple[Seen, int]] = []
        self._open: list[tuple[int, Call, _Clock]] = []
        self._clocks: list[tuple[Call, _Clock]] = []

    @property
    def modules(self) -> list[nn.Module]:
        """The modules listened to."""
        return [module for _, module in self._watched.values()]

    def note_fault(self, part: str, trace: str) -> None:
        """Keep a fault of Sonde's own."""
        self.faults.append(f"{part}: {trace}")
        logger.warning("%s failed and are left out of the table; the model runs on.\n%s", part, trace.rstrip())

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note that a module is called."""
        found = self._watched.get(id(module))
        if found is None:
            return
        number = self._counts.get(id(module), 0)
        self._counts[id(module)] = number + 1
        if len(self.calls) >= MAX_CALLS:
            self.left_out += 1
            return
        call = Call(found[0], type(module).__name__, number)
        self.calls.append(call)
        call.inputs = self._see((*args, *kwargs.values()) if len(args) + len(kwargs) != 1 else _only(args, kwargs))
        self._open.append((id(module), call, _Clock(_cuda_device(call.inputs, module))))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a module returned."""
        if not self._open or self._open[-1][0] != id(module):
            return
        _, call, clock = self._open.pop()
        clock.stop()
        self._clocks.append((call, clock))
        call.outputs = self._see(output)

    def read(self) -> None:
        """Fetch all numbers; waits for the devices."""
        readings = self._tally.readings()
        for seen, index in self._unread:
            seen.reading = readings[index]
        self._unread.clear()
        for call, clock in self._clocks:
            call.time_ms, call.cuda_bytes = clock.milliseconds(), clock.cuda_bytes
        self._clocks.clear()
        self._open.clear()

    def _see(self, value: Any) -> list[Seen]:
        found = unpack(value)
        seen = [
            Seen(part, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device), _size(tensor))
            for part, tensor in found
        ]
        indices = self._tally.add_all([tensor for _, tensor in found])
        self._unread += zip(seen, indices, strict=True)
        return seen


@contextlib.contextmanager
def listen_to_calls(model: nn.Module) -> Iterator[CallTable]:
    """Listen to the leaf modules of `model` while the block runs.

    However the block ends, the hooks are gone then and the numbers are read.
    """
    table = CallTable(model)
    guard = Guard("isolate", table.note_fault)
    before = guard.wrap("before module calls", table.before)
    after = guard.wrap("after module calls", table.after)
    handles: list[Handle] = []
    try:
        for module in table.modules:
            handles += on_module(module, before=before, after=after)
        yield table
    finally:
        remove_all(handles)
        table.read()


class _Clock:
    """Times one call: by the device if there is one, else by the host."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.cuda_bytes: int | None = None
        self._seconds = 0.0
        if device is None:
            self._begin = time.perf_counter()
            return
        self._allocated = torch.cuda.memory_allocated(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._events[0].record(torch.cuda.current_stream(device))

    def stop(self) -> None:
        """End the call."""
        if self._device is None:
            self._seconds = time.perf_counter() - self._begin
            return
        self._events[1].record(torch.cuda.current_stream(self._device))
        self.cuda_bytes = torch.cuda.memory_allocated(self._device) - self._allocated

    def milliseconds(self) -> float:
        """Return the time; waits for the device."""
        if self._device is None:
            return self._seconds * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _cuda_device(seen: list[Seen], module: nn.Module) -> torch.device | None:
    names = [each.device for each in seen]
    names += [str(parameter.device) for parameter in module.parameters(recurse=False)]
    return next((torch.device(name) for name in names if name.startswith("cuda")), None)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
