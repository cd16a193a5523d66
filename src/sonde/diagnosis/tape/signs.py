"""Find in which direction a taped loss pushes outputs, by computing it again with outputs moved a little."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Call, Op, number
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Threshold, above, fact, on_tape
from sonde.diagnosis.tape.losses import KEEPS_SIGN, is_negated
from sonde.diagnosis.tape.numbers import Numbers, TapedNumbers
from sonde.diagnosis.tape.ranges import LOSSES, NEVER_NEGATIVE, NEVER_POSITIVE, is_square, plain_kind, reach
from sonde.diagnosis.tape.reading import CARRIERS, TapeReading, Term
from sonde.diagnosis.tape.roles import chosen, factors, is_policy_objective

_SHARES: Final = (0.01, 0.1)
"""How far outputs are moved, over their spread."""


@on_tape
def maximised(reading: TapeReading) -> Found | None:
    """Find that nothing of what is minimised has a floor: all that cannot become negative has a minus before it."""
    turn = -1 if _maximises(reading) else 1
    for roots in _minimised(reading):
        parts = [part for root in roots for part in _parts(reading, root, turn * reading.direction(root))]
        if parts and not _has_floor(reading, parts):
            op = reading.tape.producer(parts[0].value)
            name = "a number that cannot be negative" if op is None or not op.function else op.function
            how = "The optimizer maximises what backward() was called on, and so" if turn < 0 else "The negative of"
            return Found(
                sites=(signals.LOSS,),
                evidence=(fact("terms without a floor", len(parts)), fact("terms with a floor", 0)),
                cause=f"{how} {name} is {'maximised' if turn < 0 else 'minimised'}{reading.where(op)}: training "
                "makes the loss larger without end.",
                fix="Remove maximize=True from the optimizer." if turn < 0 else "",
            )
    return None


@on_tape
def rewarded_divergence(reading: TapeReading) -> Found | None:
    """Find a divergence from the prior that grows smaller as codes leave it: its sign is wrong."""
    for roots in _minimised(reading):
        terms = (term for root in roots for term in reading.terms_of(root))
        for value, sign in (each for term in terms for each in _sides(reading, term.value, term.sign)):
            parts = list(_parts(reading, value, sign))
            makers = [reading.tape.producer(part.value) for part in parts]
            kinds = {"square" if is_square(op) else op.kind for op in makers if op is not None}
            if len(parts) > 2 and {"square", "exp"} <= kinds and not _has_floor(reading, parts):
                return Found(
                    sites=(signals.LOSS,),
                    evidence=(fact("terms without a floor", len(parts)), fact("terms with a floor", 0)),
                    cause="The divergence of the codes from their prior has the wrong sign"
                    f"{reading.where(makers[0])}: it falls as the means of codes move away from 0, so training drives "
                    "them apart without end.",
                    fix="kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean(), added to the loss.",
                    refute="Print the term: if it is positive and falls, this finding is wrong.",
                )
    return None


def _sides(reading: TapeReading, value: int, sign: int) -> Iterator[tuple[int, int]]:
    """Yield a term with its sign, and the two sides of a sum that was averaged as a whole, sample by sample."""
    yield value, sign
    op = reading.tape.producer(value)
    while op is not None and plain_kind(op) in _ADDING and reading.pair(op) is None and op.input("self") is not None:
        op = reading.tape.producer(op.args["self"]["v"])
    pair = reading.pair(op) if op is not None and plain_kind(op) in ("add", "sub") else None
    if op is not None and pair is not None and _is_positive(op.args.get("alpha", 1)):
        yield pair[0], sign
        yield pair[1], sign if plain_kind(op) == "add" else -sign


@dataclass(frozen=True, slots=True)
class _Part:
    """A value that is added up, with others, to what is minimised, and the sign that it has there."""

    value: int
    sign: int


_ADDING: Final = frozenset({"mean", "sum", *CARRIERS})
MAX_PARTS: Final = 64


def _parts(reading: TapeReading, value: int, sign: int, most: int = MAX_PARTS) -> Iterator[_Part]:
    """Yield the learnt values that another is the sum or the mean of."""
    op = reading.tape.producer(value)
    if not reading.tape.values[value].requires_grad:
        return
    first, second = (None, None) if op is None else (op.input("self"), op.input("other"))
    kind = "" if op is None else plain_kind(op)
    if op is None or first is None or most <= 0 or reach(reading, value) == NEVER_NEGATIVE:
        yield _Part(value, sign)
    elif kind in ("add", "sub", "rsub") and _is_positive(op.args.get("alpha", 1)):
        yield from _parts(reading, first, -sign if kind == "rsub" else sign, most // 2)
        if second is not None:
            yield from _parts(reading, second, -sign if kind == "sub" else sign, most // 2)
    elif kind == "neg" or (kind in ("mul", "div") and second is None):
        factor = -1 if kind == "neg" or not _is_positive(op.args.get("other", 1)) else 1
        yield from _parts(reading, first, factor * sign, most - 1)
    elif kind in _ADDING and second is None:
        yield from _parts(reading, first, sign, most - 1)
    else:
        yield _Part(value, sign)


def _is_positive(given: object) -> bool:
    value = number(given)
    return isinstance(value, int | float) and value > 0


def _has_floor(reading: TapeReading, parts: list[_Part]) -> bool:
    """Return whether a sum may have a floor: unless all that is known to be unbounded on one side falls without end.

    A number whose exponential is added too grows more slowly than that, so its sign does not matter.
    """
    signs: list[int] = []
    rest: list[int] = []
    exponents: set[int] = set()
    for part in parts:
        op = reading.tape.producer(part.value)
        if op is None or not _is_unbounded(reading, part.value) or (op.in_model and plain_kind(op) not in LOSSES):
            rest.append(part.value)
            continue
        signs.append(part.sign if reach(reading, part.value)[0] == 0 else -part.sign)
        makers = reading.makers(part.value, lambda each: not each.in_model and each.kind != "exp")
        exponents |= {reading.unscaled(each.args["self"]["v"])[0].id for each in makers if each.kind == "exp"}
    return not signs or max(signs) > 0 or not all(reading.unscaled(each)[0].id in exponents for each in rest)


def _is_unbounded(reading: TapeReading, value: int) -> bool:
    """Return whether a value is bounded on one side, by 0, and on no other."""
    return reach(reading, value) in (NEVER_NEGATIVE, NEVER_POSITIVE)


def _maximises(reading: TapeReading) -> bool:
    groups = [group for each in reading.tape.optimizers for group in each.groups]
    return bool(groups) and all(group.settings.get("maximize") for group in groups)


def _minimised(reading: TapeReading) -> Iterator[list[int]]:
    """Yield what is minimised together: all that is differentiated for the same parameters.

    Several optimizers may train adversaries through the same parameters: these are left out.
    """
    learns = {
        root: {each.name for each in reading.tape.gradient_sources(root) if each.name in reading.held}
        for root in reading.roots
    }
    for root, own in learns.items():
        together = [other for other, names in learns.items() if other == root or not own.isdisjoint(names)]
        if len(together) == 1 or len(reading.tape.optimizers) == 1:
            yield together


@on_tape
def pushed_away(reading: TapeReading) -> Found | None:
    """Find a loss that rises as outputs move to their targets, and falls as they move away."""
    if len(reading.tape.optimizers) != 1 or len(reading.roots) != 1:
        return None
    return _by_targets(reading) or _by_credits(reading) or _unlike_together(reading)


def _by_targets(reading: TapeReading) -> Found | None:
    for output in _outputs(reading):
        ways = [_towards(reading, output, mask) for mask in _masks(reading, output)]
        # A loss may use a mask and its complement: then outputs move to one of them and away from the other.
        if ways and all(_rises(reading, {output: way}) for way in ways):
            return _flipped(reading, "outputs move to their targets", "away from them")
        if reading.losses or _are_logits(reading, output) or _is_weighed(reading):
            continue  # torch's own losses fall towards their targets; logits are not compared with them
        if reach(reading, reading.roots[0])[0] >= 0:
            continue  # a distance that is minimised, maybe from the negative of what it is compared with
        ways = [
            wanted - known for wanted in _wanted(reading, output) if (known := reading.tape.tensor(output)) is not None
        ]
        if ways and all(_rises(reading, {output: _unit(way)}) for way in ways):
            return _flipped(reading, "outputs move to their targets", "away from them")
    return None


def _towards(reading: TapeReading, output: int, mask: Numbers) -> Numbers:
    """Return the direction from an output to targets of 0 and 1; what lies beyond its target already stays.

    A logit may go beyond it, where a squared error should bring it back.
    """
    marked = mask.reshape(reading.tape.values[output].shape) == 1
    content = reading.numbers.of(output)
    known = np.full(marked.shape, 0.5) if content is None else content
    return np.where(marked & (known < 1), 1.0, 0.0) - np.where(~marked & (known > 0), 1.0, 0.0)


def drawn_to_targets(case: Case) -> bool:
    """Return whether the loss of a taped step falls as outputs move to targets of 0 and 1, and rises as they leave."""
    return case.taped is not None and case.taped.once(f"{__name__}.drawn", _is_drawn_to_targets)


def _is_drawn_to_targets(reading: TapeReading) -> bool:
    if len(reading.roots) != 1:
        return False
    outputs = _outputs(reading)
    ways = [(output, _towards(reading, output, mask)) for output in outputs for mask in _masks(reading, output)]
    return bool(ways) and all(_rises(reading, {output: -way}) for output, way in ways)


def _by_credits(reading: TapeReading) -> Found | None:
    """Find a loss that makes less likely what has a positive weight, or moves scores of data below random ones."""
    for likely, weight in _credits(reading):
        if _rises(reading, {likely: np.sign(weight)}):
            return _flipped(reading, "what has a positive weight becomes more likely", "the other way round")
    for one, other in _contrasts(reading):
        towards = {one: np.ones(reading.tape.values[one].shape), other: -np.ones(reading.tape.values[other].shape)}
        if _rises(reading, towards):
            return _flipped(reading, "scores of data rise above those of random draws", "the other way round")
    return None


ALIKE = Threshold(4.0, "standard errors between two means of distances: by chance in one of 30,000 tapes")
MIN_PAIRS: Final = 8
_MOST_PAIRS: Final = 256


def _unlike_together(reading: TapeReading) -> Found | None:
    """Find a loss that draws pairs together whose inputs are less alike than those of the pairs it pushes apart."""
    pulled: list[float] = []
    pushed: list[float] = []
    for (one, first), (other, second) in itertools.combinations(_twins(reading), 2):
        inputs = [reading.numbers.of(each) for each in (first, second)]
        base = _loss(reading, {})
        if inputs[0] is None or inputs[1] is None or base is None or first == second:
            continue
        far = np.sqrt(np.square(np.asarray(inputs[0], np.float64) - inputs[1]).reshape(len(inputs[0]), -1).sum(axis=1))
        for row, change in enumerate(_closer(reading, one, other, base)):
            if change != 0:
                (pulled if change < 0 else pushed).append(float(far[row]))
    if min(len(pulled), len(pushed)) < MIN_PAIRS:
        return None
    error = np.sqrt(np.var(pulled) / len(pulled) + np.var(pushed) / len(pushed))
    apart = (np.mean(pulled) - np.mean(pushed)) / (error + 1e-12)
    if apart < ALIKE:
        return None
    return Found(
        sites=(signals.LOSS, "(data)"),
        evidence=(
            above("standard errors between the two", float(apart), ALIKE),
            fact("mean distance of inputs that are drawn together", float(np.mean(pulled))),
            fact("mean distance of inputs that are pushed apart", float(np.mean(pushed))),
        ),
        cause="The loss draws outputs together whose inputs differ most, and pushes apart those whose inputs are "
        f"alike{reading.where(reading.tape.producer(reading.roots[0]))}: the labels of pairs are inverted, or the "
        "positive and the negative sample are swapped.",
        fix="Check which label the loss takes for a similar pair, and the order of positive and negative.",
        refute="Look at ten pairs that the loss takes for similar: if they are, this finding is wrong.",
    )


def _twins(reading: TapeReading) -> list[tuple[int, int]]:
    """Return outputs of one shape with the inputs that they were computed of, one row for each sample."""
    trained = reading.tape.descendants([each.id for each in reading.tape.given("parameter")])
    found = []
    pairs = [(call, out) for call in reading.tape.root_calls() for out in call.outs.values()]
    for call, out in pairs:
        about, before = reading.tape.values[out], reading.tape.ancestors(out)
        data = [each for each in call.args.values() if each in before and each not in trained]
        if about.saved and len(about.shape) == 2 and out in reading.learning and len(data) == 1:
            found.append((out, data[0]))
    shapes = {reading.tape.values[each].shape for pair in found for each in pair[:1]}
    inputs = {reading.tape.values[each].shape for pair in found for each in pair[1:]}
    return found if len(shapes) == len(inputs) == 1 and 2 <= len(found) <= 3 else []


def _closer(reading: TapeReading, one: int, other: int, base: float) -> list[float]:
    """Return by how much the loss changes if the two outputs of one row come closer, for each row."""
    first, second = (np.asarray(reading.tape.tensor(each), dtype=np.float64) for each in (one, other))
    changes = []
    for row in range(min(len(first), _MOST_PAIRS)):
        moved = second.copy()
        moved[row] += 0.1 * (first[row] - second[row])
        loss = _loss(reading, {other: moved})
        change = 0.0 if loss is None else loss - base
        changes.append(change if abs(change) > 1e-9 * abs(base) else 0.0)
    return changes


_NOT_OUTPUTS: Final = frozenset({"_log_softmax", "_softmax", "sigmoid", "log_sigmoid_forward", "logsumexp", "softplus"})


def _are_logits(reading: TapeReading, output: int) -> bool:
    """Return whether an output is turned into probabilities outside the model."""
    after = reading.tape.descendants(output, through=lambda op: not op.in_model) & reading.learning
    makers = (reading.tape.producer(each) for each in after - {output})
    return any(op is not None and op.kind in _NOT_OUTPUTS for op in makers)


def _is_weighed(reading: TapeReading) -> bool:
    """Return whether log-probabilities are weighed sample by sample, as by rewards, whose signs give the direction."""
    after = reading.tape.descendants(chosen(reading), through=reading.tape.is_differentiable)
    weights = (other for op in reading.forward_ops for one, other in factors(op) if one in after)
    return any(not (about := reading.tape.values[each]).requires_grad and about.size > 1 for each in weights)


def _credits(reading: TapeReading) -> Iterator[tuple[int, Numbers]]:
    """Yield log-probabilities of what was chosen, with the weights that the loss gives them, as advantages do."""
    for likely in chosen(reading):
        about, content = reading.tape.values[likely], reading.numbers.of(likely)
        if not about.requires_grad or about.size < 2 or likely not in reading.learning or content is None:
            continue
        after = reading.tape.descendants(likely, through=reading.tape.is_differentiable)
        for op in reading.forward_ops:
            pair = [each for each in (op.input("self"), op.input("other")) if each is not None]
            if op.kind != "mul" or len(pair) != 2 or (pair[0] in after) == (pair[1] in after):
                continue
            learnt, weight = pair if pair[0] in after else pair[::-1]
            if reading.tape.values[learnt].size != about.size or is_negated(reading, weight):
                continue
            numbers = None if reading.tape.values[weight].requires_grad else reading.numbers.of(weight)
            if numbers is not None and numbers.size == content.size and (numbers > 0).any() and (numbers < 0).any():
                yield likely, numbers.reshape(content.shape)


def _outputs(reading: TapeReading) -> Iterator[int]:
    """Yield what models returned and was saved, of real numbers."""
    for value in reading.tape.outputs_of_root():
        about = reading.tape.values[value]
        if about.saved and about.dtype == "float32" and about.size > 1 and value in reading.learning:
            yield value


def _masks(reading: TapeReading, output: int) -> list[Numbers]:
    """Return targets of 0 and 1, one for each number of an output, that the loss uses beside it."""
    shape = tuple(size for size in reading.tape.values[output].shape if size > 1)
    found: list[Numbers] = []
    known = {reading.plain(loss.target).id for loss in reading.losses if loss.target is not None}

    def is_target(value: int) -> bool:
        return not known or reading.plain(value).id in known  # else it says which targets count

    for value in _beside(reading, output):
        about = reading.tape.values[value]
        if about.requires_grad or about.size != reading.tape.values[output].size:
            continue
        content = reading.numbers.of(reading.plain(value).id)
        if content is None or tuple(size for size in content.shape if size > 1) != shape:
            continue
        if set(np.unique(content)) == {0, 1}:
            if is_target(value):
                found.append(content)
        elif about.dtype.startswith("float") and about.role != "computed" and np.unique(content).size > 2:
            return []  # a mask beside real targets says which of them count
    return found


def _beside(reading: TapeReading, output: int) -> list[int]:
    """Return what is used together with an output, or with what follows from it; not what the output is made of."""
    after = reading.tape.descendants(output)
    later = after - {output}
    beside = {value for op in reading.forward_ops if later.intersection(op.outs) for _, value in op.inputs()}
    return sorted(beside - after)


def _wanted(reading: TapeReading, output: int) -> list[Numbers]:
    """Return real numbers, one for each number of an output, that the loss compares the output with."""
    about = reading.tape.values[output]
    found = []
    for value in _beside(reading, output):
        other = reading.tape.values[value]
        content = None if other.requires_grad or other.shape != about.shape else reading.numbers.of(value)
        if content is not None and content.dtype.kind == "f" and np.unique(content).size > 2:
            found.append(content)
    return found


def _unit(way: Numbers) -> Numbers:
    return way / (float(np.abs(way).mean()) + 1e-12)


def _contrasts(reading: TapeReading) -> Iterator[tuple[int, int]]:
    """Yield scores of one model, a number for each sample, for data and for whole numbers drawn at random."""
    calls = [call for call in reading.tape.root_calls() if len(call.outs) == 1]
    for one in calls:
        for other in calls:
            pair = next(iter(one.outs.values())), next(iter(other.outs.values()))
            shapes = {reading.tape.values[each].shape for each in pair}
            is_saved = all(reading.tape.values[each].saved and each in reading.learning for each in pair)
            is_score = all(len(shape) > 0 and shape[0] == np.prod(shape) for shape in shapes)
            is_contrast = is_score and _draws(reading, other) and not _draws(reading, one)
            if one.path == other.path and len(shapes) == 1 and is_saved and is_contrast:
                yield pair


def _draws(reading: TapeReading, call: Call) -> bool:
    """Return whether a model was called with whole numbers that were drawn for it."""
    makers = [reading.tape.producer(reading.plain(value).id) for value in call.args.values()]
    return any(op is not None and op.is_random and op.kind.startswith("randint") for op in makers)


def _rises(reading: TapeReading, towards: Mapping[int, Numbers]) -> bool:
    """Return whether the loss rises if outputs move in a direction, and falls if they move back, at every length."""
    known = {value: reading.numbers.of(value) for value in towards}
    base = {value: np.asarray(content, dtype=np.float64) for value, content in known.items() if content is not None}
    if len(base) < len(towards):
        return False
    start = _loss(reading, base)
    for share in _SHARES:
        reach = {value: share * (float(content.std()) + 1e-3) for value, content in base.items()}
        ahead, back = (
            _loss(reading, {value: base[value] + sign * reach[value] * towards[value] for value in base})
            for sign in (1, -1)
        )
        if start is None or ahead is None or back is None or not back < start < ahead:
            return False
    return True


def _loss(reading: TapeReading, outputs: dict[int, Numbers]) -> float | None:
    """Return the loss for other outputs; what the program has detached from them stays as it was."""
    held = {value: reading.numbers.of(value) for value in _detached(reading, outputs)}
    known = {value: content for value, content in held.items() if content is not None}
    found = TapedNumbers(reading.tape, outputs | known).of(reading.roots[0])
    return None if found is None or found.size != 1 or not np.isfinite(found).all() else float(found.reshape(()))


def _detached(reading: TapeReading, outputs: Collection[int]) -> list[int]:
    """Return what the loss uses of outputs, but passes no gradient to them."""
    if not outputs:
        return []
    after = (reading.tape.descendants(outputs) & reading.needed) - set(outputs)
    return [value for value in after if not reading.tape.values[value].requires_grad]


def _flipped(reading: TapeReading, when: str, how: str) -> Found:
    op = reading.tape.producer(reading.roots[0])
    return Found(
        sites=(signals.LOSS,),
        evidence=(fact("lengths at which the loss was computed again", 2 * len(_SHARES)),),
        cause=f"The loss rises if {when}, and falls if they move {how}{reading.where(op)}: its sign is wrong, or its "
        "arguments are swapped, so training goes in the wrong direction.",
        fix="Minimise one minus the score, or its negative; check the order of the arguments of the loss.",
    )


def punished_entropy(case: Case) -> Found | None:
    """Find an entropy that is minimised beside the objective of a policy, where it should be rewarded."""
    reading = case.taped
    if reading is None or not is_policy_objective(case):
        return None
    for term in reading.terms:
        op = _negative_entropy(reading, term)
        if op is not None:
            return Found(
                step=reading.tape.step,
                sites=(signals.LOSS,),
                evidence=(fact("terms that minimise the entropy of the policy", 1),),
                cause=f"The entropy bonus has the wrong sign{reading.where(op)}: the entropy of the policy is "
                "minimised, so "
                "it commits to an action before it knows which is good.",
                fix="Subtract the entropy from the loss: loss = policy_loss - beta * entropy.",
                refute="Print the entropy: if it should fall from the start on, this finding is wrong.",
            )
    return None


def _negative_entropy(reading: TapeReading, term: Term) -> Op | None:
    """Return the product p log p that a term has with a minus before it, if it has."""
    value, sign = term.value, term.sign
    for _ in range(16):
        op = reading.tape.producer(value)
        if op is None:
            return None
        learnt = [each for _, each in op.inputs() if reading.tape.values[each].requires_grad]
        if op.kind == "mul" and len(learnt) == 2:
            makers = [reading.origin(each) for each in learnt]
            has_softmax = any(maker is not None and maker.kind in ("_softmax", "exp") for maker in makers)
            return op if has_softmax and sign < 0 else None
        if len(learnt) != 1 or op.kind.removesuffix("_") not in (*KEEPS_SIGN, "neg"):
            return None
        sign = -sign if op.kind == "neg" else sign
        value = learnt[0]
    return None
