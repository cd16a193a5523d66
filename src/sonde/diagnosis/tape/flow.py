"""Where the results of a taped step go: gradients, averages and inputs that nothing uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from sonde.core import signals
from sonde.core.tape import Call, Line, Mark, Op, Value, number, references
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, above, fact, few, on_tape
from sonde.diagnosis.tape.reading import CARRIERS, TapeReading, Term

# --------------------------------------------------------------------------------
# Gradients.


def reaches_nothing(case: Case) -> Found | None:
    """Find that no backward pass of a step reaches a parameter that its only optimizer holds."""
    reading = case.taped
    if reading is None or len(reading.tape.optimizers) != 1 or not reading.tape.backwards():
        return None
    names = {name for group in reading.tape.optimizers[0].groups for name in group.names}
    reached = [mark.data.get("reached") or {} for mark in reading.tape.marks if mark.kind == "backward_end"]
    sources = [each for root in reading.roots for each in reading.tape.gradient_sources(root)]
    if case.parameters and not names <= set(case.parameters):
        return None  # it holds parameters of another model, or of a former one
    if not names or not reached or any(names.intersection(each) for each in reached):
        return None
    if not sources or any(each.name in names for each in sources):
        return None
    op = reading.tape.producer(reading.roots[0])
    if {each.id for each in sources} <= {reading.plain(root).id for root in reading.roots}:
        return Found(
            severity="critical",
            step=reading.tape.step,
            sites=(signals.LOSS, signals.LOOP, "(model)"),
            evidence=(fact("parameters that the optimizer holds", len(names)), fact("operations before the loss", 0)),
            cause="backward() was called on a new tensor that has the number of the loss, but was not computed of the "
            "model's outputs: no gradient reaches a parameter, and nothing is trained.",
            fix="Call backward() on the loss itself, without .item(), torch.tensor(...) or requires_grad=True.",
        )
    return Found(
        severity="critical",
        step=reading.tape.step,
        sites=("(model)", "optimizer", signals.LOOP),
        evidence=(fact("parameters that the optimizer holds", len(names)), fact("of them reached by a gradient", 0)),
        cause=f"No gradient of the loss{reading.where(op)} reaches a parameter that the optimizer holds: it reaches "
        f"{len(sources)} other tensors, such as those of a copy of the model. Nothing is trained.",
        fix="Compute the loss with the model's own parameters (torch.func.functional_call), or pass the tensors that "
        "are used to the optimizer.",
    )


@on_tape
def added_gradients(reading: TapeReading) -> Found | None:
    """Find gradients of another purpose that an optimizer adds to those of the loss."""
    return _of_closures(reading) or _of_an_attack(reading)


def _of_closures(reading: TapeReading) -> Found | None:
    """Find an optimizer that calls its closure several times while nothing clears the gradients in between."""
    passes, inside = 0, False
    for mark in reading.tape.marks:
        if mark.kind == "optimizer_enter":
            passes, inside = 0, True
        elif mark.kind == "optimizer_exit":
            inside = False
        elif mark.kind == "zero_grad":
            passes = 0
        elif mark.kind == "backward" and inside and not mark.data.get("inputs"):
            passes += 1
        if passes > 1:
            return Found(
                sites=("optimizer", signals.LOOP),
                evidence=(fact("backward passes in one call of the optimizer without a zero_grad", passes),),
                cause="The optimizer calls its closure several times in a step, and the closure does not clear the "
                "gradients: those of all calls are added up.",
                fix="Call optimizer.zero_grad() inside the closure, before the backward.",
            )
    return None


def _of_an_attack(reading: TapeReading) -> Found | None:
    """Find a pass that was made for the gradient of an input and left its gradients in the parameters."""
    before: Mark | None = None
    for mark in reading.tape.marks:
        if mark.kind == "zero_grad":
            before = None
        if mark.kind != "backward" or mark.data.get("inputs"):
            continue
        roots = references(mark.data.get("roots"))
        if before is not None and _uses_gradient(reading, roots, before) and _share_weights(reading, roots, before):
            op = reading.tape.producer(references(before.data.get("roots"))[0])
            return Found(
                sites=("optimizer", signals.LOOP),
                evidence=(fact("backward passes since the last zero_grad", 2),),
                cause=f"A backward pass{reading.where(op)} was made for the gradient of an input, from which the next "
                "input is computed; its gradients stay in the parameters and are added to those of the loss.",
                fix="Call optimizer.zero_grad() after it, or use torch.autograd.grad(loss, input).",
            )
        before = mark
    return None


@on_tape
def thrown_between(reading: TapeReading) -> Found | None:
    """Find gradients of one loss that are cleared before another's pass, and that no step has used."""
    if len(reading.tape.optimizers) != 1 or not any(mark.kind == "optimizer_enter" for mark in reading.tape.marks):
        return None
    before: Mark | None = None
    cleared: Mark | None = None
    for mark in reading.tape.marks:
        if mark.kind == "optimizer_enter":
            before = cleared = None
        elif mark.kind == "zero_grad" and before is not None and not _is_read(reading, before.index, mark.index):
            before, cleared = None, before
        elif mark.kind == "backward" and not mark.data.get("inputs"):
            roots = references(mark.data.get("roots"))
            lost = references(cleared.data.get("roots")) if cleared is not None else []
            is_lost = cleared is not None and lost != roots and not _uses_gradient(reading, roots, cleared)
            if cleared is not None and is_lost and _share_weights(reading, roots, cleared):
                op = reading.tape.producer(lost[0]) if lost else None
                return Found(
                    severity="critical",
                    step=reading.tape.step,
                    sites=("optimizer", signals.LOOP),
                    evidence=(fact("backward passes whose gradients were cleared before any step", 1),),
                    cause=f"Gradients of one loss{reading.where(op)} are cleared before the backward pass of another, "
                    "and no step has used them: only the last loss is learnt.",
                    fix="Call optimizer.zero_grad() once, before the first backward pass of a step.",
                )
            before = mark
    return None


