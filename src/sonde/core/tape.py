"""The tape of one training step: every operation, where its arguments come from, and in which order things happened.

A tape is plain data. The recorder (`sonde.forensics.tape`) writes it; reading it needs no torch. It lies in a
folder of the run:

    tapes/step_20/tape.json             values, operations, marks, lines
    tapes/step_20/tensors.safetensors   the tensors that were saved, each named `v` and the id of its value

Values are numbered in the order in which they were first seen. A tensor that is written to becomes a new value, whose
`same_as` is the value that it was before: each value has one content, whatever the program does in place.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sonde.core import files
from sonde.core.files import Natural
from sonde.errors import OptionError, RunDamaged, RunNotFound

FORMAT: Final = 1
FOLDER: Final = "tapes"
INFO: Final = "tape.json"
TENSORS: Final = "tensors.safetensors"
MAX_TENSOR_BYTES: Final = 192 << 20
"""The largest file of tensors that is read; the recorder stays far below it."""

OPAQUE: Final = "sonde.opaque.default"
"""A placeholder for code whose operations are not seen: compiled, or run in other threads."""

Role = Literal[
    "parameter",  # of a watched model, or a leaf that an optimizer holds
    "buffer",
    "input",  # data that a model was called with
    "target",  # data that reaches the loss without passing a model
    "batch",  # came from the data loader, and is neither of the two above
    "carried",  # computed in an earlier step and kept
    "constant",  # anything else that was there before its first use
    "random",  # drawn in this step
    "computed",
    "gradient",  # of a parameter: its `.grad`
    "optimizer_state",
]
Phase = Literal["forward", "backward", "optimizer", "between"]
Reason = Literal["early", "suspected", "turn", "asked"]
REASONS: Final[dict[str, str]] = {
    "early": "one of the first steps",
    "suspected": "something was found",
    "turn": "an optimizer had its turn",
    "asked": "asked for",
}
"""Why a step was taped, in words."""
MarkKind = Literal[
    "module_enter",
    "module_exit",
    "backward",
    "backward_end",
    "optimizer_enter",
    "optimizer_exit",
    "zero_grad",
    "scheduler_step",
    "clip",
    "loader_next",
    "data_write",
    "train",
    "eval",
]


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tensor of the step, with one content: a tensor that is written to becomes another value."""

    id: Natural
    """Its place in `Tape.values`."""
    role: Role
    name: str = ""
    """What the program calls it: `fc.weight`, `batch[0]`, `fc.weight.grad`; empty if unknown."""
    shape: tuple[Natural, ...] = ()
    dtype: str = ""
    """As torch names it, without `torch.`: `float32`, `int64`, `bool`."""
    device: str = "cpu"
    requires_grad: bool = False
    storage: Natural = 0
    """Values with the same number share memory."""
    stride: tuple[int, ...] | None = None
    """None for a contiguous tensor."""
    made_by: int = -1
    """The index of the operation that computed it or wrote to it last; -1 for what was there before its first use."""
    same_as: int = -1
    """The value that the same tensor (or another tensor over exactly the same memory) was before, or -1."""
    saved: bool = False
    """Whether its content is in the file: for a value that no operation made, as it was when it was first used."""

    @property
    def is_given(self) -> bool:
        """Whether no operation of the tape made it."""
        return self.made_by < 0

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@functools.lru_cache(4096)
def _kind_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


