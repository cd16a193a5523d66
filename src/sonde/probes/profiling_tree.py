"""A profile as torch leaves it, read once into plain records: which operator ran, how long, called from which line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType

_PYTHON: Final = (_EventType.PyCall, _EventType.PyCCall)
# Ranges that torch itself names around its optimizers and its backward passes.
_TORCHS_RANGES: Final = ("Optimizer.", "autograd::engine::")
# Frames of these packages are never the line a user can change.
_NOT_USERS: Final = ("torch", "sonde", "threading.py", "contextlib.py", "importlib", "<frozen")


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of Python: its file as the profiler names it, relative to where it was imported from."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_users(self) -> bool:
        """Whether the line belongs neither to torch nor to Sonde nor to Python itself."""
        path = PurePath(self.file)
        parts = path.parts
        if "site-packages" in parts or self.file.startswith("<") or path.name in ("threading.py", "contextlib.py"):
            return False
        return not (parts and parts[0] in _NOT_USERS) and "/sonde/" not in self.file


@dataclass(slots=True)
class OperatorCall:
    """One call of one operator."""

    name: str
    start_ns: int
    duration_ns: int
    self_ns: int
    shapes: tuple[tuple[int, ...], ...]
    stack: tuple[Frame, ...]
    """Innermost first."""
    builtin: str
    """The method of Tensor or function of torch that Python called, such as `item`; empty if an operator called it."""
    parent: str
    """The operator around this one; empty if there is none."""
    by_torch: bool = False
    """It runs inside an optimizer's step or the backward engine."""
    self_bytes: int = 0
    cuda_ns: int = 0
    self_cuda_ns: int = 0
    flops: int = 0


@dataclass(slots=True)
class DeviceWait:
    """One call of the CUDA runtime that waits for the device."""

    name: str
    start_ns: int
    duration_ns: int
    operator: OperatorCall | None


@dataclass(slots=True)
class ProfileTree:
    """All that is known of one recorded stretch."""

    calls: list[OperatorCall] = field(default_factory=list)
    annotations: list[tuple[str, int, int]] = field(default_factory=list)
    """Named ranges: name, start and duration in nanoseconds."""
    waits: list[DeviceWait] = field(default_factory=list)
    device_ns: int = 0
    """Total time of kernels and copies on CUDA devices."""
    copies: list[tuple[str, int]] = field(default_factory=list)
    """Copies to, from and on CUDA devices: what torch calls them, and nanoseconds."""


def read_tree(kineto_results: Any) -> ProfileTree:
    """Read a finished recording."""
    tree = ProfileTree()
    by_correlation: dict[int, tuple[OperatorCall, Any]] = {}
    for event in _walk(kineto_results.experimental_event_tree()):
        if event.tag != _EventType.TorchOp:
            continue
        if not _is_operator(event):
            tree.annotations.append((event.name, event.start_time_ns, event.duration_time_ns))
            continue
        call = _call(event)
        tree.calls.append(call)
        by_correlation[event.correlation_id] = (call, event)
    _add_device_side(tree, kineto_results.events(), by_correlation)
    return tree


def _walk(roots: list[Any]) -> Iterator[Any]:
    stack = list(reversed(roots))
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


def _is_operator(event: Any) -> bool:
    # Operators are `namespace::name`; a range that somebody named has spaces, dots or `#`, or no namespace.
    return "::" in event.name and " " not in event.name and "#" not in event.name


def _call(event: Any) -> OperatorCall:
    below = sum(child.duration_time_ns for child in event.children if child.tag == _EventType.TorchOp)
    stack, builtin = _stack(event)
    return OperatorCall(
        name=event.name,
        start_ns=event.start_time_ns,
        duration_ns=event.duration_time_ns,
        self_ns=max(event.duration_time_ns - below, 0),
        shapes=tuple(tuple(each.sizes) for each in event.extra_fields.inputs if hasattr(each, "sizes")),
        stack=stack,
        builtin=builtin,
        parent=_operator_around(event),
        by_torch=_is_by_torch(event),
        self_bytes=sum(child.extra_fields.alloc_size for child in event.children if child.tag == _EventType.Allocation),
    )


def _operator_around(event: Any) -> str:
    parent = event.parent
    return parent.name if parent is not None and parent.tag == _EventType.TorchOp and _is_operator(parent) else ""


def _is_by_torch(event: Any) -> bool:
    above = event.parent
    while above is not None:
        if above.tag == _EventType.TorchOp and above.name.startswith(_TORCHS_RANGES):
            return True
        above = above.parent
    return False


def _stack(event: Any) -> tuple[tuple[Frame, ...], str]:
    frames: list[Frame] = []
    builtin = ""
    above = event.parent
    while above is not None:
        if above.tag in _PYTHON:
            if above.tag == _EventType.PyCCall and not frames:
                builtin = _plain_builtin(_name(above))
            elif above.tag == _EventType.PyCall and not frames:
                # Torch tells the line of every call, but not of an operator written as one: `if x > 0`.
                frames.append(_frame(above.extra_fields.callsite))
            frames.append(_frame(above.extra_fields.caller))
        above = above.parent
    return tuple(frames), builtin


def _frame(state: Any) -> Frame:
    return Frame(state.file_name, state.line_number, state.function_name)


def _plain_builtin(name: str) -> str:
    """Return the bare name: `<built-in method item of Tensor object at 0x...>` is `item`."""
    words = name.strip("<>").split()
    return words[2] if len(words) > 2 and words[0] == "built-in" else name


def _add_device_side(tree: ProfileTree, events: list[Any], calls: dict[int, tuple[OperatorCall, Any]]) -> None:
    spent: dict[int, int] = defaultdict(int)
    for event in events:
        if event.device_type() == DeviceType.CUDA:
            if not event.is_user_annotation():
                tree.device_ns += event.duration_ns()
                if (name := _name(event)).startswith("Memcpy"):
                    tree.copies.append((name.removeprefix("Memcpy").strip(), event.duration_ns()))
                spent[event.linked_correlation_id()] += event.duration_ns()
        elif event.correlation_id() in calls:
            calls[event.correlation_id()][0].flops = event.flops()
        elif "Synchronize" in (name := _name(event)):
            operator = calls.get(event.linked_correlation_id())
            tree.waits.append(
                DeviceWait(name, event.start_ns(), event.duration_ns(), operator[0] if operator else None)
            )
    for correlation, nanoseconds in spent.items():
        if correlation in calls:
            _credit(*calls[correlation], nanoseconds, calls)


def _name(event: Any) -> str:
    """Return an event's name, empty if it is none: torch hands out broken text for some built-in functions."""
    try:
        return str(event.name() if callable(event.name) else event.name)
    except UnicodeDecodeError:
        return ""


def _credit(call: OperatorCall, event: Any, nanoseconds: int, calls: dict[int, tuple[OperatorCall, Any]]) -> None:
    call.self_cuda_ns += nanoseconds
    above = event
    while above is not None:
        if above.tag == _EventType.TorchOp and above.correlation_id in calls:
            calls[above.correlation_id][0].cuda_ns += nanoseconds
        above = above.parent
