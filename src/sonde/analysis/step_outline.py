"""Outline a taped step as a tree: batch, modules, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sonde.core.tape import Mark, Op, Tape, Value, number, references

Kind = Literal["value", "module", "op", "backward", "optimizer", "event"]
_SHOWN_ARGUMENTS: Final = 6
_MOST_LEVELS: Final = 100
"""Modules that lie deeper in others are listed beside each other: functions that call themselves walk the tree."""
_DATA: Final = ("input", "target", "batch", "carried")


@dataclass(slots=True)
class Node:
    """A line of the outline, with the lines inside it."""

    kind: Kind
    title: str
    result: str = ""
    """The shape of its result."""
    line: int = -1
    """The index of the user's line in the tape."""
    children: list[Node] = field(default_factory=list)
    part_of: str = ""
    """The function of torch's that an operation outside the forward belongs to, such as `clip_grad_norm_`."""

    def count(self) -> int:
        """Return how many operations lie inside."""
        return sum(each.count() if each.kind != "op" else 1 for each in self.children)

    def to_json(self, tape: Tape) -> dict[str, Any]:
        """Return it as JSON-ready values; what is empty is left out."""
        line = tape.lines[self.line] if self.line >= 0 else None
        found = {
            "kind": self.kind,
            "title": self.title,
            "result": self.result,
            "line": "" if line is None else str(line),
            "source": "" if line is None else line.text,
            "operations": self.count(),
            "children": [each.to_json(tape) for each in self.children],
        }
        return {key: value for key, value in found.items() if value}


def outline(tape: Tape) -> list[Node]:
    """Return what happened in a step, in order; data that it was given comes first."""
    return [*_data(tape), *_Outline(tape).nodes()]


def _data(tape: Tape) -> Iterator[Node]:
    used = tape.ancestors([*tape.loss_values(), *(each for call in tape.calls for each in call.args.values())])
    for value in (each for each in tape.given(*_DATA) if each.id in used):
        name = value.name or f"%{value.id}"
        yield Node("value", f"{name}: {value.role}", f"{value.dtype} {shape_of(value)}", _first_use(tape, value))


def _first_use(tape: Tape, value: Value) -> int:
    return next((op.line for op in tape.consumers(value.id) if op.line >= 0), -1)


class _Outline:
    """Walks the operations and marks of a tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._top = Node("event", "")
        self._open = [self._top]
        self._idle = _unused(tape)

    def nodes(self) -> list[Node]:
        marks: dict[int, list[Mark]] = {}
        for mark in self._tape.marks:
            marks.setdefault(mark.index, []).append(mark)
        for index in range(len(self._tape.ops) + 1):
            for mark in marks.get(index, ()):
                self._take_mark(mark)
            if index < len(self._tape.ops):
                self._take_op(self._tape.ops[index])
        return self._top.children

    def _take_op(self, op: Op) -> None:
        if op.phase != "backward":
            self._end("backward")
        if op.index not in self._idle:
            outs = [self._tape.values[each] for each in (op.outs or op.writes)]
            result = ", ".join(f"%{each.id} {shape_of(each)}" for each in outs[:2]) + (", …" if len(outs) > 2 else "")
            part_of = op.function if op.phase == "between" else ""
            self._open[-1].children.append(Node("op", self._call(op), result, op.line, part_of=part_of))

    def _take_mark(self, mark: Mark) -> None:
        data = mark.data
        if mark.kind == "module_enter":
            self._begin(Node("module", _module(data), line=mark.line))
        elif mark.kind == "module_exit":
            self._end("module", self._shapes(data.get("outs")) or ("raised" if data.get("raised") else ""))
        elif mark.kind == "backward":
            self._begin(Node("backward", f"backward from {self._names(data.get('roots'))}", line=mark.line))
        elif mark.kind == "backward_end":
            self._end("backward", f"{len(data.get('reached') or {})} gradients")
        elif mark.kind == "optimizer_enter":
            self._begin(Node("optimizer", f"{data.get('name', '')} {data.get('class', '')}".strip(), line=mark.line))
        elif mark.kind == "optimizer_exit":
            self._end("optimizer", self._rates(str(data.get("name", ""))))
        else:
            self._open[-1].children.append(Node("event", _event(mark), line=mark.line))

    def _begin(self, node: Node) -> None:
        self._open[:_MOST_LEVELS][-1].children.append(node)
        self._open.append(node)

    def _end(self, kind: Kind, result: str = "") -> None:
        if len(self._open) > 1 and self._open[-1].kind == kind:
            self._open.pop().result = result

    def _call(self, op: Op) -> str:
        shown: list[str] = []
        for name, given in op.args.items():
            text = self._argument(given)
            if text and len(shown) < _SHOWN_ARGUMENTS:
                shown.append(text if references(given) else f"{name}={text}")
        function = f"{op.function}: " if op.function and op.function.strip("_") != op.kind.strip("_") else ""
        return f"{function}{op.kind}({', '.join(shown)})"

    def _argument(self, given: Any) -> str:
        if references(given):
            return self._names(given)
        plain = number(given)
        if plain is None or plain is False or isinstance(plain, dict):
            return str(next(iter(plain.values()))) if isinstance(plain, dict) and "dtype" in plain else ""
        return str(plain) if len(str(plain)) <= 24 else ""

    def _names(self, given: Any) -> str:
        found = references(given)
        names = [self._tape.values[each].name or f"%{each}" for each in found[:3]]
        return ", ".join(names) + (f", … ({len(found)})" if len(found) > 3 else "")

    def _shapes(self, outs: Any) -> str:
        found = references(list(outs.values())) if isinstance(outs, dict) else []
        return ", ".join(shape_of(self._tape.values[each]) for each in found[:3])

    def _rates(self, name: str) -> str:
        found = next((each for each in self._tape.optimizers if each.name == name), None)
        if found is None:
            return ""
        rates = sorted({f"{number(group.settings.get('lr')):g}" for group in found.groups if _is_number(group)})
        count = sum(len(group.names) for group in found.groups)
        return f"lr {', '.join(rates)}, {count} parameters" if rates else f"{count} parameters"


def _is_number(group: Any) -> bool:
    return isinstance(number(group.settings.get("lr")), int | float)


def _unused(tape: Tape) -> set[int]:
    """Return detaches that torch adds to save tensors for the backward pass; the program does not contain them."""
    return {
        op.index
        for op in tape.ops
        if op.kind == "detach" and all(each.phase == "backward" for out in op.outs for each in tape.consumers(out))
    }


def _module(data: dict[str, Any]) -> str:
    mode = "" if data.get("training", True) else " (eval)"
    again = f" #{data['call']}" if data.get("call") else ""
    path = str(data.get("path", ""))
    kind = str(data.get("class", ""))
    return (kind if path == f"<{kind}>" else f"{path} {kind}") + again + mode


def _event(mark: Mark) -> str:
    data = mark.data
    words = {
        "loader_next": "next batch",
        "data_write": f"{data.get('operation', '')} in place, in data that the fetch began with",
        "zero_grad": f"zero_grad of {data.get('owner') or data.get('class', '')}",
        "scheduler_step": f"{data.get('class', '')}.step",
        "clip": f"clip gradients to the norm {data.get('max_norm')}",
        "train": f"{data.get('path', '')}.train()",
        "eval": f"{data.get('path', '')}.eval()",
    }
    return words.get(mark.kind, mark.kind)


def shape_of(value: Value) -> str:
    """Return a shape as text.

    >>> shape_of(Value(id=0, role="input", shape=(32, 20)))
    '[32, 20]'
    """
    return f"[{', '.join(map(str, value.shape))}]"
