"""Note every operation of a step: its arguments, which tensor is which value, and what is needed to repeat it.

Tensors are distinguished by identity, and held by weak references: the tape keeps no activation alive. A tensor that
was there before its first use is copied at that moment, if there is room, so that it is saved as it was before any
operation of the step wrote to it.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.core.tape import OPAQUE, Phase, Role, references
from sonde.hooks.autograd_graph import next_sequence, sequence_of
from sonde.hooks.guard import Guard, backward_id, is_capturing
from sonde.hooks.unpack import plain_values
from sonde.hooks.user_line import users_call

PART: Final = "taping operations"
"""What is reported if noting an operation fails."""
MAX_OPS: Final = 20_000
"""Operations of a step that are noted; a step of a large language model has some 10,000."""
MAX_VALUES_BYTES: Final = 64 << 20
MAX_KEPT: Final = 16
"""Elements of a computed tensor that is saved."""
MAX_OUTPUT: Final = 1 << 16
"""Elements of what a model returns that are saved."""
MAX_CONSTANT_BYTES: Final = 16 << 20
_MAX_TEXT: Final = 200
_MAX_ITEMS: Final = 1024
_MAX_WRITES: Final = 64
_PLAIN_CLASSES: Final = (Tensor, Parameter)
_AS_THEY_ARE: Final = frozenset({bool, int, str})


@dataclass(slots=True, eq=False)
class NotedValue:
    """A value while the step runs; see `sonde.core.tape.Value`."""

    role: Role
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage: int
    stride: tuple[int, ...] | None
    requires_grad: bool = False
    made_by: int = -1
    same_as: int = -1
    copy: Tensor | None = None
    """Its content, if it is saved."""


@dataclass(slots=True, eq=False)
class NotedOp:
    """An operation while the step runs; see `sonde.core.tape.Op`."""

    name: str
    args: dict[str, Any]
    module: str
    call: int
    function: str
    line: int
    phase: Phase
    grad_enabled: bool
    is_random: bool
    of: int = -1
    thread: int = 0
    outs: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Entry:
    """Which value a tensor is now."""

    ref: weakref.ref[Tensor]
    value: int
    storage: int
    writes: int
    """How often the storage had been written to when the value was noted."""


@dataclass(slots=True)
class _Storage:
    """Memory that tensors share: how often an operation wrote to it, and which did so last."""

    number: int
    first: weakref.ref[Tensor]
    """The first tensor that was seen to lie in it."""
    last: weakref.ref[Tensor]
    """The one that was seen last."""
    writes: int = 0
    writer: int = -1


@dataclass(frozen=True, slots=True)
class _Schema:
    """What is used of an operation's schema."""

    name: str
    names: tuple[str, ...]
    """Of its arguments."""
    arguments: tuple[tuple[str, Any], ...]
    """The same with packed defaults."""
    written: tuple[str, ...]
    is_random: bool
    is_noted: bool


@dataclass(slots=True, eq=False)
class Place:
    """Where in the program the step is: kept up to date by the recorder's hooks."""

    module: str = ""
    call: int = 0
    optimizers: int = 0
    """How many optimizer steps it is inside of."""
    line: int = -1
    """Of the step of the optimizer that runs: its operations need no line of their own."""
    backwards: int = 0
    hidden: int = 0
    """How many fetches of a batch and compiled modules it is inside of, whose operations are not noted."""
    fetches: int = 0
    """How many fetches of a batch it is inside of."""


@dataclass(slots=True, eq=False)
class Known:
    """What tensors are before the step: by id, with the tensor itself so that the id stays its own."""

    roles: dict[int, tuple[Role, str, Tensor]] = field(default_factory=dict)

    def add(self, role: Role, name: str, tensor: Any) -> None:
        """Set the role of a tensor, unless it has one."""
        if isinstance(tensor, Tensor):
            self.roles.setdefault(id(tensor), (role, name, tensor))


