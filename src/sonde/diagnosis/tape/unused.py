"""What a taped step computes or loads and does not use: dropped results, masks, samples, inputs, parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Call, Op, Value, number
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, fact, on_every_tape, on_tape
from sonde.diagnosis.tape.numbers import Numbers
from sonde.diagnosis.tape.reading import CARRIERS, LOSS_FUNCTIONS, RESHAPING, TapeReading

_SHAPES_ONLY: Final = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones"}
    | {"new_full", "new_empty", "new_empty_strided", "randint_like"}
)
"""Operations whose result has nothing of their input but its shape."""
_CHANGES: Final = frozenset(
    {"masked_fill", "clamp", "clamp_min", "clamp_max", "relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu"}
    | {"hardtanh", "softplus", "_softmax", "_log_softmax", "native_dropout", "native_layer_norm", "native_batch_norm"}
    | {"native_group_norm", "mul", "add", "sub", "div", "where", "masked_scatter", "scatter", "index_put", "flip"}
    | {"index_fill", "cudnn_batch_norm", "_native_batch_norm_legit", "threshold", "tril", "triu", "roll"}
)
"""Operations that return their first tensor changed; a program that does not take the result has no use of them."""


# --------------------------------------------------------------------------------
# Results.


@on_tape
def dropped_result(reading: TapeReading) -> Found | None:
    """Find a result that is computed with gradients and that nothing uses, though what it was made of goes on."""
    returned = {value for call in reading.tape.root_calls() for value in call.outs.values()}
    for op in reading.tape.ops:
        if _is_dropped(reading, op) and returned.isdisjoint(op.outs) and _goes_on(reading, op):
            return _dropped(reading, op)
    return _dropped_loss(reading) or _dropped_call(reading)


def _is_dropped(reading: TapeReading, op: Op) -> bool:
    """Return whether nothing uses what an operation returned, and it wrote to nothing."""
    if op.phase not in ("forward", "between") or not op.grad_enabled or op.writes or not op.outs:
        return False
    first = reading.tape.values[op.outs[0]]
    return first.id in reading.learnt and not any(_has_use(reading, out) for out in op.outs)


_KEEPS_RESULT: Final = frozenset(
    {"tanh", "sigmoid", "_softmax", "_log_softmax", "relu", "elu", "exp", "native_layer_norm", "native_batch_norm"}
    | {"native_group_norm", "native_dropout", "_native_batch_norm_legit", "cudnn_batch_norm"}
)
"""Operations whose results autograd keeps for the backward pass, which shows as a detach."""


def _has_use(reading: TapeReading, value: int, after: int = 0) -> bool:
    """Return whether anything uses, differentiates or writes to a value; that autograd keeps it does not count."""
    tape, maker = reading.tape, reading.tape.producer(value)
    uses = [op for op in tape.consumers(value) if op.index >= after]
    kept = [op for op in uses if op.kind == "detach" and not tape.consumers(op.outs[0])]
    if maker is not None and maker.kind in _KEEPS_RESULT and len(kept) == 1:
        uses = [op for op in uses if op not in kept]
    return bool(uses or tape.becomes(value)) or value in reading.differentiated


def _goes_on(reading: TapeReading, op: Op) -> bool:
    """Return whether a result is one of its inputs changed, and the loss is computed from that input."""
    if op.kind not in _CHANGES:
        return False
    out = reading.tape.values[op.outs[0]]
    return any(
        value in reading.learnt
        and reading.tape.values[value].shape == out.shape
        and any(use.index > op.index and _leads_to_loss(reading, use) for use in reading.tape.consumers(value))
        for _, value in op.inputs()
    )


def _leads_to_loss(reading: TapeReading, op: Op) -> bool:
    return op.phase == "forward" and not reading.needed.isdisjoint((*op.outs, *op.writes))


def _dropped(reading: TapeReading, op: Op) -> Found:
    name = op.function or op.kind.strip("_")
    return Found(
        sites=tuple(dict.fromkeys((reading.site(op, signals.LOSS), "(model)"))),
        evidence=(fact("operations that use the result", 0),),
        cause=f"The result of {name}{reading.where(op)} is not used: the step goes on with what it was computed from, "
        "as if the line were not there.",
        fix=f"Assign it: x = {name}(x, ...), or use the in-place variant.",
    )


def _dropped_loss(reading: TapeReading) -> Found | None:
    """Find calls of one loss function on one line of which only some reach what is minimised."""
    calls: dict[tuple[int, str], list[Op]] = {}
    for op in reading.tape.ops:
        is_scalar = bool(op.outs) and reading.tape.values[op.outs[0]].size == 1
        if is_scalar and op.function in LOSS_FUNCTIONS and op.phase in ("forward", "between") and op.line >= 0:
            calls.setdefault((op.line, op.function), []).append(op)
    for ops in calls.values():
        used = [op for op in ops if op.outs[0] in reading.needed]
        # The last one may be used after the tape has ended: it ends at a step of one of several optimizers.
        dropped = [op for op in ops if used and op.index < used[-1].index and _is_dropped(reading, op)]
        if dropped:
            return Found(
                sites=(signals.LOSS, signals.LOOP),
                evidence=(fact("losses computed on this line", len(ops)), fact("of them used", len(used))),
                cause=f"{len(dropped)} of {len(ops)} losses computed on one line{reading.where(dropped[0])} are "
                "overwritten: only the last one is minimised.",
                fix="Add them up: loss = loss + ..., or collect them in a list and take the mean.",
            )
    return None


def _dropped_call(reading: TapeReading) -> Found | None:
    """Find calls of a module with gradients whose results nothing uses, while other calls of it reach the loss."""
    calls: dict[str, list[Call]] = {}
    for call in reading.tape.calls:
        calls.setdefault(call.path, []).append(call)
    for path, made in calls.items():
        used = [call for call in made if not reading.needed.isdisjoint(call.outs.values())]
        dropped = [call for call in made if call.outs and _is_call_dropped(reading, call)]
        dropped = [call for call in dropped if not _is_repeated(reading, call, used)]
        dropped = [call for call in dropped if not _ends_a_loop(reading, call)]
        if dropped and used and not path.startswith("<"):
            line = reading.tape.lines[dropped[0].line] if dropped[0].line >= 0 else None
            return Found(
                sites=(path, "(model)", signals.LOOP),
                evidence=(fact("calls in the step", len(made)), fact("calls whose result is not used", len(dropped))),
                cause=f"{path} is called {len(made)} times in a step, and nothing uses the results of {len(dropped)} "
                f"of these calls{f' ({line}: `{line.text}`)' if line is not None else ''}: what they computed is lost.",
                fix="Pass the result on, as the hidden state of a recurrent cell to its next call, or remove the call.",
            )
    return None


def _is_call_dropped(reading: TapeReading, call: Call) -> bool:
    tape = reading.tape
    outs = list(call.outs.values())
    returned = {value for root in tape.root_calls() if root is not call for value in root.outs.values()}
    learns = any(tape.values[out].requires_grad for out in outs) and returned.isdisjoint(outs)
    # A call may use its own results: an LSTM cell computes the hidden state of the new cell state.
    return learns and not any(_has_use(reading, out, call.last) for out in outs)


def _ends_a_loop(reading: TapeReading, call: Call) -> bool:
    """Return whether a call is the last one of a loop: the same line passes on what earlier calls return.

    They are calls of other layers, or of a recurrent cell whose last call gets what the one before it returned.
    """
    beside = [each for each in reading.tape.calls if each.line == call.line >= 0 and each is not call]
    before = [each for each in beside if each.path == call.path]
    if before and all(each.last <= call.first for each in before):
        given = {reading.plain(value).id for value in call.args.values()}
        if not given.isdisjoint(reading.plain(out).id for out in before[-1].outs.values()):
            return True
    others = (each for each in beside if each.path != call.path)
    return any(_has_use(reading, out, each.last) for each in others for out in each.outs.values())


def _is_repeated(reading: TapeReading, call: Call, used: list[Call]) -> bool:
    """Return whether a call that is used gets the same data: what this one computed is not lost."""
    data = [{reading.plain(value).id for value in each.args.values()} for each in (call, *used)]
    return bool(data[0]) and data[0] in data[1:]


# --------------------------------------------------------------------------------
# Data.

MIN_ROWS: Final = 4


@on_tape
def ignored_mask(reading: TapeReading) -> Found | None:
    """Find a mask from the loader that nothing uses."""
    for name, value in _loaded(reading):
        if len(value.shape) >= 2 and not _is_used(reading, value.id) and _is_mask(reading, value):
            return Found(
                sites=("(data)", signals.LOSS, "(model)"),
                evidence=(fact("operations that use the mask", 0), fact("elements", value.size)),
                cause=f"The loader returns a mask ({name}, shape {value.shape}, zeros and ones), and no operation "
                "of the step uses it: what it marks as absent is treated like data.",
                fix="Apply the mask: pass it to the model, or average the loss over what it marks.",
            )
    return None


def _loaded(reading: TapeReading) -> Iterator[tuple[str, Value]]:
    """Yield the tensors of batches that this step uses; a loader may return the batch of a later step ahead."""
    for mark in reading.tape.marks:
        if mark.kind == "loader_next":
            listed = dict(mark.data.get("values") or {}).items()
            batch = {
                str(place): reading.tape.values[each["v"]]
                for place, each in listed
                if isinstance(each, dict) and type(each.get("v")) is int
            }
            if any(_is_used(reading, value.id) for value in batch.values()):
                for place, value in batch.items():
                    yield f"batch{place}" if place.startswith("[") else place, value


def _is_used(reading: TapeReading, value: int) -> bool:
    return any(op.kind != "lift_fresh" for op in reading.tape.consumers(value))


def _is_mask(reading: TapeReading, value: Value) -> bool:
    """Return whether rows are ones and then zeros, or zeros and then ones, of different lengths."""
    content = reading.numbers.of(value.id)
    if content is None or content.ndim != 2 or len(content) < MIN_ROWS or not set(np.unique(content)) <= {0, 1}:
        return False
    turns = np.abs(np.diff(content.astype(np.int8), axis=1)).sum(axis=1)
    return bool((turns <= 1).all() and np.unique(content.sum(axis=1)).size > 1)


@on_tape
def ignored_argument(reading: TapeReading) -> Found | None:
    """Find an argument that differs between samples and that a model never reads, or of which it uses only the shape.

    Models of one family often take the same arguments. So one that is never read is a warning only where the loss
    depends on it, as on the time of a diffusion, by which the data are made noisy.
    """
    for call in reading.tape.root_calls():
        unread = reading.unread(call.path)
        for place, value in call.args.items():
            if place not in unread and not _shape_is_used(reading, call, value):
                continue
            if _differs(reading, value):
                name = unread.get(place, place)
                what = "forward never reads it" if place in unread else "only its shape is used"
                return Found(
                    severity="info" if place in unread and value not in reading.needed else "warning",
                    sites=("(model)",),
                    evidence=(fact("outputs that depend on it", 0),),
                    cause=f"Argument {name} of {call.kind} is ignored: {what}, so no output depends on its numbers.",
                    fix="Use its numbers in forward." if place in unread else "Use its numbers, not only its shape.",
                )
    return None


def _shape_is_used(reading: TapeReading, call: Call, value: int) -> bool:
    uses = [op for op in reading.tape.consumers(value) if call.first <= op.index < call.last]
    return bool(uses) and all(op.kind in _SHAPES_ONLY for op in uses)


def _differs(reading: TapeReading, value: int) -> bool:
    content = reading.numbers.of(value)
    about = reading.tape.values[value]
    if content is None:
        return about.size > 1 and about.role != "parameter"
    return content.ndim > 0 and len(content) > 1 and bool((content != content[:1]).any())


@on_tape
def left_out_samples(reading: TapeReading) -> Found | None:
    """Find that only some samples of a model's output reach the loss, taken by a slice or an index that is written."""
    for out in reading.tape.outputs_of_root():
        about = reading.tape.values[out]
        count = reading.count_samples()
        if not about.requires_grad or count < MIN_ROWS or about.shape[:1] != (count,) or not reading.has_samples(out):
            continue
        uses = [op for op in reading.tape.consumers(out) if _leads_to_loss(reading, op)]
        rows = [_rows(op, count) for op in uses]
        if not uses or any(each is None for each in rows):
            continue
        seen = set().union(*(each for each in rows if each is not None))
        if len(seen) < count:
            return Found(
                severity="warning",
                sites=(signals.LOSS, "(model)"),
                evidence=(fact("samples in the batch", count), fact("samples that reach the loss", len(seen))),
                cause=f"Only {len(seen)} of {count} samples reach the loss{reading.where(uses[0])}: the rest of the "
                "batch is computed and not learnt from.",
                fix="Compare the outputs of all samples with their targets; check the dimension of the index.",
            )
    return None


