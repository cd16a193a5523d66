"""Repeat a computation operation by operation, and note every operation whose result is not finite.

Two modes of torch work together: one sees each operation as the kernel gets it (`aten.log.default`), the other the
function the program called (`log`) and its line. What one bad result led to is followed by storage, so that the origin
of a NaN can be distinguished from what only passes it on, and from an infinity that was meant (a mask).
"""

from __future__ import annotations

import bisect
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.errors import SondeError
from sonde.forensics.values import INF, NAN, badness, is_masking
from sonde.hooks.autograd_graph import next_sequence, sequence_of
from sonde.hooks.guard import UNGUARDED
from sonde.hooks.on_call import ModuleCalls
from sonde.hooks.user_line import Line, current_line

Stage = Literal["forward", "backward"]

# Operations that talk to other processes.
_COLLECTIVES: Final = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"}
)

# These make room and leave in it whatever was there.
_UNFILLED: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
)
# These overwrite all they are given, so what was there does not count.
_OVERWRITING: Final = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "geometric_", "set_"}
)


class NotAlone(SondeError):
    """A computation that is repeated was about to talk to other processes, which do not repeat it and would hang."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """A tensor that was there before the computation began: an input, a parameter, a buffer, a constant."""

    role: Literal["input", "parameter", "buffer", "other"]
    name: str
    tensor: Tensor
    badness: int

    @property
    def is_intended(self) -> bool:
        """Return whether its infinities look meant: an additive mask, a constant of the program's."""
        return not self.badness & NAN and (self.role == "other" or is_masking(self.tensor))


@dataclass(frozen=True, slots=True)
class Call:
    """A torch function as the program called it."""

    name: str
    line: Line | None
    module: str


@dataclass(slots=True, eq=False)
class Operation:
    """An operation whose result is not finite."""

    index: int
    op: str
    badness: int
    module: str
    call: Call | None
    line: Line | None
    stage: Stage
    node: str = ""
    """In a backward pass: the autograd node that ran it, such as `SqrtBackward0`."""
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    output: Tensor | None = None
    parents: list[tuple[Operation | Given, int]] = field(default_factory=list)
    """Where its bad inputs came from, and what was bad about them."""
    roots: dict[int, Operation | Given] = field(default_factory=dict)
    """Where its NaN, and where its infinity began."""

    @property
    def name(self) -> str:
        """The operation without its namespace and overload: `log`."""
        return self.op.split(".")[1] if self.op.count(".") else self.op

    @property
    def is_intended(self) -> bool:
        """Return whether it was asked to write an infinity: `masked_fill(..., -inf)`, `full(..., inf)`."""
        return not self.badness & NAN and any(
            isinstance(value, float) and math.isinf(value) for value in self.scalars.values()
        )


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """Where something non-finite began, and what was seen of it later."""

    source: Operation | Given
    symptom: Operation | None = None
    """The operation that turned an infinity of the origin into NaN."""