class Op(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An ATen operation as the kernel got it."""

    index: Natural
    """Its place in `Tape.ops`."""
    name: str
    """Such as `aten.addmm.default`."""
    args: dict[str, Any] = {}
    """Its arguments by the names of its schema, defaults included (None is left out). Below stands their form."""
    outs: tuple[Natural, ...] = ()
    """The tensors that it returned, in order; nested results are flattened, None is left out."""
    writes: tuple[Natural, ...] = ()
    """The values that arguments became which it wrote to; an in-place operation also returns them."""
    module: str = ""
    """The path of the module that was running: `encoder.0.attention`, `(model)` for a whole model, `<MSELoss>` for a
    module that belongs to no watched model; empty outside all modules."""
    call: Natural = 0
    """Which call of that module in this step, counted from 0."""
    function: str = ""
    """The Python function of torch that the user's line called, if there is one: `cross_entropy`, `clip_grad_norm_`."""
    line: int = -1
    """The index in `Tape.lines` of the user's line; of a backward operation, the line of its forward operation."""
    phase: Phase = "forward"
    """`forward`: it ran in a module, or a loss depends on it. `between`: all else outside backward and optimizer."""
    grad_enabled: bool = True
    of: int = -1
    """Of a backward operation: the index of the forward operation whose gradient it computes, or -1."""
    is_random: bool = False
    thread: Natural = 0
    """0 for the thread that trains; others are torch's backward threads."""

    @property
    def kind(self) -> str:
        """The operation without its namespace and overload: `addmm`, `relu_`."""
        return _kind_of(self.name)

    @property
    def in_model(self) -> bool:
        """Whether it ran inside a watched model."""
        return self.module != "" and not self.module.startswith("<")

    def inputs(self) -> list[tuple[str, int]]:
        """Return the tensors it was given: the name of the argument, and the id of the value."""
        return [(name, value) for name, given in self.args.items() for value in references(given)]

    def input(self, name: str) -> int | None:
        """Return the id of the value that one argument is, or None if that is not a tensor."""
        return next((value for value in references(self.args.get(name))), None)


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened between two operations.

    What `data` holds, by kind:

    - `module_enter`: `path`, `class`, `training`, `call` (number), `args` (values by their place in the call), `root`
    - `module_exit`: `path`, `call`, `args` (named ones too), `outs` (values by their place in the output), `raised`
    - `backward`: `roots`, `create_graph`, `gradients` (given for the roots); with `inputs` it is `torch.autograd.grad`
    - `backward_end`: `reached` (by the name of a parameter: its gradient)
    - `optimizer_enter`: `name`, `class`, `gradients` (by the name of a parameter: its gradient)
    - `optimizer_exit`: `name`
    - `zero_grad`: `owner`, `class`, `set_to_none`; `scheduler_step`: `class`, `lr`; `clip`: `max_norm`, `kind`
    - `data_write`: `operation`, `size` (elements), `of` (elements of that memory): data that was there before was
      written to in place while a batch was fetched
    - `loader_next`: `values` (by their place in the batch), and where the program collates batches itself `batch_size`
      (0 if the loader does not say); `train`, `eval`: `path`, `class`

    A value is `{"v": id}`.
    """

    index: Natural
    """The index of the operation before which it happened."""
    kind: MarkKind
    data: dict[str, Any] = {}
    line: int = -1


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A line of the user's program."""

    file: str
    line: Natural
    function: str = ""
    text: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


class ModuleInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A module of a watched model, as it was when the step began."""

    path: str
    kind: str
    """Its class."""
    training: bool = True
    settings: dict[str, Any] = {}
    """Its public attributes that are plain values, such as `p`, `eps`, `num_heads`, `inplace`."""
    unread: tuple[str, ...] = ()
    """Arguments that the code of its `forward` never reads, by name and by place: `t`, `[1]`."""


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A parameter group of an optimizer, as it was when the step began."""

    settings: dict[str, Any] = {}
    parameters: tuple[int, ...] = ()
    """Ids of values; -1 for parameters that were not used in the step."""
    names: tuple[str, ...] = ()


class OptimizerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An optimizer, as it was when the step began."""

    name: str
    kind: str
    """Its class, with its module: `torch.optim.adamw.AdamW`."""
    groups: tuple[GroupInfo, ...] = ()
    state: dict[str, dict[str, Any]] = {}
    """By the name of a parameter: its state; a tensor as `{"v": id}`. What was not used in the step is left out."""


class Tape(msgspec.Struct, dict=True, kw_only=True, omit_defaults=True):
    """The record of one step, from the end of the optimizer step before it to the end of its own."""

    step: Natural
    reason: Reason = "early"
    values: tuple[Value, ...] = ()
    ops: tuple[Op, ...] = ()
    marks: tuple[Mark, ...] = ()
    lines: tuple[Line, ...] = ()
    modules: tuple[ModuleInfo, ...] = ()
    attributes: dict[str, dict[str, Any]] = {}
    """By the name of a parameter: attributes that the program has set on it, as far as they are plain values."""
    optimizers: tuple[OptimizerInfo, ...] = ()
    truncated: str = ""
    """Why the rest of the step is missing, if it is."""
    incomplete: str = ""
    """Why the step cannot be repeated from the tape, if so: tensors that did not fit, parts that were compiled."""
    seconds: float = 0.0
    """What taping added to the step, as far as the recorder's own clock tells."""
    tensor_bytes: Natural = 0
    versions: dict[str, str] = {}
    """Of `torch`, `python` and `sonde`."""
    settings: dict[str, Any] = {}
    """`threads`, `autocast` (by type of device, when the model was called), `deterministic`."""
    format: int = FORMAT

    # ------------------------------------------------------------------ files

    folder: str = ""
    """Where it was read from."""

    def tensor(self, value: int) -> NDArray[Any] | None:
        """Return the content of a value, or None if it was not saved.

        Raises:
            RunDamaged: The file of tensors cannot be read.

        """
        return self.tensors.get(f"v{value}")

    @functools.cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """All tensors that were saved, by name: `v` and the id of the value; `random.cpu` is the generator's state."""
        path = Path(self.folder) / TENSORS
        return read_tensors(path) if self.folder and path.is_file() else {}

    # ------------------------------------------------------------------ what values are made of

    def value(self, value: int) -> Value:
        """Return a value by its id."""
        return self.values[value]

    def producer(self, value: int) -> Op | None:
        """Return the operation that made a value, or wrote to it last; None for what was given."""
        made_by = self.values[value].made_by
        return self.ops[made_by] if made_by >= 0 else None

    def sources(self, value: int) -> list[int]:
        """Return what a value was directly made of.

        These are the tensors that its operation got; for one that was written to, also what it was before.
        """
        return self._sources[value]

    def consumers(self, value: int) -> list[Op]:
        """Return the operations that were given a value."""
        return [self.ops[index] for index in self._uses.get(value, ())]

    def becomes(self, value: int) -> list[int]:
        """Return the values that the same tensor became when it was written to."""
        return self._becomes.get(value, [])

    def ancestors(self, values: int | Iterable[int], *, through: Callable[[Op], bool] | None = None) -> set[int]:
        """Return all values that these depend on, and themselves.

        Args:
            values: Ids.
            through: Returns whether to follow an operation; None follows all.

        """
        if through is None:
            return self._reached(values, self._sources)
        return set(self._walk(values, functools.partial(self._back, through=through)))

    def descendants(self, values: int | Iterable[int], *, through: Callable[[Op], bool] | None = None) -> set[int]:
        """Return all values that depend on these, and themselves."""
        if through is None:
            return self._reached(values, self._results)
        return set(self._walk(values, functools.partial(self._forth, through=through)))

    def path(self, source: int, target: int) -> list[Op]:
        """Return the operations on a shortest way from one value to another; empty if there is none."""
        came_from = self._walk([source], self._results.__getitem__, until=target)
        if target not in came_from:
            return []
        found: list[Op] = []
        at: int | None = target
        while at is not None:
            maker, before = self.producer(at), came_from[at]
            if maker is not None and before is not None and (not found or found[-1] is not maker):
                found.append(maker)
            at = before
        return found[::-1]

    def is_differentiable(self, op: Op) -> bool:
        """Return whether a gradient passes an operation: it ran with gradients on, and is not a detach or an index."""
        return op.grad_enabled and op.kind not in NOT_DIFFERENTIABLE

    def gradient_sources(self, value: int) -> list[Value]:
        """Return the leaves that a gradient of this value reaches: parameters, mostly.

        A parameter that an optimizer has written to before, in the same tape, is a leaf with its new content.
        """
        found = self.ancestors(value, through=self.is_differentiable)
        chosen = (self.values[each] for each in sorted(found))
        return [each for each in chosen if each.requires_grad and self._is_leaf(each)]

    def _is_leaf(self, value: Value) -> bool:
        if value.is_given:
            return value.same_as < 0
        return value.role == "parameter" and not self.is_differentiable(self.ops[value.made_by])

    def given(self, *roles: Role) -> list[Value]:
        """Return the values that no operation made, of some roles or of all."""
        return [each for each in self.values if each.is_given and (not roles or each.role in roles)]

    # ------------------------------------------------------------------ losses

    def backwards(self) -> list[Mark]:
        """Return the marks of backward passes."""
        return [mark for mark in self.marks if mark.kind == "backward"]

    def loss_values(self) -> list[int]:
        """Return what backward passes were started from, in order."""
        return [root for mark in self.backwards() for root in references(mark.data.get("roots"))]

    def loss_ops(self) -> list[Op]:
        """Return the forward operations outside all models that a loss depends on, in order."""
        made = {self.values[each].made_by for each in self.ancestors(self.loss_values())}
        return [op for op in self.ops if op.index in made and op.phase == "forward" and not op.in_model]

    def parameter_writes(self) -> dict[str, list[Op]]:
        """Return by parameter the operations that wrote to it, also by way of a view or `.data`."""
        names = {value.storage: value.name for value in self.given("parameter")}
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for storage in dict.fromkeys(self.values[each].storage for each in op.writes):
                if storage in names:
                    found.setdefault(names[storage], []).append(op)
        return found

    # ------------------------------------------------------------------ modules

    @functools.cached_property
    def calls(self) -> tuple[Call, ...]:
        """All calls of modules, in order of their beginning."""
        return tuple(_calls(self))

    def root_calls(self) -> list[Call]:
        """Return the calls of whole models, made from outside any module."""
        return [call for call in self.calls if call.is_root]

    def inputs_of_root(self) -> list[int]:
        """Return what models were called with."""
        return list(dict.fromkeys(value for call in self.root_calls() for value in call.args.values()))

    def outputs_of_root(self, *, of_loss: bool = True) -> list[int]:
        """Return what models returned; by default only what a loss depends on."""
        found = list(dict.fromkeys(value for call in self.root_calls() for value in call.outs.values()))
        if not of_loss:
            return found
        used = self.ancestors(self.loss_values())
        return [each for each in found if each in used]

    def targets(self) -> list[Value]:
        """Return the data that reaches a loss without passing a model."""
        return self.given("target")

    def ops_of(self, path: str, *, inside: bool = True) -> list[Op]:
        """Return the operations of a module; by default with those of the modules inside it."""
        prefix = f"{path}." if path else ""
        return [op for op in self.ops if op.module == path or (inside and op.module.startswith(prefix))]

    def line_of(self, op: Op | Mark | None) -> Line | None:
        """Return the user's line of an operation or a mark, if it is known."""
        return self.lines[op.line] if op is not None and op.line >= 0 else None

    # ------------------------------------------------------------------ walking

    @functools.cached_property
    def _uses(self) -> dict[int, list[int]]:
        uses: dict[int, list[int]] = {}
        for index, given in enumerate(self._given):
            for value in given:
                uses.setdefault(value, []).append(index)
        return uses

    @functools.cached_property
    def _given(self) -> list[list[int]]:
        """By operation: the values that it got, each once."""
        return [list(dict.fromkeys(references(list(op.args.values())))) for op in self.ops]

    @functools.cached_property
    def _sources(self) -> list[list[int]]:
        """By value: what it was directly made of."""
        found = []
        for value in self.values:
            # One list for all that an operation made: those of optimizers make hundreds, of hundreds.
            given = self._given[value.made_by] if value.made_by >= 0 else []
            if value.same_as >= 0 and value.same_as not in given:
                given = [*given, value.same_as]
            found.append([each for each in given if each != value.id] if value.id in given else given)
        return found

    @functools.cached_property
    def _results(self) -> list[list[int]]:
        """By value: what was directly made of it."""
        made = [(*op.outs, *op.writes) for op in self.ops]
        return [
            [each for index in self._uses.get(value.id, ()) for each in made[index]] + self.becomes(value.id)
            for value in self.values
        ]

    @functools.cached_property
    def _becomes(self) -> dict[int, list[int]]:
        becomes: dict[int, list[int]] = {}
        for value in self.values:
            if value.same_as >= 0:
                becomes.setdefault(value.same_as, []).append(value.id)
        return becomes

    def _reached(self, start: int | Iterable[int], edges: list[list[int]]) -> set[int]:
        """Return all values that edges lead to. Several rules ask the same, so the last answers are remembered."""
        first = (start,) if isinstance(start, int) else tuple(start)
        known = self._walks.get((first, id(edges)))
        if known is None:
            if len(self._walks) >= _KEPT_WALKS:
                self._walks.clear()
            known = self._walks[first, id(edges)] = frozenset(self._walk(first, edges.__getitem__))
        return set(known)

    @functools.cached_property
    def _walks(self) -> dict[tuple[tuple[int, ...], int], frozenset[int]]:
        return {}

    def _back(self, value: int, through: Callable[[Op], bool]) -> list[int]:
        maker = self.producer(value)
        if maker is None or through(maker):
            return self.sources(value)
        return []

    def _forth(self, value: int, through: Callable[[Op], bool]) -> list[int]:
        found = [made for op in self.consumers(value) if through(op) for made in (*op.outs, *op.writes)]
        return found + self.becomes(value)

    def _walk(
        self, start: int | Iterable[int], step: Callable[[int], Iterable[int]], until: int | None = None
    ) -> dict[int, int | None]:
        """Return every value that steps lead to, with the one it was reached from, nearest first."""
        first = [start] if isinstance(start, int) else list(start)
        found: dict[int, int | None] = dict.fromkeys(first)
        waiting = deque(first)
        while waiting and (until is None or until not in found):
            value = waiting.popleft()
            for each in step(value):
                if each not in found:
                    found[each] = value
                    waiting.append(each)
        return found


_KEPT_WALKS: Final = 32
NOT_DIFFERENTIABLE: Final = frozenset(
    {"detach", "argmax", "argmin", "argsort", "sign", "round", "floor", "ceil", "trunc", "bernoulli", "multinomial"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf", "isfinite"}
    | {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones"}
    | {"_local_scalar_dense", "equal", "nonzero", "any", "all", "unique", "histc", "bincount"}
)
"""Operations through which no gradient passes, or one that is zero everywhere."""


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A call of a module: what it got, what it returned, and which operations lie between."""

    path: str
    kind: str
    """The module's class."""
    number: int
    """Which call of this module in the step, counted from 0."""
    training: bool
    is_root: bool
    """It is a whole model, called from outside any module."""
    first: int
    """The index of its first operation."""
    last: int
    """The index after its last operation."""
    depth: int
    args: dict[str, int] = {}
    """Ids of the tensors it got, by their place in the call."""
    outs: dict[str, int] = {}
    """Ids of the tensors it returned, by their place in the output."""
    line: int = -1


def _calls(tape: Tape) -> Iterator[Call]:
    ends: dict[tuple[str, int], Mark] = {}
    for mark in tape.marks:
        if mark.kind == "module_exit":
            ends.setdefault((str(mark.data.get("path", "")), _whole(mark.data.get("call"))), mark)
    open_until: list[int] = []
    for mark in tape.marks:
        if mark.kind == "module_exit" and open_until:
            open_until.pop()
        if mark.kind != "module_enter":
            continue
        data = mark.data
        key = (str(data.get("path", "")), _whole(data.get("call")))
        end = ends.get(key)
        last = end.index if end is not None else len(tape.ops)
        yield Call(
            path=key[0],
            kind=str(data.get("class", "")),
            number=key[1],
            training=bool(data.get("training", True)),
            is_root=bool(data.get("root")),
            first=mark.index,
            last=last,
            depth=len(open_until),
            # Named arguments are known only when a call has ended.
            args=(_places(end.data.get("args")) if end is not None else {}) | _places(data.get("args")),
            outs=_places(end.data.get("outs")) if end is not None else {},
            line=mark.line,
        )
        open_until.append(last)


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _places(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(place): found for place, each in value.items() for found in references(each)[:1]}


# --------------------------------------------------------------------------------
# Arguments as JSON: plain values as they are, a tensor as `{"v": id}`, lists and tuples as lists, and anything else as
# an object with one key: `{"float": "inf"}`, `{"dtype": "float32"}`, `{"device": "cpu"}`, `{"layout": "strided"}`,
# `{"memory_format": "contiguous_format"}`, `{"complex": [0.0, 1.0]}`, `{"generator": true}`, `{"opaque": "class"}`.


def references(value: Any) -> list[int]:
    """Return the ids of the values that an argument refers to, in order.

    >>> references([{"v": 3}, None, {"v": 4}])
    [3, 4]
    """
    if isinstance(value, dict):
        found = value.get("v")
        return [found] if type(found) is int else []
    if isinstance(value, list | tuple):
        numbers: list[int] = []
        for item in value:
            if type(item) is dict and len(item) == 1 and type(item.get("v")) is int:  # most items, hundreds of them
                numbers.append(item["v"])
            elif isinstance(item, dict | list | tuple):
                numbers += references(item)
        return numbers
    return []


def number(value: Any) -> Any:
    """Return an argument that may be a number that is not finite; everything else as it is.

    >>> number({"float": "-inf"}), number(2)
    (-inf, 2)
    """
    if isinstance(value, dict) and set(value) == {"float"}:
        return files.number(value["float"])
    return value


# --------------------------------------------------------------------------------
# Files.


_STEP: Final = re.compile(r"step_(\d{1,15})(?:_(\d{1,6}))?")

_DTYPES: Final[dict[str, Any]] = {
    "BOOL": np.bool_, "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16, "I32": np.int32,
    "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "C64": np.complex64,
}  # fmt: skip
_MORE_DTYPES: Final = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def folders(run: Path) -> dict[int, Path]:
    """Return the folders of a run's tapes by step, in order; of several tapes of one step the last."""
    try:
        names = sorted(entry.name for entry in (run / FOLDER).iterdir())
    except OSError:  # there are none, or no descriptor is left
        return {}
    found = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match is not None and (run / FOLDER / name / INFO).is_file():
            found.append((int(match[1]), int(match[2] or 1), name))
    return {step: run / FOLDER / name for step, _, name in sorted(found)}


def find(run: Path, step: int | None = None) -> Path:
    """Return the folder of the tape of a step, or of the last tape.

    Raises:
        RunNotFound: The run has no tapes.
        OptionError: It has none of that step.

    """
    known = folders(run)
    if not known:
        raise RunNotFound(f"{run} has no tapes: it was recorded with tape=False, or ended before its third step.")
    if step is None:
        return known[max(known)]
    if step not in known:
        raise OptionError(f"{run} has no tape of step {step}; there are tapes of {', '.join(map(str, known))}.")
    return known[step]


def write(run: Path, tape: Tape, save_tensors: Callable[[Path], None] | None = None) -> Path:
    """Write a tape into a run and return its folder, which appears whole or not at all.

    Args:
        run: The folder of the run.
        tape: What to write.
        save_tensors: Writes the tensors to the file that it is given; None if there are none.

    """
    target = _free_name(run / FOLDER, tape.step)
    draft = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        if save_tensors is not None:
            save_tensors(draft / TENSORS)
        (draft / INFO).write_bytes(files.encode(tape))
        draft.replace(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _free_name(folder: Path, step: int) -> Path:
    target, number = folder / f"step_{step}", 2
    while target.exists():
        target, number = folder / f"step_{step}_{number}", number + 1
    return target


def read(folder: Path) -> Tape:
    """Read a tape. Its numbers are checked against each other; tensors are read when they are asked for.

    Raises:
        RunNotFound: There is none.
        RunDamaged: It cannot be read.

    """
    path = folder / INFO
    try:
        tape = files.read_as(path, _DECODER, "a tape")
    except FileNotFoundError:
        raise RunNotFound(f"There is no tape at {folder}.") from None
    if tape.format != FORMAT:
        raise RunDamaged(f"{path} has the format {tape.format}; this version reads {FORMAT}.")
    _check(tape, path)
    tape.folder = str(folder)
    return tape


_DECODER: Final = msgspec.json.Decoder(Tape)


def _check(tape: Tape, path: Path) -> None:
    """Raise RunDamaged unless every number in a tape refers to something in it."""
    num_values, num_ops, num_lines = len(tape.values), len(tape.ops), len(tape.lines)
    for place, value in enumerate(tape.values):
        if value.id != place or not -1 <= value.made_by < num_ops or not -1 <= value.same_as < place:
            raise RunDamaged(f"{path}: value {place} refers to something that is not in the tape.")
    for place, op in enumerate(tape.ops):
        used = (*op.outs, *op.writes, *references(list(op.args.values())))
        if op.index != place or (used and not 0 <= min(used) <= max(used) < num_values):
            raise RunDamaged(f"{path}: operation {place} refers to a value that is not in the tape.")
        if not -1 <= op.line < num_lines or not -1 <= op.of < num_ops:
            raise RunDamaged(f"{path}: operation {place} refers to something that is not in the tape.")
    for mark in tape.marks:
        if mark.index > num_ops or not -1 <= mark.line < num_lines or not _refers_well(mark.data, num_values):
            raise RunDamaged(f"{path}: a mark ({mark.kind}) refers to something that is not in the tape.")
    for optimizer in tape.optimizers:
        used = tuple(each for group in optimizer.groups for each in group.parameters)
        if not all(-1 <= each < num_values for each in used) or not _refers_well(optimizer.state, num_values):
            raise RunDamaged(f"{path}: an optimizer refers to a value that is not in the tape.")


def _refers_well(value: Any, num_values: int) -> bool:
    waiting = [value]
    for each in waiting:
        if isinstance(each, dict):
            if not all(0 <= number < num_values for number in references(each)):
                return False
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return True


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read all tensors of a safetensors file as arrays, without torch.

    Raises:
        RunDamaged: It cannot be read, or is too large.

    """
    import safetensors  # here: most of what reads a run needs no tensors of a tape

    try:
        content = files.read_file(path, MAX_TENSOR_BYTES)
        entries = safetensors.deserialize(content)  # type: ignore[no-untyped-call] # no types
        return {name: _array(entry) for name, entry in entries}
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise RunDamaged(f"{path} cannot be read: {error!r:.200}") from error


def _array(entry: Mapping[str, Any]) -> NDArray[Any]:
    name = entry["dtype"]
    dtype = _DTYPES.get(name)
    if dtype is None:
        import ml_dtypes  # not where a run is recorded

        dtype = getattr(ml_dtypes, _MORE_DTYPES[name])
    return np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])