def learns_from_chosen_rows(case: Case) -> bool:
    """Return whether only some rows of the model's output reach the loss, as where the nodes of a graph are split."""
    return case.taped is not None and case.taped.once(f"{__name__}.chosen_rows", _are_rows_chosen)


def _are_rows_chosen(reading: TapeReading) -> bool:
    for out in reading.tape.outputs_of_root():
        shape = reading.tape.values[out].shape
        uses = [op for op in reading.tape.consumers(out) if _leads_to_loss(reading, op)]
        taken = [reading.tape.values[op.outs[0]].shape for op in uses if op.kind in _TAKES_ROWS]
        if shape[:1] >= (MIN_ROWS,) and uses and len(taken) == len(uses):
            return all(each[1:] == shape[1:] and each[:1] < shape[:1] for each in taken)
    return False


_TAKES_ROWS: Final = ("index", "index_select", "slice")


def _rows(op: Op, count: int) -> set[int] | None:
    """Return the rows that an operation takes of the first dimension, if it takes rows by fixed numbers."""
    if op.kind == "select" and int(op.args.get("dim", 0)) == 0:
        return {int(op.args["index"]) % count}
    if op.kind == "slice" and int(op.args.get("dim", 0)) == 0:
        end = op.args.get("end")
        chosen = slice(op.args.get("start") or 0, end, op.args.get("step", 1))
        return set(range(count)[chosen])
    return None


_INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "bool")


@on_tape
def truncated_data(reading: TapeReading) -> Found | None:
    """Find data whose fractions are cut off by a cast to integers, on its way to the model or as a target."""
    for op in reading.tape.ops:
        source = op.input("self")
        if op.phase not in ("forward", "between") or source is None:
            continue
        if op.kind in _COARSENS and (found := _coarsened(reading, op, source)) is not None:
            return found
        if op.kind != "_to_copy":
            continue
        before, after = reading.tape.values[source], reading.tape.values[op.outs[0]]
        if after.dtype not in _INTEGERS[:-1] or not before.dtype.startswith(("float", "bfloat")) or before.size < 2:
            continue
        if not reading.plain(source).is_given or reading.plain(source).role in ("parameter", "buffer", "random"):
            continue
        content = reading.numbers.of(source)
        if content is not None and op.outs[0] in reading.needed and _loses_most(content):
            return Found(
                severity="critical",
                sites=("(data)", signals.LOSS),
                evidence=(
                    fact("different numbers before", int(np.unique(content).size)),
                    fact("different numbers after", int(np.unique(np.trunc(content)).size)),
                ),
                cause=f"Data is cast to {after.dtype}{reading.where(op)}, which cuts off its fractions.",
                fix="Keep it as a float: .float() instead of .long() or .int().",
            )
    return None