def _is_read(reading: TapeReading, first: int, last: int) -> bool:
    """Return whether the program reads gradients, or what a backward pass has computed, between two places."""
    for op in reading.tape.ops[first:last]:
        for _, value in op.inputs() if op.phase in ("forward", "between") else ():
            maker = reading.tape.producer(value)
            if reading.tape.values[value].role == "gradient" or (maker is not None and maker.phase == "backward"):
                return True
    return False


MOST_CLIPPED: Final = 100.0
"""A larger limit is given to learn the norm, not to clip."""


@on_tape
def clipped_too_late(reading: TapeReading) -> Found | None:
    """Find gradients that are clipped after the step has used them, just before they are cleared."""
    order = [mark for mark in reading.tape.marks if mark.kind in ("clip", "zero_grad", "backward", "optimizer_enter")]
    kinds = [mark.kind for mark in order]
    if kinds.count("clip") != 1 or kinds[:2] != ["clip", "zero_grad"] or "optimizer_enter" not in kinds:
        return None
    limit = number(order[0].data.get("max_norm"))
    if not isinstance(limit, int | float) or not 0 < limit <= MOST_CLIPPED:
        return None
    return Found(
        sites=("optimizer", signals.LOOP),
        evidence=(fact("largest norm that is left", float(limit)),),
        cause="Gradients are clipped after optimizer.step() has used them, and cleared next: clipping has no effect.",
    )


def _uses_gradient(reading: TapeReading, roots: list[int], earlier: Mark) -> bool:
    """Return whether a loss depends on what an earlier backward pass computed, other than through the weights."""
    within = reading.tape.ancestors(roots, through=lambda op: op.phase != "optimizer")
    if any(reading.tape.values[each].role == "gradient" for each in within):
        return True
    makers = reading.makers(roots, lambda op: op.phase != "optimizer")
    return any(op.phase == "backward" and op.index >= earlier.index for op in makers)


def _share_weights(reading: TapeReading, roots: list[int], earlier: Mark) -> bool:
    one, other = (
        {each.name for root in given for each in reading.tape.gradient_sources(root) if each.name in reading.held}
        for given in (roots, references(earlier.data.get("roots")))
    )
    return not one.isdisjoint(other)