class Trace:
    """What is seen while a computation is repeated inside `scope`."""

    def __init__(self, names: dict[int, str], boundary: frozenset[CodeType]) -> None:
        self.stage: Stage = "forward"
        self.operations: list[Operation] = []
        self.count = 0
        self._names = names
        self._boundary = boundary
        self._stack: list[str] = []
        self._calls: list[Call] = []
        self._made: dict[int, tuple[Operation | Given, Tensor]] = {}
        self._sequence: list[int] = []
        self._sequence_calls: list[Call] = []

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Watch what runs inside."""
        enter, leave = (UNGUARDED.wrap("tracing", each) for each in (self._enter, self._leave))
        calls: ModuleCalls[nn.Module] = ModuleCalls(None, enter, leave, raised=leave)
        calls.attach()
        try:
            with _Functions(self), _Operations(self):
                yield
        finally:
            calls.remove()

    def give(
        self,
        role: Literal["input", "parameter", "buffer"],
        name: str,
        tensor: Tensor,
        copy: Tensor | None = None,
    ) -> None:
        """Name a tensor that the computation begins with, or a copy of it."""
        bad = badness(tensor)
        if bad:
            used = tensor if copy is None else copy
            self._made[_key(used)] = (Given(role, name, tensor, bad), used)

    def source_of(self, tensor: Tensor) -> Operation | Given | None:
        """Return what made a tensor that is not finite."""
        known = self._made.get(_key(tensor))
        return None if known is None else known[0]

    def call_of(self, sequence: int) -> Call | None:
        """Return the call that made the autograd node with this sequence number."""
        index = bisect.bisect_right(self._sequence, sequence)
        return self._sequence_calls[index] if index < len(self._sequence_calls) else None

    # ------------------------------------------------------------------ what the modes report

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function of the program's."""
        outer = self._calls[-1] if self._calls else None
        name = getattr(function, "__name__", str(function))
        call = outer or Call(name, current_line(self._boundary), self.module)
        self._calls.append(call)
        try:
            return function(*args, **kwargs)
        finally:
            self._calls.pop()
            after = next_sequence()
            if not self._sequence or after > self._sequence[-1]:
                self._sequence.append(after)
                self._sequence_calls.append(call)

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note it if its result is not finite.

        Raises:
            NotAlone: It would talk to other processes.

        """
        if op.namespace in _COLLECTIVES:
            raise NotAlone(f"{op} talks to other processes: this step cannot be repeated by one of them alone.")
        self.count += 1
        name = op._schema.name.partition("::")[2]
        inputs, written = _inputs(op, args, kwargs)
        if name in _OVERWRITING or "out" in op._overloadname:
            inputs = [item for item in inputs if not any(item[1] is each for each in written)]
        before = {id(each): each.clone() for each in written if any(each is value for _, value in inputs)}
        result = op(*args, **kwargs)
        if name in _UNFILLED:
            return result
        marred = [(output, bad) for output in _tensors(result) or written if (bad := badness(output))]
        if marred:
            seen = [(label, before.get(id(value), value)) for label, value in inputs]
            operation = self._note(op, marred[0][1], marred[0][0], inputs, seen, _scalars(op, args, kwargs))
            # Extra outputs, such as the spread that a norm keeps for its backward, come from no input.
            self._made |= {_key(output): (operation, output) for output, _ in marred[1:]}
        return result

    @property
    def module(self) -> str:
        """The module that is running."""
        return self._stack[-1] if self._stack else ""

    def _note(
        self,
        op: Any,
        bad: int,
        output: Tensor,
        inputs: list[tuple[str, Tensor]],
        seen: list[tuple[str, Tensor]],
        scalars: dict[str, Any],
    ) -> Operation:
        call = self._calls[-1] if self._calls else None
        operation = Operation(
            index=self.count,
            op=str(op),
            badness=bad,
            module=self.module,
            call=call,
            line=current_line(self._boundary) or (call.line if call else None),
            stage=self.stage,
            scalars=scalars,
        )
        if self.stage == "backward":
            self._place_in_backward(operation)
        for (_, now), (_, then) in zip(inputs, seen, strict=True):
            bad_input = badness(then)
            if bad_input:
                known = self._made.get(_key(now))
                source = known[0] if known else Given("other", "", then, bad_input)
                operation.parents.append((source, bad_input))
        inherited = 0
        for _, kind in operation.parents:
            inherited |= kind
        if bad & ~inherited:
            # Only what begins here needs its values later. They are copied: the program may write over them.
            operation.inputs = [(label, value.detach().clone()) for label, value in seen]
            operation.output = output.detach().clone()
        set_roots(operation)
        self.operations.append(operation)
        self._made[_key(output)] = (operation, output)
        return operation

    def _place_in_backward(self, operation: Operation) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        operation.node = node.name()
        made_by = self.call_of(sequence_of(node))
        if made_by is not None:
            operation.call = made_by
            operation.module = made_by.module
            operation.line = operation.line or made_by.line
        if hasattr(node, "_forward_cls") and not operation.line:
            operation.call = None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self.module))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._stack:
            self._stack.pop()


def find_root(source: Operation | Given) -> Root:
    """Follow what is bad back to where it began.

    A NaN is followed through NaNs. Where it appears out of infinities, they are followed on to what made them, unless
    they were meant: then the operation that could not cope with them is the origin.
    """
    if isinstance(source, Given):
        return Root(source)
    if not source.badness & NAN:
        return Root(_follow(source, INF))
    first = _follow(source, NAN)
    if isinstance(first, Given):
        return Root(first)
    for parent, bad in first.parents:
        if bad & INF:
            made = parent if isinstance(parent, Given) else _follow(parent, INF)
            if not made.is_intended:
                return Root(made, symptom=first)
    return Root(first)


def set_roots(operation: Operation) -> None:
    """Note where what is bad about an operation's result began, from what is known of its inputs."""
    for kind in (NAN, INF):
        if operation.badness & kind:
            roots = [_follow(parent, kind) for parent, bad in operation.parents if bad & kind]
            operation.roots[kind] = min(roots, key=_rank, default=operation)


def _follow(source: Operation | Given, kind: int) -> Operation | Given:
    return source.roots[kind] if isinstance(source, Operation) and kind in source.roots else source


def _rank(source: Operation | Given) -> int:
    """Return which of several origins to name: what was given comes first, then operations in their order.

    Buffers come last, since the pass that is repeated has written bad values into them itself (running means).
    """
    if isinstance(source, Operation):
        return source.index
    return sys.maxsize if source.role == "buffer" else -1


class _Functions(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.run(func, args, kwargs or {})


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _inputs(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
    inputs: list[tuple[str, Tensor]] = []
    written: list[Tensor] = []
    for index, argument in enumerate(op._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found = _tensors(value)
        inputs += [(argument.name, tensor) for tensor in found]
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += found
    return inputs, written


def _scalars(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for index, argument in enumerate(op._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        if isinstance(value, bool | int | float | str) or (
            isinstance(value, list) and all(isinstance(item, int | float) for item in value)
        ):
            found[argument.name] = value
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, Tensor)]
    return []