_COARSENS: Final = frozenset({"clamp", "clamp_", "round", "floor", "trunc", "div", "floor_divide", "clamp_max"})
FEW: Final = 3
"""Different numbers that are left of data: of a picture that was clamped to 0 and 1, or divided by 256 as integers."""


def _coarsened(reading: TapeReading, op: Op, source: int) -> Found | None:
    """Find data of many different numbers of which an operation leaves two or three, on its way into a model."""
    out = op.outs[0]
    inputs = reading.tape.ancestors(reading.tape.inputs_of_root())
    if out not in inputs or op.in_model or reading.tape.values[source].size < MANY_NUMBERS:
        return None
    if op.kind == "div" and not op.args.get("rounding_mode"):
        return None
    before, after = reading.numbers.of(source), reading.numbers.of(out)
    if before is None or after is None or np.unique(before).size < MANY_NUMBERS or np.unique(after).size > FEW:
        return None
    counts = (fact("different numbers before", np.unique(before).size), fact("after", np.unique(after).size))
    return Found(
        severity="critical",
        sites=("(data)",),
        evidence=counts,
        cause=f"`{op.function or op.kind}` leaves {np.unique(after).size} different numbers of the data"
        f"{reading.where(op)}: nearly all of what the samples differ in is lost before the model.",
        fix="Scale the data before it is clamped or rounded, and divide as floats.",
    )


