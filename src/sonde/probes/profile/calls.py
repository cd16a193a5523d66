"""Read a finished profile into plain records: calls, operators and stacks with their times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType

from sonde.probes.profile.module_times import ModuleTime

# --------------------------------------------------------------------------------
# A profile as torch leaves it, read once into plain records: which operator ran, how long, called from which line.
from sonde.probes.readings import OWN_RANGE

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
    by_sonde: bool = False
    """It reads statistics for Sonde."""
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
    # Operators are `namespace::name`; a range that a user named has spaces, dots or `#`, or no namespace.
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
        by_torch=_is_inside(event, _TORCHS_RANGES),
        by_sonde=_is_inside(event, (OWN_RANGE,)),
        self_bytes=sum(child.extra_fields.alloc_size for child in event.children if child.tag == _EventType.Allocation),
    )


def _operator_around(event: Any) -> str:
    parent = event.parent
    return parent.name if parent is not None and parent.tag == _EventType.TorchOp and _is_operator(parent) else ""


def _is_inside(event: Any, ranges: tuple[str, ...]) -> bool:
    above = event.parent
    while above is not None:
        if above.tag == _EventType.TorchOp and above.name.startswith(ranges):
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


# --------------------------------------------------------------------------------
# The table of operators of a profile: how often, how long, how much memory, how many FLOPs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """All calls of one operator with one set of input shapes. Times in milliseconds, over the whole profile."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int
    self_cpu_ms: float
    cpu_ms: float
    self_cuda_ms: float
    cuda_ms: float
    self_bytes: int
    """Memory it allocated itself, less what it freed."""
    flops: int | None
    """None where torch has no formula."""
    share: float
    """Of all operators' own time: on CUDA devices if any worked, else on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """All copies of one direction, as the device saw them."""

    what: str
    """`HtoD (Pageable -> Device)`: to the device, from memory that is not pinned."""
    calls: int
    ms: float


def copy_table(copies: Iterable[tuple[str, int]]) -> list[Copies]:
    """Return copies by direction, the longest first, from names and nanoseconds.

    >>> copy_table([("HtoD", 2_000_000), ("HtoD", 1_000_000)])
    [Copies(what='HtoD', calls=2, ms=3.0)]
    """
    groups: dict[str, list[int]] = {}
    for what, nanoseconds in copies:
        groups.setdefault(what, []).append(nanoseconds)
    table = [Copies(what=what, calls=len(group), ms=sum(group) / 1e6) for what, group in groups.items()]
    return sorted(table, key=lambda row: -row.ms)


def operator_table(calls: Iterable[OperatorCall], *, by_shape: bool = True) -> list[Operator]:
    """Return operators, the most expensive first."""
    groups: dict[tuple[str, tuple[tuple[int, ...], ...]], list[OperatorCall]] = {}
    for call in calls:
        groups.setdefault((call.name, call.shapes if by_shape else ()), []).append(call)
    on_cuda = any(call.self_cuda_ns for group in groups.values() for call in group)
    whole = sum(_cost(call, on_cuda) for group in groups.values() for call in group)
    table = [_operator(name, shapes, group, on_cuda, whole) for (name, shapes), group in groups.items()]
    return sorted(table, key=lambda row: -row.share)


def _cost(call: OperatorCall, on_cuda: bool) -> int:
    return call.self_cuda_ns if on_cuda else call.self_ns


def _operator(
    name: str, shapes: tuple[tuple[int, ...], ...], group: list[OperatorCall], on_cuda: bool, whole: int
) -> Operator:
    flops = sum(call.flops for call in group)
    # An overload that calls another of the same name is one call, and its time must not count twice.
    outer = [call for call in group if call.parent != name]
    return Operator(
        name=name,
        shapes=shapes,
        calls=len(outer),
        self_cpu_ms=sum(call.self_ns for call in group) / 1e6,
        cpu_ms=sum(call.duration_ns for call in outer) / 1e6,
        self_cuda_ms=sum(call.self_cuda_ns for call in group) / 1e6,
        cuda_ms=sum(call.cuda_ns for call in outer) / 1e6,
        self_bytes=sum(call.self_bytes for call in group),
        flops=flops or None,
        share=sum(_cost(call, on_cuda) for call in group) / whole if whole else 0.0,
    )


# --------------------------------------------------------------------------------
# Stacks with the time spent in them, for flame graphs.


def stack_weights(trees: Iterable[ProfileTree]) -> dict[tuple[str, ...], float]:
    """Return microseconds of the operators' own time by stack, outermost first; empty if no stacks were recorded."""
    weights: dict[tuple[str, ...], float] = defaultdict(float)
    for tree in trees:
        for call in tree.calls:
            if call.stack:
                weights[_profiling_stacks_stack(call)] += call.self_ns / 1e3
    return dict(weights)


def module_weights(modules: Iterable[ModuleTime]) -> dict[tuple[str, ...], float]:
    """Return microseconds of modules' own time by path: used where there are no stacks."""
    weights: dict[tuple[str, ...], float] = {}
    for row in modules:
        path = tuple(row.name.split("."))
        weights["forward", *path] = row.self_forward_ms * 1e3
        if row.backward_ms is not None and not any(other.name.startswith(f"{row.name}.") for other in modules):
            weights["backward", *path] = row.backward_ms * 1e3
    return weights


def _profiling_stacks_stack(call: OperatorCall) -> tuple[str, ...]:
    frames: list[Frame] = [frame for frame in reversed(call.stack) if frame.file]
    parts = [f"{frame.function} ({frame})" for frame in frames]
    return (*parts, *([call.parent] if call.parent else []), call.name)