FEW_PASSES: Final = 3
"""Backward passes of one line in a step that are taken for accumulation: two may be sharpness-aware training."""


@on_tape
def wrongly_accumulated(reading: TapeReading) -> Found | None:
    """Find means over micro-batches that are added up undivided, or divided by their number twice."""
    roots = _added_up(reading)
    count = len(roots)
    sources = [reading.unscaled(root) for root in roots]
    makers = [reading.tape.producer(value.id) for value, _ in sources]
    factors = {round(abs(factor), 9) for _, factor in sources}
    if count < FEW_PASSES or len(factors) != 1 or not all(map(_is_mean, makers)):
        return None
    factor = factors.pop()
    shown = fact("what backward() was called on, over the mean of a micro-batch", factor)
    evidence = (above("backward passes per step", count, 2), shown, fact("what it should be", 1 / count))
    where = reading.where(reading.tape.producer(roots[0]))
    if factor == 1:
        return Found(
            sites=(signals.LOSS,),
            evidence=evidence,
            cause=f"Each step sums {count} backward passes of the undivided loss{where}: gradients are {count} times "
            "as large as those of one batch of that size.",
            values={"passes": count},
        )
    if abs(factor * count * count - 1) < 1e-6:
        return Found(
            sites=(signals.LOSS,),
            evidence=evidence,
            cause=f"The loss of each of {count} micro-batches is divided by {count} twice{where}: gradients are "
            f"{count} times smaller than those of one batch of that size.",
            fix="Divide once: either the loop or the library that runs backward does it.",
        )
    return None


def _added_up(reading: TapeReading) -> list[int]:
    """Return what was differentiated, in one line, since gradients were cleared and until the only optimizer steps."""
    found: list[int] = []
    for mark in reading.tape.marks if len(reading.tape.optimizers) == 1 else ():
        if mark.kind == "zero_grad":
            found = []
        elif mark.kind == "optimizer_enter":
            break
        elif mark.kind == "backward":
            found += references(mark.data.get("roots"))
            if mark.data.get("inputs") or mark.data.get("create_graph"):
                return []
    lines = {str(reading.tape.line_of(reading.tape.producer(root))) for root in found}
    return found if len(lines) == 1 else []


def _is_mean(op: Op | None) -> bool:
    return op is not None and (op.kind == "mean" or op.args.get("reduction") == 1)


@on_tape
def discarded_term(reading: TapeReading) -> Found | None:
    """Find a term of a loss whose gradients are all reset before an optimizer uses them."""
    if len(reading.tape.optimizers) < 2:
        return None
    for mark in reading.tape.backwards():
        if mark.data.get("create_graph") or mark.data.get("inputs"):
            continue
        for root in references(mark.data.get("roots")):
            found = _discarded_of(reading, mark, root)
            if found is not None:
                return found
    return None


def _discarded_of(reading: TapeReading, mark: Mark, root: int) -> Found | None:
    used = _used_after(reading, mark)
    terms = [term for term in reading.terms_of(root) if reading.tape.values[term.value].requires_grad]
    reached = {term: {each.name for each in reading.tape.gradient_sources(term.value)} for term in terms}
    lost = [term for term, names in reached.items() if names and not names & used]
    if not lost or len(lost) == len(terms):
        return None
    term, names = lost[0], sorted(reached[lost[0]])
    kept = sorted(set().union(*(reached[each] & used for each in terms)))
    cut = _cut_behind(reading, term)
    where = f" It is cut off from {few(kept)} by {_named(cut)}{reading.where(cut)}." if cut is not None else ""
    return Found(
        sites=(signals.LOSS, *dict.fromkeys(name.partition(".")[0] for name in kept[:2])),
        evidence=(fact("parameters its gradient reaches", len(names)), fact("of them used by an optimizer", 0)),
        cause=f"A term of the loss has no effect{reading.where(reading.origin(term.value))}: its gradient reaches only "
        f"{few(names)}, and is reset before an optimizer uses it.{where}",
        fix="Remove .detach() or torch.no_grad() from the way of this term to the parameters that should learn from "
        "it.",
        refute="Drop the term: if the trained parameters change, this finding is wrong.",
    )