MANY_NUMBERS: Final = 16


def _loses_most(content: Numbers) -> bool:
    """Return whether a cast to integers maps most of the different numbers onto others."""
    values = np.unique(content[np.isfinite(content)])
    return values.size >= MIN_ROWS and np.unique(np.trunc(values)).size <= values.size / 2


_RELATIVE: Final = frozenset({"add_", "sub_", "mul_", "div_", "clamp_", "masked_fill_", "neg_", "addcmul_", "pow_"})


@on_tape
def overwritten_data(reading: TapeReading) -> Found | None:
    """Find data of a larger set that is changed in place on its way to the model, so that the set changes for good."""
    sizes = {value.size // max(1, value.shape[0]) for _, value in _loaded(reading) if value.shape}
    for mark in reading.tape.marks:
        size = mark.data.get("size")
        # A counter or a weight that the data set keeps for each sample is one number.
        is_own = mark.kind == "data_write" and mark.data.get("operation") in _RELATIVE
        if is_own and isinstance(size, int) and size > 1 and size in sizes:
            return _overwritten(
                size,
                f"The data set changes its own data in place{reading.where(mark)} while a batch is fetched: the change "
                "stays, and adds up from epoch to epoch.",
            )
    inputs = reading.tape.ancestors(reading.tape.inputs_of_root())
    for op in reading.tape.ops:
        target = op.input("self")
        if op.kind not in _RELATIVE or target is None or op.module or op.phase not in ("forward", "between"):
            continue
        base = _viewed(reading, target)
        if base is None or base.role not in ("constant", "batch", "input", "target", "carried"):
            continue
        if base.size > reading.tape.values[target].size and not inputs.isdisjoint((*op.outs, *op.writes)):
            return _overwritten(
                reading.tape.values[target].size,
                f"The data itself is changed in place{reading.where(op)}: the batch is a view of the whole set, so the "
                "change stays and adds up from epoch to epoch.",
            )
    return None


def _overwritten(size: int, cause: str) -> Found:
    return Found(
        sites=("(data)", signals.LOOP),
        evidence=(fact("elements that are overwritten", size),),
        cause=cause,
        fix="Write x = x + noise, or clone the data before it is changed.",
    )


def _viewed(reading: TapeReading, value: int) -> Value | None:
    """Return the value of the beginning that a value is a view of, in the same memory."""
    storage = reading.tape.values[value].storage
    about = reading.plain(value, RESHAPING | CARRIERS)
    return about if about.is_given and about.storage == storage else None


# --------------------------------------------------------------------------------
# Outputs of a layer that nothing reads.

_MULTIPLIES: Final = {"mm": -1, "addmm": -1, "linear": -1, "convolution": 1}
"""Operations of layers, and the dimension of their outputs: each has weights of its own."""
_TURNS: Final = RESHAPING | {"t", "transpose", "permute"}
_SPLITS: Final = ("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "unbind")


@on_every_tape
def unread_outputs(reading: TapeReading) -> Found | None:
    """Find outputs of a trained layer that nothing reads: it is only ever sliced, and some slices are never taken."""
    trained = set(reading.held.values())
    for op in reading.forward_ops:
        dim = _MULTIPLIES.get(op.kind)
        if dim is None or op.outs[0] not in reading.learning:
            continue
        sources = [reading.plain(value, _TURNS) for _, value in op.inputs()]
        names = [source.name for source in sources if source.id in trained]
        if not names:
            continue
        width = reading.tape.values[op.outs[0]].shape[dim]
        read = _read_outputs(reading, op.outs[0], dim, width)
        if read is None or not 0 < len(read) < width:
            continue
        unread = sorted(set(range(width)) - read)
        return Found(
            sites=tuple(dict.fromkeys((reading.site(op, "(model)"), *names))),
            evidence=(fact("outputs of the layer", width), fact("outputs that nothing reads", len(unread))),
            cause=f"{len(unread)} of {width} outputs of {reading.site(op, 'a layer')}{reading.where(op)} are never "
            f"read ({_ranges(unread)}): their weights never learn. A slice that was meant to take them takes others.",
            fix="Check the slices of its output: together they should cover all of it; or make the layer narrower.",
            refute="Set the weights of these outputs to zeros: if the loss of the same batch changes, this finding is "
            "wrong.",
            data={"parameters": names, "share": len(unread) / width},
        )
    return None


def _read_outputs(reading: TapeReading, value: int, dim: int, width: int) -> set[int] | None:
    """Return which places along a dimension are read, if all of them are read by slices; None if all are read."""
    read: set[int] = set()
    for op in reading.tape.consumers(value):
        if op.phase == "backward" or (op.kind == "detach" and not reading.tape.consumers(op.outs[0])):
            continue
        shape = reading.tape.values[value].shape
        at = int(op.args.get("dim", 0)) if op.kind in ("slice", "select", "narrow", *_SPLITS) else None
        if at is not None and at % len(shape) == dim % len(shape):
            read |= _taken(reading, op, width)
        elif op.kind in RESHAPING or at is not None:
            after = reading.tape.values[op.outs[0]].shape
            inner = read if len(after) < 2 or after[dim] != width else _read_outputs(reading, op.outs[0], dim, width)
            if inner is None or inner is read:
                return None
            read |= inner
        else:
            return None
    return read


def _taken(reading: TapeReading, op: Op, width: int) -> set[int]:
    """Return the places that an operation takes along the dimension that it cuts, as far as its results are used."""
    if op.kind == "select":
        return {int(op.args["index"]) % width}
    if op.kind in ("slice", "narrow"):
        end = op.args.get("end") if op.kind == "slice" else int(op.args["start"]) + int(op.args["length"])
        return set(range(width)[slice(op.args.get("start") or 0, end, op.args.get("step", 1))])
    taken, start = set[int](), 0
    for out in op.outs:
        size = 1 if op.kind == "unbind" else reading.tape.values[out].shape[int(op.args.get("dim", 0))]
        if _has_use(reading, out):
            taken |= set(range(start, start + size))
        start += size
    return taken


@on_tape
def read_too_early(reading: TapeReading) -> Found | None:
    """Find a recurrent layer of which only the answer to the first step is read, which knows nothing of later steps."""
    for call in reading.tape.calls:
        if call.kind not in ("LSTM", "GRU", "RNN") or call.outs.get("[0]") not in reading.needed:
            continue
        answers, state = call.outs["[0]"], call.outs.get("[1]", call.outs.get("[1][0]", -1))
        time = None if state < 0 else _time_of(reading.tape.values[answers], reading.tape.values[state])
        states = [out for place, out in call.outs.items() if place != "[0]"]
        if time is None or any(op.index >= call.last for out in states for op in reading.tape.consumers(out)):
            continue
        steps = reading.tape.values[answers].shape[time]
        if steps > 1 and _read_outputs(reading, answers, time, steps) == {0}:
            use = next(iter(reading.tape.consumers(answers)))
            return Found(
                severity="warning",
                sites=(call.path, "(model)"),
                evidence=(fact("steps that the layer reads", steps), fact("steps whose answers are used", 1)),
                cause=f"Of the {steps} steps that {call.path} ({call.kind}) reads, only the answer to the first is "
                f"used{reading.where(use)}: it was made before any later step was read, so {steps - 1} of {steps} "
                "steps of the input change no output.",
                fix="Take the last step, out[:, -1] with batch_first=True and out[-1] without, or the final state.",
                refute="Change the last step of an input: if the output changes, this finding is wrong.",
            )
    return None


def _time_of(answers: Value, state: Value) -> int | None:
    """Return which dimension of a recurrent layer's answers is time; None if that is open, or if it reads both ways."""
    if len(answers.shape) != 3 or len(state.shape) != 3 or answers.shape[2] != state.shape[2]:
        return None
    fits = [place for place in (0, 1) if answers.shape[1 - place] == state.shape[1]]
    return fits[0] if len(fits) == 1 else None


def _ranges(places: list[int]) -> str:
    """Write places in short.

    >>> _ranges([2, 3, 4, 7])
    '2 to 4, 7'
    """
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    written = [f"{first} to {last}" if last > first else str(first) for first, last in parts]
    return ", ".join(written[:3]) + (", ..." if len(written) > 3 else "")


# --------------------------------------------------------------------------------
# Terms that are zero, teachers that are not at rest.


@on_tape
def cancelled_term(reading: TapeReading) -> Found | None:
    """Find a difference or a quotient of a value and itself on the way to the loss: it has no gradient."""
    for op in reading.forward_ops:
        first, second = op.input("self"), op.input("other")
        if op.kind.removesuffix("_") not in ("sub", "div") or first is None or second is None:
            continue
        pair = [reading.tape.values[each] for each in (first, second)]
        is_whole = number(op.args.get("alpha", 1)) == 1 and pair[0].requires_grad and pair[0].shape == pair[1].shape
        if is_whole and op.outs[0] in reading.learning and reading.plain(first, _SAME) is reading.plain(second, _SAME):
            what = "subtracted from" if op.kind.startswith("sub") else "divided by"
            return Found(
                sites=tuple(dict.fromkeys((reading.site(op, signals.LOSS), signals.LOSS))),
                evidence=(fact("operations between the two", 0),),
                cause=f"A value is {what} itself{reading.where(op)}: the result is constant, and no parameter learns "
                "from it. One of the two was meant to be another, as from before the update.",
                fix="Keep the other value from earlier, as the log-probabilities under the old policy.",
            )
    return None


_SAME: Final = RESHAPING - {"detach"}


@on_tape
def noisy_teacher(reading: TapeReading) -> Found | None:
    """Find targets that a frozen model computes without gradients while its dropout is on."""
    follows = {name.rpartition(".")[0] for name in reading.tape.parameter_writes()}
    for call in reading.tape.root_calls():
        ops = reading.tape.ops[call.first : call.last]
        drops = [op for op in ops if op.is_random and reading.kind_of(op.module).startswith("Dropout")]
        made = [value for value in call.outs.values() if value in reading.needed]
        if not drops or not made or not call.training or any(op.grad_enabled for op in ops):
            continue
        used = {reading.tape.values[value].name for op in ops for _, value in op.inputs()}
        weights = {name for name in used if name}
        if weights & set(reading.held) or {name.rpartition(".")[0] for name in weights} & follows:
            continue
        return Found(
            severity="warning",
            sites=(drops[0].module, call.path, signals.LOSS),
            evidence=(fact("dropouts that are on", len(drops)),),
            cause=f"A model that is not trained computes targets{reading.where(ops[-1])} in training mode: its "
            "dropout is on, so the targets are noisy.",
            fix="Call eval() on it once before training.",
        )
    return None
