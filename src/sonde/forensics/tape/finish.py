"""Turn the notes of a step into a tape: assign the roles of values and the phases of operations, and write it.

This runs in the worker's thread, after the step.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import safetensors.torch
from torch import Tensor

from sonde.core import tape as tapes
from sonde.core.collector import fewer_collections
from sonde.core.tape import Line, Mark, ModuleInfo, Op, OptimizerInfo, Reason, Tape, Value
from sonde.forensics.tape.operations import NotedOp, NotedValue, Operations

_DATA: Final = ("batch", "constant")


@dataclass(slots=True, eq=False)
class Notes:
    """All that was noted of a step."""

    step: int
    reason: Reason
    operations: Operations
    marks: list[Mark] = field(default_factory=list)
    modules: tuple[ModuleInfo, ...] = ()
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: list[OptimizerInfo] = field(default_factory=list)
    random_state: Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    truncated: str = ""
    seconds: float = 0.0
    incomplete: list[str] = field(default_factory=list)
    wait: Callable[[], None] = lambda: None
    """Waits until the copies have been made, where a device makes them."""


def write_tape(run: Path, notes: Notes) -> Path:
    """Write the tape of a step into a run, and return its folder."""
    notes.wait()
    with fewer_collections:
        tensors = {
            f"v{number}": value.copy.cpu().contiguous()
            for number, value in enumerate(notes.operations.values)
            if value.copy is not None
        }
        if notes.random_state is not None:
            tensors["random.cpu"] = notes.random_state
        save = (lambda path: safetensors.torch.save_file(tensors, path)) if tensors else None
        return tapes.write(run, to_tape(notes), save)


def to_tape(notes: Notes) -> Tape:
    """Return the tape of a step."""
    noted = notes.operations
    needed = {role: count for role, count in noted.left_out.items() if role not in ("gradient", "optimizer_state")}
    left_out = ", ".join(f"{count} of role {role}" for role, count in needed.items())
    incomplete = [f"tensors that did not fit were not saved: {left_out}"] if left_out else []
    if noted.opaque:
        incomplete.append(f"operations of compiled or parallel parts were not seen: {', '.join(noted.opaque[:3])}")
    tape = Tape(
        step=notes.step,
        reason=notes.reason,
        values=tuple(_value(number, value) for number, value in enumerate(noted.values)),
        ops=tuple(_op(index, op) for index, op in enumerate(noted.ops)),
        marks=tuple(notes.marks),
        lines=tuple(_line(*place) for place in noted.lines),
        modules=notes.modules,
        attributes=notes.attributes,
        optimizers=tuple(notes.optimizers),
        truncated=notes.truncated or noted.truncated,
        incomplete="; ".join([*notes.incomplete, *incomplete]),
        seconds=round(notes.seconds, 6),
        tensor_bytes=noted.saved_bytes,
        versions=notes.versions,
        settings=notes.settings,
    )
    return _with_phases(_with_roles(tape))


def _value(number: int, value: NotedValue) -> Value:
    return Value(
        id=number,
        role=value.role,
        name=value.name,
        shape=value.shape,
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
        requires_grad=value.requires_grad,
        storage=value.storage,
        stride=value.stride,
        made_by=value.made_by,
        same_as=value.same_as,
        saved=value.copy is not None,
    )


def _op(index: int, op: NotedOp) -> Op:
    return Op(
        index=index,
        name=op.name,
        args=op.args,
        outs=op.outs,
        writes=op.writes,
        module=op.module,
        call=op.call,
        function=op.function,
        line=op.line,
        phase=op.phase,
        grad_enabled=op.grad_enabled,
        of=op.of,
        is_random=op.is_random,
        thread=op.thread,
    )


def _line(file: str, number: int, function: str) -> Line:
    return Line(file=file, line=number, function=function, text=linecache.getline(file, number).strip()[:400])


def _with_roles(tape: Tape) -> Tape:
    """Tell data that models were called with from data that a loss gets beside it."""
    into_models = tape.ancestors(tape.inputs_of_root(), through=lambda op: not op.in_model)
    inputs = {each for each in into_models if tape.values[each].is_given and tape.values[each].role in _DATA}
    beside = tape.ancestors(tape.loss_values(), through=lambda op: not op.in_model)
    lengths = {tape.values[each].shape[:1] for each in inputs if tape.values[each].shape}
    targets = {
        each for each in beside - inputs if tape.values[each].is_given and _is_target(tape.values[each], lengths)
    }
    if not inputs and not targets:
        return tape
    roles = dict.fromkeys(inputs, "input") | dict.fromkeys(targets, "target")
    values = tuple(
        msgspec.structs.replace(each, role=roles[each.id]) if each.id in roles else each for each in tape.values
    )
    return msgspec.structs.replace(tape, values=values)


def _is_target(value: Value, lengths: set[tuple[int, ...]]) -> bool:
    """Return whether data beside the model's outputs is a target.

    What came from a loader is. What the program made itself is if it is as long as an input; else it is a constant,
    such as the weights of classes.
    """
    return value.role == "batch" or (value.role == "constant" and value.shape[:1] in lengths)


def _with_phases(tape: Tape) -> Tape:
    """Call those operations forward that ran in a module or that a loss depends on."""
    used = {tape.values[each].made_by for each in tape.ancestors(tape.loss_values())}
    ops = tuple(
        msgspec.structs.replace(op, phase="forward")
        if op.phase != "backward" and (op.index in used or op.module)
        else op
        for op in tape.ops
    )
    return msgspec.structs.replace(tape, ops=ops)