@dataclass(slots=True, eq=False)
class Earlier:
    """What earlier tapes of the run saw, by id, held weakly: it separates carried values from what was always there."""

    computed: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    """What the last one computed and the program still held."""
    given: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    """What they were given."""
    tapes: int = 0

    def has_computed(self, tensor: Tensor) -> bool:
        """Return whether a step computed a tensor that this one is given.

        Either the last tape shows it, or it was not there when the earlier ones were made, and torch allocated it:
        data from numpy or from another process lies in memory that torch cannot resize.
        """
        if _holds(self.computed, tensor):
            return True
        if not self.tapes or _holds(self.given, tensor) or tensor.layout != torch.strided:
            return False
        return type(tensor) is Tensor and tensor.untyped_storage().resizable()


def _holds(refs: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    ref = refs.get(id(tensor))
    return ref is not None and ref() is tensor


class FetchWrites:
    """What is written to in place while a batch is fetched, in memory that was there before: the data set itself.

    A data set that normalises or augments a view of its own data changes it for good, a little more in each epoch.
    """

    def __init__(self, line: Callable[[], int]) -> None:
        self._line = line
        self._made: dict[int, Any] = {}
        """Memory of tensors that were made during the fetch, held so that no other gets its address."""
        self.found: dict[tuple[str, int], tuple[int, int]] = {}
        """By operation and line: elements that were written to at once, and elements of all that memory."""

    def before(self, schema: _Schema, args: tuple[Any, ...]) -> None:
        """Look at an operation that is about to run."""
        target = args[0] if schema.written and args else None
        if type(target) is not Tensor or target.layout != torch.strided:
            return
        memory = target.untyped_storage()
        # Memory of numpy may have been made a moment ago, which is not seen here.
        if memory.data_ptr() not in self._made and memory.resizable() and len(self.found) < _MAX_WRITES:
            kind = schema.name.split(".")[1]
            self.found.setdefault((kind, self._line()), (target.numel(), memory.nbytes() // target.itemsize))

    def after(self, args: tuple[Any, ...], result: Any) -> None:
        """Remember the memory of what an operation has made; a view is in that of its argument."""
        given = {each.untyped_storage().data_ptr() for each in _tensors(args) if each.layout == torch.strided}
        for each in _tensors(result):
            memory = each.untyped_storage() if each.layout == torch.strided else None
            if memory is not None and memory.data_ptr() not in given and len(self._made) < MAX_OPS:
                self._made[memory.data_ptr()] = memory

    def end(self) -> None:
        """Forget what a fetch has made."""
        self._made.clear()


class Operations:
    """The operations and values of one step, in order.

    Args:
        known: What tensors are that were there before.
        guard: Guards the notes of each operation.
        earlier: What earlier tapes saw.
        save: Whether to keep copies of what the step begins with.
        max_bytes: Bound of those copies.

    """

    def __init__(
        self,
        known: Known,
        guard: Guard,
        earlier: Earlier,
        *,
        save: bool = True,
        max_bytes: int = MAX_VALUES_BYTES,
    ) -> None:
        self.values: list[NotedValue] = []
        self.ops: list[NotedOp] = []
        self.lines: dict[tuple[str, int, str], int] = {}
        self.place = Place()
        self.known = known
        self.truncated = ""
        self.left_out: dict[Role, int] = {}
        """By role: values that were not saved for lack of room."""
        self.seconds = 0.0
        """What the notes have cost."""
        self.saved_bytes = 0
        self._large: set[int] = set()
        self.opaque: list[str] = []
        """What ran unseen."""
        self._max_bytes = max_bytes if save else 0
        self._read_schema = guard.wrap(PART, _read_schema)
        self._note_call = guard.catch(PART, self._look)
        self._note_result = guard.catch(PART, self._after)
        self.fetch_writes = FetchWrites(self.line)
        self._see_fetched = guard.catch(PART, self.fetch_writes.after)
        self._earlier = earlier
        self._entries: dict[int, _Entry] = {}
        self._storages: dict[int, _Storage] = {}
        self._numbers: list[_Storage] = []
        self._by_sequence: dict[int, int] = {}
        self._line_of: dict[tuple[CodeType, int], int] = {}
        self._threads: dict[int, int] = {threading.get_ident(): 0}

    # ------------------------------------------------------------------ running operations

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it. An error while recording ends the tape, not the operation."""
        noted: list[tuple[NotedOp, _Schema]] = []
        self._note_call(noted, func, args, kwargs)
        result = func(*args, **kwargs)
        if noted:
            self._note_result(*noted[0], args, kwargs, result)
        elif self.place.fetches:
            self._see_fetched(args, result)
        return result

    def _look(
        self, into: list[tuple[NotedOp, _Schema]], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note an operation that is about to run, if operations are noted now."""
        if self.truncated or (self.place.hidden and not self.place.fetches) or is_capturing():
            return
        schema = _SCHEMAS.get(func)
        if schema is None:
            self._read_schema(func)
            schema = _SCHEMAS.get(func)
        if schema is None or not schema.is_noted:
            return
        if self.place.fetches:
            self.fetch_writes.before(schema, args)
            return
        began = perf_counter()
        if len(self.ops) >= MAX_OPS:
            self.truncated = f"the step has more than {MAX_OPS:,} operations"
            return
        into.append((self._before(schema, args, kwargs), schema))
        self.seconds += perf_counter() - began

    def _before(self, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NotedOp:
        packed = self._pack_arguments(schema, args, kwargs)
        if schema.name == _FRESH:  # a tensor that `torch.tensor` has just made
            self.values[packed["self"]["v"]].role = "constant"
        here = self.place
        in_backward = backward_id() != -1
        phase: Phase = "backward" if in_backward or here.backwards else "optimizer" if here.optimizers else "between"
        grad_enabled = torch.is_grad_enabled()
        noted = NotedOp(
            schema.name, packed, here.module, here.call, "", -1, phase, grad_enabled, _draws(schema, packed)
        )
        if in_backward:
            self._place_backward(noted)
        if noted.of < 0:
            noted.line, noted.function = (here.line, "") if phase == "optimizer" and here.line >= 0 else self._line()
        if grad_enabled:
            # The node of an operation is made before it runs; later ones that make none find the same number.
            self._by_sequence.setdefault(next_sequence() - 1, len(self.ops))
        return noted

    def _pack_arguments(self, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        for name, value in zip(schema.names, args, strict=False):
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                packed[name] = {"v": self.value_of(value)}
            elif value is not None:
                packed[name] = value if kind in _AS_THEY_ARE else self._pack(value)
        for name, default in schema.arguments[len(args) :]:
            value = self._pack(kwargs[name]) if name in kwargs else default
            if value is not None:
                packed[name] = value
        for place in range(len(schema.arguments), len(args)):  # a higher-order operator has no schema
            packed[str(place)] = self._pack(args[place])
        return packed

    def _place_backward(self, noted: NotedOp) -> None:
        node: Any = torch._C._current_autograd_node()
        forward = -1 if node is None else self._by_sequence.get(sequence_of(node), -1)
        if 0 <= forward < len(self.ops):  # one that took a part of a data set is not noted
            made = self.ops[forward]
            noted.of, noted.line, noted.function = forward, made.line, made.function
            noted.module, noted.call = made.module, made.call
        noted.thread = self._threads.setdefault(threading.get_ident(), len(self._threads))

    def _after(
        self, noted: NotedOp, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        began = perf_counter()
        if not self._large or not self._takes_part(noted, schema, result):
            self._note_outcome(noted, schema, args, kwargs, result)
        self.seconds += perf_counter() - began

    def _note_outcome(
        self, noted: NotedOp, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        index = len(self.ops)
        self.ops.append(noted)
        if schema.written:
            noted.writes = tuple(self._write(each, index) for each in _written(noted, schema, args, kwargs))
        outs = (result,) if type(result) is Tensor else _tensors(result)
        noted.outs = tuple([self._out(each, index) for each in outs])
        if noted.is_random:
            for value, tensor in zip(noted.outs, _tensors(result), strict=True):
                self._note_random(value, tensor, schema)

    def _takes_part(self, noted: NotedOp, schema: _Schema, result: Any) -> bool:
        """Return whether an operation took a part of data that is too large to save, such as a batch of a data set.

        The part is then given instead, as if it came from a loader: the step can be repeated from there.
        """
        if self._large.isdisjoint(each for given in noted.args.values() for each in references(given)):
            return False
        parts = _tensors(result)
        if schema.written or any(each.numel() * each.element_size() > MAX_CONSTANT_BYTES for each in parts):
            self.left_out["constant"] = self.left_out.get("constant", 0) + 1
            return False
        for each in parts:
            storage = self._storage_of(each)
            value = self._put(each, "constant", "", storage.number)
            self._save(self.values[value], each)
            self._enter(each, value, storage)
        return True

    def _note_random(self, value: int, tensor: Tensor, schema: _Schema) -> None:
        about = self.values[value]
        # Of a dropout the mask is random, and what it lets through is computed.
        if schema.name.startswith("aten.native_dropout") and about.dtype is not torch.bool:
            return
        if about.role == "computed":
            about.role = "random"
        self._save(about, tensor)

    # ------------------------------------------------------------------ which tensor is which value

    def value_of(self, tensor: Tensor) -> int:
        """Return the value that a tensor is now; noted as given if it was not seen before."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry.ref() is not tensor:
            return self._given(tensor)
        storage = self._numbers[entry.storage]
        if entry.writes != storage.writes:  # it was written to by way of another tensor
            entry.value = self._again(entry.value, storage.writer)
            entry.writes = storage.writes
        if tensor.requires_grad:
            self.values[entry.value].requires_grad = True
        return entry.value

    def peek(self, tensor: Tensor) -> int:
        """Return the first value that a tensor was in this step; -1 if it was not used."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry.ref() is not tensor:
            return -1
        value = entry.value
        while self.values[value].same_as >= 0:
            value = self.values[value].same_as
        return value

    def unknown_leaves(self) -> list[tuple[Tensor, NotedValue]]:
        """Return the tensors of no known owner that were there before, get gradients, and are still alive."""
        found = ((entry.ref(), self.values[entry.value]) for entry in self._entries.values())
        return [
            (tensor, value)
            for tensor, value in found
            if tensor is not None
            and value.role == "constant"
            and value.made_by < 0
            and tensor.is_leaf
            and tensor.requires_grad
        ]

    def remember(self) -> Earlier:
        """Return what this tape saw and the program still holds, together with what earlier ones were given."""
        alive = [(key, entry) for key, entry in self._entries.items() if entry.ref() is not None]
        computed = {key: entry.ref for key, entry in alive if self.values[entry.value].made_by >= 0}
        given = {key: entry.ref for key, entry in alive if self.values[entry.value].made_by < 0}
        given |= {key: ref for key, ref in self._earlier.given.items() if ref() is not None}
        return Earlier(computed, given, self._earlier.tapes + 1)

    def _given(self, tensor: Tensor) -> int:
        """Note a tensor that no operation of the step made, as far as is known."""
        storage = self._storage_of(tensor)
        alias = self._same_memory(tensor, storage)
        if alias >= 0 and id(tensor) not in self.known.roles:
            # Another tensor over exactly the same memory: `.data`, what autograd saved.
            before = self.values[alias]
            value = self._put(tensor, before.role, before.name, storage.number)
            self.values[value].same_as = alias
            self.values[value].made_by = before.made_by
        else:
            role, name = self._role_of(tensor)
            value = self._put(tensor, role, name, storage.number)
            self._save(self.values[value], tensor)
            if role in ("constant", "carried") and tensor.numel() * tensor.element_size() > MAX_CONSTANT_BYTES:
                self._large.add(value)
            if storage.writes:
                self.values[value].made_by = storage.writer
        self._enter(tensor, value, storage)
        return value

    def _role_of(self, tensor: Tensor) -> tuple[Role, str]:
        known = self.known.roles.get(id(tensor))
        if known is not None:
            return known[0], known[1]
        if isinstance(tensor, Parameter):
            return "parameter", ""
        if tensor.grad_fn is not None or self._earlier.has_computed(tensor):
            return "carried", ""
        return "constant", ""

    def _same_memory(self, tensor: Tensor, storage: _Storage) -> int:
        """Return the value of a living tensor that covers exactly the same memory, or -1."""
        for other in (storage.first(), storage.last()):
            if other is not None and other is not tensor and id(other) in self._entries and _are_alike(other, tensor):
                return self.value_of(other)
        return -1

    def _out(self, tensor: Tensor, index: int) -> int:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.ref() is tensor:
            return entry.value  # it returned an argument
        storage = self._storage_of(tensor)
        value = self._put(tensor, "computed", "", storage.number)
        self.values[value].made_by = index
        self._enter(tensor, value, storage)
        return value

    def _write(self, tensor: Tensor, index: int) -> int:
        self.value_of(tensor)
        entry = self._entries[id(tensor)]
        storage = self._numbers[entry.storage]
        storage.writes += 1
        storage.writer = index
        entry.value = self._again(entry.value, index)
        entry.writes = storage.writes
        about = self.values[entry.value]
        shape = tuple(tensor.shape)
        if about.shape != shape:  # such as transpose_
            about.shape = shape
            about.stride = None if tensor.is_contiguous() else tuple(tensor.stride())
        return entry.value

    def _again(self, value: int, writer: int) -> int:
        """Note that a value has got another content."""
        before = self.values[value]
        keeps = before.role in ("parameter", "buffer", "gradient", "optimizer_state")
        self.values.append(
            NotedValue(
                before.role if keeps else "computed",
                before.name,
                before.shape,
                before.dtype,
                before.device,
                before.storage,
                before.stride,
                before.requires_grad,
                made_by=writer,
                same_as=value,
            )
        )
        return len(self.values) - 1

    def _put(self, tensor: Tensor, role: Role, name: str, storage: int) -> int:
        strided = tensor.layout == torch.strided
        stride = None if not strided or tensor.is_contiguous() else tuple(tensor.stride())
        shape = tuple(plain_values(tensor).shape)
        self.values.append(
            NotedValue(role, name, shape, tensor.dtype, tensor.device, storage, stride, tensor.requires_grad)
        )
        return len(self.values) - 1

    def _enter(self, tensor: Tensor, value: int, storage: _Storage) -> None:
        ref = storage.last = weakref.ref(tensor)
        self._entries[id(tensor)] = _Entry(ref, value, storage.number, storage.writes)

    def _storage_of(self, tensor: Tensor) -> _Storage:
        """Return the memory a tensor lies in. An address may have been used before by memory that is gone."""
        key = _storage_key(tensor)
        known = self._storages.get(key)
        others = () if known is None else (known.last(), known.first())
        if known is not None and any(other is not None and _storage_key(other) == key for other in others):
            return known
        ref = weakref.ref(tensor)
        storage = _Storage(len(self._numbers), ref, ref)
        self._storages[key] = storage
        self._numbers.append(storage)
        return storage

    def _save(self, value: NotedValue, tensor: Tensor) -> None:
        is_plain = type(tensor) in _PLAIN_CLASSES and tensor.layout == torch.strided and not tensor.is_nested
        if not is_plain or tensor.device.type == "meta":
            return
        size = tensor.numel() * tensor.element_size()
        if value.role in ("constant", "carried") and size > MAX_CONSTANT_BYTES:
            return  # usually a whole data set: see `_takes_part`
        if self.saved_bytes + size <= self._max_bytes:
            self.saved_bytes += size
            value.copy = tensor.detach().clone()
        else:
            self.left_out[value.role] = self.left_out.get(value.role, 0) + 1

    def keep(self, tensor: Tensor, most: int = MAX_KEPT) -> None:
        """Save a small tensor that was computed: a loss, so that a repetition can be compared with it, or an output."""
        value = self.values[self.value_of(tensor)]
        if value.copy is None and tensor.numel() <= most:
            self._save(value, tensor)

    def add_opaque(self, what: str, args: dict[str, Any], tensors: list[Tensor]) -> None:
        """Note that something unseen, such as compiled code, made tensors of what it was given."""
        unseen = [each for each in tensors if not self._is_seen(each)]
        if not unseen or self.truncated:
            return
        here = self.place
        noted = NotedOp(
            OPAQUE, {"what": what, **args}, here.module, here.call, "", self.line(), "between", True, is_random=False
        )
        index = len(self.ops)
        self.ops.append(noted)
        self.opaque.append(what)
        noted.outs = tuple(self._out(each, index) for each in unseen)

    def _is_seen(self, tensor: Tensor) -> bool:
        entry = self._entries.get(id(tensor))
        if entry is not None and entry.ref() is tensor:
            return True
        return tensor.grad_fn is None or self._same_memory(tensor, self._storage_of(tensor)) >= 0

    # ------------------------------------------------------------------ arguments and lines

    def _pack(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"v": self.value_of(value)}
        if isinstance(value, list | tuple):
            return [self._pack(each) for each in value[:_MAX_ITEMS]]
        return pack_plain(value)

    def line(self) -> int:
        """Return the number of the user's line that is running, or -1."""
        return self._line()[0]

    def _line(self) -> tuple[int, str]:
        """Return the number of the user's line that is running, and the function of torch that it called."""
        frame, function = users_call(sys._getframe(2))
        if frame is None:
            return -1, function
        key = (frame.f_code, frame.f_lineno)
        line = self._line_of.get(key)
        if line is None:
            place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
            line = self._line_of[key] = self.lines.setdefault(place, len(self.lines))
        return line, function


def pack_plain(value: Any) -> Any:
    """Return a value that is not a tensor in the form that `sonde.core.tape` describes."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, int | str):  # a subclass, such as an enumeration
        return int(value) if isinstance(value, int) else str(value)
    for kind, name in _NAMED:
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.Generator):
        return {"generator": True}
    if isinstance(value, list | tuple):
        return [pack_plain(each) for each in value[:_MAX_ITEMS]]
    return {"opaque": type(value).__qualname__[:_MAX_TEXT]}


_NAMED: Final = (
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
)
# Their schemas do not say that they write the running statistics, which they do in training.
_BATCH_NORMS: Final = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
_RUNNING: Final = ("running_mean", "running_var")
_FRESH: Final = "aten.lift_fresh.default"
_SCHEMAS: Final[dict[Any, _Schema]] = {}


def _read_schema(func: Any) -> None:
    schema = getattr(func, "_schema", None)
    if schema is None:
        made = _Schema(str(func), (), (), (), False, True)
    else:
        arguments = tuple((each.name, _default(each)) for each in schema.arguments)
        written = tuple(
            each.name
            for each in schema.arguments
            if (each.alias_info is not None and each.alias_info.is_write)
            or (schema.name in _BATCH_NORMS and each.name in _RUNNING)
        )
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        names = tuple(each.name for each in schema.arguments)
        made = _Schema(str(func), names, arguments, written, is_random, func.namespace != "profiler")
    _SCHEMAS[func] = made


def _written(noted: NotedOp, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for place, name in enumerate(schema.names):
        if name in schema.written and not (name in _RUNNING and noted.args.get("training") is False):
            yield from _tensors(args[place] if place < len(args) else kwargs.get(name))


def _default(argument: Any) -> Any:
    # The default of a type is a number that only torch understands; left out, the operation takes it by itself.
    is_type = str(argument.real_type).startswith(("ScalarType", "Layout", "MemoryFormat", "Device"))
    return None if is_type else pack_plain(argument.default_value)


def _draws(schema: _Schema, args: dict[str, Any]) -> bool:
    """Return whether an operation draws random numbers: attention without dropout does not, though it may."""
    if not schema.is_random or args.get("train") is False or args.get("training") is False:
        return False
    return args.get("dropout_p", 1) not in (0, 0.0)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors in one memory cover the same part of it in the same way."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != torch.strided:
        return False
    return one.stride() == other.stride() and one.storage_offset() == other.storage_offset()


def _storage_key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # NotImplementedError is one: sparse tensors, subclasses
        return -id(tensor)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for item in value for each in _tensors(item)]
    return []