def _used_after(reading: TapeReading, mark: Mark) -> set[str]:
    """Return the parameters that an optimizer steps before their gradients are reset, in this round or the next."""
    marks = list(reading.tape.marks)
    at = next(place for place, each in enumerate(marks) if each is mark)
    held = {each.name: {name for group in each.groups for name in group.names} for each in reading.tape.optimizers}
    waiting = set().union(*held.values())
    used: set[str] = set()
    for each in (*marks[at + 1 :], *marks[: at + 1]):
        if each.kind == "optimizer_enter":
            used |= waiting & held.get(str(each.data.get("name")), set())
            waiting -= used
        elif each.kind == "zero_grad":
            owner = str(each.data.get("owner", ""))
            waiting -= held.get(owner) or {
                name for name in waiting if owner == "(model)" or name.startswith(f"{owner}.")
            }
    return used


def _cut_behind(reading: TapeReading, term: Term) -> Op | None:
    cuts = [
        op
        for op in reading.makers(term.value)
        if op.phase == "forward"
        and not reading.tape.is_differentiable(op)
        and any(reading.tape.values[each].requires_grad for _, each in op.inputs())
    ]
    return max(cuts, key=lambda op: op.index, default=None)


def _named(op: Op) -> str:
    return f"`{op.function or op.kind}`" if op.grad_enabled else "torch.no_grad()"


@on_tape
def lost_in_choice(reading: TapeReading) -> Found | None:
    """Find a term that depends on trained parameters only through a choice, such as argmin, which has no gradient.

    What is detached, or computed without gradients, is cut off on purpose.
    """
    held = {value: name for name, value in reading.held.items()}
    for term in reading.terms:
        if not reading.tape.values[term.value].requires_grad:
            continue
        everywhere = reading.tape.ancestors(term.value)
        meant = reading.tape.ancestors(term.value, through=_is_meant)
        learns = reading.tape.ancestors(term.value, through=reading.tape.is_differentiable)
        lost = {value for value in held if value in meant and value not in learns}
        if not lost or _is_cut_on_purpose(reading, everywhere, lost):
            continue
        choice = _choice(reading, everywhere, lost)
        if choice is None:
            continue
        names = sorted(held[value] for value in lost)
        return Found(
            sites=tuple(dict.fromkeys((*names[:4], reading.site(choice, signals.LOSS), "(model)"))),
            evidence=(fact("parameters that this term should train and does not", len(names)),),
            cause=f"A term of the loss{reading.where(reading.origin(term.value))} depends on {few(names)} only through "
            f"`{choice.function or choice.kind}`{reading.where(choice)}, which has no gradient: it never reaches them.",
            fix="Pass the gradient straight through, as in x + (quantised - x).detach(), or use a soft choice.",
            refute="Change one of these weights a little: if its gradient from this term is not zero, this finding "
            "is wrong.",
        )
    return None


def _is_meant(op: Op) -> bool:
    return op.grad_enabled and op.kind != "detach"


_CHOICES: Final = frozenset({"argmin", "argmax", "round", "sign", "floor", "ceil", "trunc"})


def _is_cut_on_purpose(reading: TapeReading, inside: set[int], parameters: set[int]) -> bool:
    """Return whether results of some parameters are also detached, or used without gradients, on the way to a value."""
    after = reading.tape.descendants(parameters) & inside
    return any(
        not _is_meant(op) and any(out in inside for out in op.outs)
        for value in after
        for op in reading.tape.consumers(value)
        if op.phase in ("forward", "between")
    )


def _choice(reading: TapeReading, inside: set[int], parameters: set[int]) -> Op | None:
    after = reading.tape.descendants(parameters)
    return next(
        (
            op
            for op in reading.tape.ops
            if op.kind in _CHOICES
            and op.outs
            and op.outs[0] in inside
            and any(each in after for _, each in op.inputs())
        ),
        None,
    )


# --------------------------------------------------------------------------------
# Averages of weights.

_MIXING: Final = frozenset({"add", "sub", "lerp", "mul", "div", "addcmul", *CARRIERS, "detach"})


@on_tape
def discarded_average(reading: TapeReading) -> Found | None:
    """Find mixtures of trained weights with a copy of them that are computed and dropped."""
    names = [name for op in reading.tape.ops if (name := _dropped_mixture(reading, op)) is not None]
    if not names:
        return None
    line = next(op for op in reading.tape.ops if _dropped_mixture(reading, op) is not None)
    return Found(
        sites=tuple(dict.fromkeys((*names[:4], signals.LOOP))),
        evidence=(fact("averages that are computed and dropped", len(names)),),
        cause=f"Averages of the weights are computed{reading.where(line)} and never stored: {few(names)} "
        "is never updated. An assignment to a loop variable changes no tensor.",
        fix="Write into the copy: ema_param.mul_(decay).add_(param, alpha=1 - decay), or ema_param.copy_(average).",
        refute="Compare the copy with its values some steps ago: if they differ, this finding is wrong.",
    )


def _dropped_mixture(reading: TapeReading, op: Op) -> str | None:
    """Return the copy that an operation mixes with a trained weight, if nothing uses the result."""
    tape = reading.tape
    if op.kind not in ("add", "sub", "lerp") or op.phase != "between" or op.module or op.writes:
        return None
    out = op.outs[0]
    if tape.consumers(out) or not tape.values[out].shape or _is_kept(tape.line_of(op)):
        return None
    within = tape.ancestors(out, through=lambda each: each.kind in _MIXING and each.phase == "between")
    leaves = [tape.values[each] for each in within if tape.values[each].shape == tape.values[out].shape]
    # What state_dict() returned is another tensor in the memory of a parameter.
    names = {each.storage: each.name for each in tape.given("parameter")}
    trained = {each.storage for each in leaves if names.get(each.storage, each.name) in reading.held}
    others = [each for each in leaves if each.is_given and each.storage not in trained and each.role != "gradient"]
    if len(trained) != 1 or not others or any(each.role == "optimizer_state" for each in leaves):
        return None
    return next((name for each in others if (name := names.get(each.storage, each.name))), "the copy")


def _is_kept(line: Line | None) -> bool:
    """Return whether a line assigns to an attribute or an item (`copy.data = ...`), which no operation shows."""
    try:
        parsed = ast.parse("" if line is None else line.text.strip())
    except (SyntaxError, ValueError):  # a part of a statement
        return True
    targets = (each for node in ast.walk(parsed) if isinstance(node, ast.Assign) for each in node.targets)
    return any(isinstance(each, ast.Attribute | ast.Subscript) for target in targets for each in ast.walk(target))


@on_tape
def stale_buffers(reading: TapeReading) -> Found | None:
    """Find a copy of a model that follows its weights, but not the running statistics of its batch norms."""
    if any(module.kind == "AveragedModel" for module in reading.tape.modules):
        return None
    pairs = _followers(reading)
    if not pairs:
        return None
    written = _written_buffers(reading)
    stale = [
        module.path
        for module in reading.tape.modules
        if module.kind.startswith(("BatchNorm", "SyncBatchNorm")) and module.settings.get("track_running_stats", True)
        for copy, source in pairs
        if module.path.startswith(copy)
        and f"{source}{module.path.removeprefix(copy)}.running_mean" in written
        and f"{module.path}.running_mean" not in written
    ]
    if not stale:
        return None
    return Found(
        sites=tuple(stale[:4]),
        evidence=(fact("batch norms whose statistics do not follow", len(stale)),),
        cause=f"A copy of the model follows its weights, but not its buffers: the running statistics of {few(stale)} "
        "stay "
        "at those of the start.",
        fix="Copy the buffers too: for slow, fast in zip(copy.buffers(), model.buffers()): slow.copy_(fast).",
        refute="Compare running_mean of both: if they agree, this finding is wrong.",
    )


def _followers(reading: TapeReading) -> set[tuple[str, str]]:
    """Return prefixes of names: of a copy that was written from a trained model, and of that model."""
    found = set()
    for name, ops in reading.tape.parameter_writes().items():
        if name in reading.held:
            continue
        for op in ops:
            sources = {reading.tape.values[each].name for each in reading.tape.ancestors([v for _, v in op.inputs()])}
            for source in sources & set(reading.held):
                prefixes = _prefixes(name, source)
                if prefixes is not None:
                    found.add(prefixes)
    return found


def _prefixes(one: str, other: str) -> tuple[str, str] | None:
    """Return what differs at the beginning of two names.

    >>> _prefixes("average.2.weight", "net.2.weight")
    ('average', 'net')
    """
    parts, others = one.split("."), other.split(".")
    while len(parts) > 1 and len(others) > 1 and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return (".".join(parts), ".".join(others)) if parts != others else None


def _written_buffers(reading: TapeReading) -> set[str]:
    names = {value.storage: value.name for value in reading.tape.given("buffer")}
    found = set()
    for op in reading.tape.ops:
        is_idle = op.kind == "copy_" and op.input("self") == op.input("src")
        if not is_idle:
            found |= {names.get(reading.tape.values[each].storage, "") for each in op.writes}
    return found


# --------------------------------------------------------------------------------
# Inputs.


@on_tape
def unused_twin(reading: TapeReading) -> Found | None:
    """Find an argument of a model that nothing uses, beside another one of the same shape that is used."""
    for call in reading.tape.root_calls():
        unused = _unused(reading, call)
        for place, value in unused:
            twins = [
                (at, other)
                for at, other in _arguments(reading, call)
                if _are_twins(other, value) and _uses_within(reading, call, other.id)
            ]
            if twins:
                return Found(
                    severity="warning",
                    sites=("(model)",),
                    evidence=(fact("operations that use it", 0), fact("elements", value.size)),
                    cause=f"Argument {place} of {call.kind} is ignored: no operation uses it, while argument "
                    f"{twins[0][0]} "
                    "of the same shape is used. Perhaps the same input is used twice.",
                    fix="Use it in forward: look for the name of the other argument where this one was meant.",
                )
    return None


def _arguments(reading: TapeReading, call: Call) -> list[tuple[str, Value]]:
    return [(place, reading.tape.values[value]) for place, value in call.args.items()]


def _unused(reading: TapeReading, call: Call) -> list[tuple[str, Value]]:
    returned = set(call.outs.values())
    return [
        (place, value)
        for place, value in _arguments(reading, call)
        if value.size > 1 and value.id not in returned and not _uses_within(reading, call, value.id)
    ]


def _uses_within(reading: TapeReading, call: Call, value: int) -> bool:
    return any(call.first <= op.index < call.last for op in reading.tape.consumers(value))


def _are_twins(one: Value, other: Value) -> bool:
    return one.id != other.id and (one.shape, one.dtype) == (other.shape, other.dtype)


@on_tape
def unregistered_dropout(reading: TapeReading) -> Found | None:
    """Find a dropout that a model calls but does not own, so that eval() does not reach it."""
    for call in _inner_calls(reading):
        if call.kind.startswith("Dropout") and call.path.startswith("<") and call.training:
            op = next((op for op in reading.tape.ops[call.first : call.last]), None)
            return Found(
                sites=("(model)", "(function)"),
                evidence=(fact("dropouts that are not part of the model", 1),),
                cause=f"The model calls an nn.{call.kind} that is not one of its modules{reading.where(op)}: it is "
                "made in "
                "forward, or kept in a list, so eval() does not switch this dropout off.",
                fix="Make it in __init__ as an attribute, or call F.dropout(x, p, training=self.training).",
            )
    return None


def _inner_calls(reading: TapeReading) -> Iterator[Call]:
    """Yield the calls of modules that are made inside a watched model."""
    roots = reading.tape.root_calls()
    for call in reading.tape.calls:
        if any(root is not call and root.first <= call.first and call.last <= root.last for root in roots):
            yield call
