"""Whether the values of a taped step play the part they are meant for: weights, advantages, averages, opponents."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.core import signals
from sonde.core.tape import Call, Op, Value, number, references
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, on_every_tape, on_first_tape, on_tape
from sonde.diagnosis.tape.contracts import calls_of
from sonde.diagnosis.tape.data import padding_of
from sonde.diagnosis.tape.numbers import Numbers, TapedNumbers
from sonde.diagnosis.tape.reading import CARRIERS, RESHAPING, TapedLoss, TapeReading, Term

_ARITHMETIC: Final = frozenset(
    {"sub", "add", "exp", "sum", "neg", "clamp", "squeeze", "gather", "cat", "stack", *CARRIERS}
)


@on_tape
def learnt_advantage(reading: TapeReading) -> Found | None:
    """Find log-probabilities of chosen actions that are weighed by something that also gets a gradient."""
    likely = _likelihoods(reading)
    for op in reading.forward_ops:
        first, second = op.input("self"), op.input("other")
        if op.kind != "mul" or first is None or second is None or op.outs[0] not in reading.learning:
            continue
        pair = [first, second] if first in likely else [second, first]
        weight = reading.tape.values[pair[1]]
        if pair[0] not in likely or pair[1] in likely or not weight.requires_grad or weight.size < 2:
            continue
        if not reading.tape.values[pair[0]].requires_grad or not _is_difference(reading, weight.id):
            continue
        return Found(
            sites=(signals.LOSS, signals.LOOP),
            evidence=(fact("factors that get gradients", 2), fact("factors that should", 1)),
            cause=f"Log-probabilities are multiplied by an advantage that gets a gradient too{reading.where(op)}: the "
            "policy's loss also changes the values that it is judged by.",
            fix="Detach the advantage in the policy's loss: (returns - values).detach().",
            refute="Print requires_grad of the advantage on that line: if it is False, this finding is wrong.",
        )
    return None


def chosen(reading: TapeReading) -> list[int]:
    """Return the log-probabilities of what was chosen or drawn."""
    found = [call.ops[-1].outs[0] for call in calls_of(reading, frozenset({"log_prob"})) if call.ops[-1].outs]
    for op in reading.tape.ops:
        taken = reading.origin(op.args["self"]["v"]) if op.kind == "log" else op
        maker = None if taken is None or taken.kind != "gather" else reading.origin(taken.args["self"]["v"])
        if maker is not None and maker.kind == ("_log_softmax" if taken is op else "_softmax"):
            found.append(op.outs[0])
    return found


def _likelihoods(reading: TapeReading) -> set[int]:
    """Return the log-probabilities of chosen actions, and what arithmetic makes of them."""
    starts = [op.outs[0] for op in reading.tape.ops if op.function == "log_prob" and op.outs] + chosen(reading)
    return reading.tape.descendants(starts, through=lambda op: op.kind.removesuffix("_") in _ARITHMETIC)


def is_policy_objective(case: Case) -> bool:
    """Return whether log-probabilities of choices are weighed by data: the level of such a loss says little."""
    return case.taped is not None and case.taped.once(f"{__name__}.weighed", _weighs_choices)


def _weighs_choices(reading: TapeReading) -> bool:
    likely, values = _likelihoods(reading), reading.tape.values
    return any(
        reading.is_policy_ratio(op)
        or any(
            one in likely and not values[other].requires_grad for one, other in factors(op) if op.function != "log_prob"
        )
        for op in reading.forward_ops
    )


ONE_SIDED = Threshold(5.0, "mean of the weights of choices over their deviation; of centred ones it is about 0")
WEIGHED_CHOICES = Threshold(8, "choices of a step: fewer may be of one sign by chance")
_DRAWS: Final = ("multinomial", "normal", "bernoulli", "binomial", "poisson")


@on_every_tape
def one_sided_weights(reading: TapeReading) -> Found | None:
    """Find log-probabilities of drawn choices whose weights are all of one sign, and differ by little.

    Each choice that was drawn is made more likely then, and whether it was a good one hardly matters.
    """
    likely = _likelihoods(reading)
    for op in reading.forward_ops:
        for one, other in factors(op) if op.function != "log_prob" else ():
            weight = reading.tape.values[other]
            if one not in likely or other in likely or weight.requires_grad or weight.size < WEIGHED_CHOICES:
                continue
            content = reading.numbers.of(other) if _is_drawn_by_model(reading, one) else None
            if content is None or content.dtype.kind != "f" or content.size != reading.tape.values[one].size:
                continue
            mean, spread = float(np.mean(content)), float(np.std(content))
            if not spread > 0 or abs(mean) < ONE_SIDED * spread or np.min(content) * np.max(content) <= 0:
                continue
            return Found(
                severity="warning",
                sites=(signals.LOSS, signals.LOOP),
                evidence=(
                    above("mean of the weights over their deviation", abs(mean) / spread, ONE_SIDED),
                    fact("choices in the step", content.size),
                ),
                cause=f"The log-probabilities of the choices are weighed by numbers that are all "
                f"{'positive' if mean > 0 else 'negative'} ({mean:.3g} on average, and {spread:.2g} apart)"
                f"{reading.where(op)}: every choice that is drawn is "
                f"{'encouraged' if mean > 0 else 'discouraged'} almost alike, whether it was good or bad.",
            )
    return None


def _is_drawn_by_model(reading: TapeReading, value: int) -> bool:
    """Return whether a log-probability is of something that was drawn from what a model returned."""
    learnt = reading.tape.descendants([each.id for each in reading.tape.given("parameter")])
    draws = (op for op in reading.makers(value) if op.is_random and op.kind.removesuffix("_") in _DRAWS)
    return any(not learnt.isdisjoint(given for _, given in op.inputs()) for op in draws)


@on_tape
def learnt_choice(reading: TapeReading) -> Found | None:
    """Find drawn numbers that pass a gradient on, in a log-probability that is weighed by data."""
    learns = reading.tape.is_differentiable
    for call in calls_of(reading, frozenset({"log_prob"})):
        given = [reading.tape.values[each] for each in call.given]
        around = [each.id for each in given if each.requires_grad]
        drawn = [each for each in around if _is_drawn_around(reading, each, around)]
        if not drawn or not call.ops[-1].outs:
            continue
        after = reading.tape.descendants(call.ops[-1].outs, through=learns)
        weights = [
            other
            for op in reading.forward_ops
            for one, other in factors(op)
            if one in after and not reading.tape.values[other].requires_grad and reading.tape.values[other].size > 1
        ]
        if weights:
            return Found(
                sites=(signals.LOSS, signals.LOOP),
                evidence=(fact("ways of the gradient through the sample", len(drawn)),),
                cause=f"The log-probability of a sample is weighed by data{reading.where(call.ops[0])}, but the sample "
                "itself passes a gradient on to what it was drawn from (rsample): both ways cancel, so the mean of the "
                "distribution gets no gradient.",
                fix="Draw with sample(), or detach() the sample before log_prob.",
                refute="Print requires_grad of the sample: if it is False, this finding is wrong.",
            )
    return None


def factors(op: Op) -> Iterator[tuple[int, int]]:
    """Yield the two factors of a product, either way round."""
    first, second = op.input("self"), op.input("other")
    if op.kind == "mul" and first is not None and second is not None:
        yield first, second
        yield second, first


def _is_drawn_around(reading: TapeReading, value: int, others: list[int]) -> bool:
    """Return whether a value is a random draw, shifted and scaled by the very numbers that it is compared with."""
    within = reading.tape.ancestors(value, through=reading.tape.is_differentiable)
    is_random = any(op.is_random for op in reading.makers(value, lambda op: not op.in_model))
    sources = {reading.plain(each).id for each in others if each != value}
    return is_random and not sources.isdisjoint(within)


# --------------------------------------------------------------------------------
# Averages, and numbers of places, where a value for each sample was meant.


@on_tape
def averaged_first(reading: TapeReading) -> Found | None:
    """Find a mean over the samples that is multiplied by a weight of each sample, or made into a weight of itself."""
    for op in reading.forward_ops:
        for mean, weight in factors(op) if not op.module and reading.tape.is_differentiable(op) else ():
            about, other = reading.tape.values[mean], reading.tape.values[weight]
            if about.size != 1 or not about.requires_grad or mean not in reading.learning:
                continue
            if other.requires_grad or other.size < MIN_WEIGHTS or not _is_by_sample(reading, weight):
                continue
            how, numbers = reading.over_samples(Term(mean)), reading.numbers.of(weight)
            if how is None or (numbers is not None and (numbers == numbers.flat[0]).all()):
                continue
            return Found(
                severity="warning",
                sites=(signals.LOSS,),
                evidence=(fact("weights", other.size), fact("numbers that they are multiplied by", 1)),
                cause=f"One number for all samples, their {how}, is multiplied by {other.size} weights"
                f"{reading.where(op)}: every sample counts the same, and the weights only scale the whole.",
                fix="Multiply before averaging: use reduction='none', times the weights, and then the mean.",
                refute="Change the order of the weights: if the gradient changes, this finding is wrong.",
            )
    return _weighed_by_itself(reading)


MIN_WEIGHTS: Final = 4


def _is_by_sample(reading: TapeReading, value: int) -> bool:
    return reading.has_samples(value) or reading.tape.values[value].shape[:1] == (reading.count_samples(),)


def _weighed_by_itself(reading: TapeReading) -> Found | None:
    """Find an averaged loss that is multiplied by an exponential of itself, as a focal loss of single samples is."""
    for op in reading.forward_ops:
        for loss, factor in factors(op):
            if reading.tape.values[loss].size != 1 or reading.over_samples(Term(loss)) is None:
                continue
            between = reading.tape.path(loss, factor)
            if any(each.kind == "exp" for each in between) and reading.tape.values[factor].requires_grad:
                return Found(
                    severity="warning",
                    sites=(signals.LOSS,),
                    evidence=(fact("samples that are averaged first", reading.count_samples()),),
                    cause=f"A loss that is already averaged is weighed by an exponential of itself{reading.where(op)}: "
                    "hard and easy samples get the same weight.",
                    fix="Compute the loss with reduction='none', weigh each sample, and average then.",
                )
    return None


_CHOOSES: Final = frozenset({"argmax", "argmin", "argsort", "max", "min", "topk", "sort", "multinomial"})
_NUMERIC: Final = frozenset({"mul", "add", "sub", "div", "rsub", "_to_copy", "detach", *CARRIERS})


@on_tape
def index_as_value(reading: TapeReading) -> Found | None:
    """Find a target that is computed of the place of the largest output, where the output itself was meant."""
    trained = reading.tape.descendants([each.id for each in reading.tape.given("parameter", "buffer")])
    for op in reading.tape.ops:
        places = [out for out in op.outs if reading.tape.values[out].dtype == "int64"]
        if op.kind not in _CHOOSES or not places or op.in_model or not any(v in trained for _, v in op.inputs()):
            continue
        after = _computed_of(reading, places)
        for _, target, loss in reading.compared():
            about = reading.tape.values[target]
            if target in after and about.dtype.startswith(("float", "bfloat")) and about.size > 1:
                return Found(
                    sites=(signals.LOSS, "(data)"),
                    evidence=(fact("targets that contain a place", about.size),),
                    cause=f"The target{reading.where(loss)} is computed of the index that `{op.function or op.kind}` "
                    f"returned{reading.where(op)}: the number of the best choice is taken for its value.",
                    fix="Use max(dim)[0] or amax(dim), or gather the values at the index.",
                    refute="If the index is a quantity, such as a position, this finding is wrong.",
                )
    return None


def _computed_of(reading: TapeReading, places: list[int]) -> set[int]:
    """Return what is computed of indices as numbers; what they only choose, as in `codes[nearest]`, is not."""
    after = set(places)
    for op in reading.tape.ops:
        if op.kind.removesuffix("_") in _NUMERIC and not after.isdisjoint({op.input("self"), op.input("other")}):
            after.update((*op.outs, *op.writes))
    return after


def _is_difference(reading: TapeReading, value: int) -> bool:
    """Return whether a value is a difference, whatever was done to its scale since."""
    through = frozenset({*RESHAPING, "div", "sub", "add", "mul"})
    makers = reading.makers(value, lambda op: op.kind in through)
    return any(op.kind == "sub" and op.input("other") is not None for op in makers)


# --------------------------------------------------------------------------------
# Weights that no optimizer holds.

_ADDS: Final = frozenset({"add", "add_", "lift_fresh", *RESHAPING})


@on_tape
def unheld_leaf(reading: TapeReading) -> Found | None:
    """Find a tensor outside the model that gets a gradient in the loss, while no optimizer holds it."""
    if not reading.tape.optimizers:
        return None
    asked = {each for mark in reading.tape.backwards() for each in references(mark.data.get("inputs"))}
    held = {reading.tape.values[value].storage for value in reading.held.values()}
    for root in reading.roots:
        for value in reading.tape.gradient_sources(root):
            is_other = value.role == "constant" and value.storage not in held and value.id not in asked
            if (
                is_other
                and value.is_given
                and not _gives_gradient(reading, value)
                and _is_more_than_a_sum(reading, value)
            ):
                use = reading.tape.consumers(value.id)[0]
                return Found(
                    sites=(signals.LOSS, "optimizer"),
                    evidence=(fact("optimizers that hold it", 0), fact("elements", value.size)),
                    cause=f"A tensor of shape {value.shape} outside the model gets a gradient{reading.where(use)}, but "
                    "no optimizer holds it: it never changes.",
                    fix="Make it an nn.Parameter of the model, or pass it to the optimizer too.",
                )
    return None


def _gives_gradient(reading: TapeReading, value: Value) -> bool:
    """Return whether the program reads or writes the tensor, or its gradient, after backward."""
    same = {each.id for each in reading.tape.values if each.storage == value.storage}
    uses = (op for each in same for op in reading.tape.consumers(each))
    is_changed = any(op.writes for op in uses)
    return is_changed or any(
        each.role == "gradient" and each.shape == value.shape and not each.name for each in reading.tape.values
    )


def _is_more_than_a_sum(reading: TapeReading, value: Value) -> bool:
    """Return whether something else than adding is done with it: a zero that losses are added to is no weight."""
    after = reading.tape.descendants(value.id, through=lambda op: op.kind in _ADDS)
    return any(
        op.kind not in _ADDS and op.phase == "forward" for each in after for op in reading.tape.consumers(each)
    ) and (value.size > 1 or any(op.kind not in _ADDS for op in reading.tape.consumers(value.id)))


# --------------------------------------------------------------------------------
# Averages of weights.

FORGETS: Final = 0.95


def swapped_average(case: Case) -> Found | None:
    """Find an average that forgets itself on the first tape and on the last one alike: else its decay still rises."""
    if case.taped is None or case.first_taped is None or case.taped.tape.step == case.first_taped.tape.step:
        return None
    found, before = _forgetful_average(case), _forgetful_at_first(case)
    if found is None or before is None:
        return None
    kept = [each.evidence[0].value for each in (before, found)]
    return found if abs(kept[0] - kept[1]) < SAME_SHARE else None


SAME_SHARE = Threshold(1e-4, "difference of the shares that an average keeps in two steps: a decay that rises differs")


def _forgets(reading: TapeReading) -> Found | None:
    """Find a running average of weights that keeps next to nothing of itself: its two factors are swapped."""
    names = {value.storage: value.name for value in reading.tape.given("parameter")}
    held = {reading.tape.values[value].storage: name for name, value in reading.held.items()}
    for op in reading.tape.ops:
        # Where several optimizers take turns, the average may be written to before the last backward.
        is_apart = op.phase == "between" or (op.phase == "forward" and not op.in_model)
        if not is_apart or len(op.writes) != 1 or reading.tape.values[op.writes[0]].storage in held:
            continue
        target = reading.tape.values[op.writes[0]]
        parts = _mixture(reading, op.writes[0], 8)
        new = [(storage, share) for storage, share in parts.items() if storage in held]
        old = parts.get(target.storage, 0.0)
        if len(new) == 1 and len(parts) == 2 and FORGETS <= new[0][1] < 1 and abs(old + new[0][1] - 1) < 1e-3:
            return Found(
                sites=(names.get(target.storage) or held[new[0][0]], signals.LOOP),
                evidence=(fact("share of the average that is kept", old), fact("share of the new weights", new[0][1])),
                cause=f"The running average of {held[new[0][0]]} keeps {old:.3g} of itself and takes {new[0][1]:.3g} "
                f"of the new weights in every step{reading.where(op)}: the two factors are swapped, so nothing is "
                "averaged.",
                fix="average.mul_(decay).add_(weight, alpha=1 - decay) with a decay near 1.",
            )
    return None


_forgetful_average, _forgetful_at_first = on_tape(_forgets), on_first_tape(_forgets)


def _mixture(reading: TapeReading, value: int, depth: int) -> dict[int, float]:
    """Return of which values of the beginning, by storage, a value is a weighted sum; empty if it is none."""
    about, op = reading.tape.values[value], reading.tape.producer(value)
    if op is None or depth <= 0:
        return {about.storage: 1.0}
    first, kind = op.input("self"), op.kind.removesuffix("_")
    if first is None or op.phase == "optimizer":
        return {about.storage: 1.0}
    if kind in CARRIERS or kind == "detach":
        return _mixture(reading, first, depth - 1)
    if kind == "copy":
        source = op.input("src")
        return {} if source is None else _mixture(reading, source, depth - 1)
    second = op.input("other") if kind in ("add", "sub") else op.input("end") if kind == "lerp" else None
    if kind == "mul" and second is None and op.input("other") is None:
        return _scaled(_mixture(reading, first, depth - 1), number(op.args.get("other", 1)))
    if second is None:
        return {about.storage: 1.0} if op.phase != "between" else {}
    if kind == "lerp":
        share = number(op.args.get("weight", 0))
        return _added(
            _scaled(_mixture(reading, first, depth - 1), 1 - share),
            _scaled(_mixture(reading, second, depth - 1), share),
        )
    share = number(op.args.get("alpha", 1)) * (1 if kind == "add" else -1)
    return _added(_mixture(reading, first, depth - 1), _scaled(_mixture(reading, second, depth - 1), share))


def _scaled(parts: dict[int, float], factor: object) -> dict[int, float]:
    return {key: share * factor for key, share in parts.items()} if isinstance(factor, int | float) else {}


def _added(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in (*one, *other)}


# --------------------------------------------------------------------------------
# Opponents.


def helping_opponent(case: Case) -> Found | None:
    """Find a generator that is helped by its opponent, or an actor that lowers what its critic expects of actions."""
    steps = [each.tape.step for each in case.rounds]
    return case.rounds[0].once(f"games {steps}", lambda _: _helping_opponent(case.rounds)) if steps else None


def _helping_opponent(rounds: list[TapeReading]) -> Found | None:
    """Compare the two in one round of the loop, or in rounds that take turns."""
    for reading, made, makers in ((each, *game) for each in rounds for game in _games(each)):
        if _VALUES.search(made.path) and _pull(reading, made) == -1 and _learns_values(rounds, made):
            return _lowered_value(reading, made, makers)
        for other in rounds:
            for judged in _judgements(other, made.path, makers):
                if _is_fitted(other, judged):
                    continue
                pulls = _pull(reading, made), _pull(other, judged)
                if None in pulls or pulls[0] != pulls[1] or pulls[0] == 0:
                    continue
                op = reading.tape.producer(next(iter(made.outs.values())))
                return Found(
                    severity="critical",
                    step=reading.tape.step,
                    sites=tuple(dict.fromkeys((signals.LOSS, made.path, *(name.split(".")[0] for name in makers)))),
                    evidence=(fact("direction in which both losses move the score", float(pulls[0] or 0)),),
                    cause="The loss of the generator moves the scores of its samples in the same direction as that of "
                    f"the discriminator{reading.where(op)}: the labels or the sign of one of them are swapped, so the "
                    "generator learns to be recognised.",
                    fix="In the generator's loss use the label of real data for its samples, or the other sign.",
                )
    return None


_VALUES: Final = re.compile(r"critic|value|reward|return|(^|[._])q[f_]?\d*($|[._])|q_?(net|func)", re.IGNORECASE)
"""Names of models of what is earned, which one maximises; what others predict may be a cost."""


def _learns_values(rounds: list[TapeReading], made: Call) -> bool:
    """Return whether a judge is fitted to numbers, by any of its calls: what was tried may come from a memory."""
    calls = ((each, call) for each in rounds for call in each.tape.root_calls() if call.path == made.path)
    return any(len(call.outs) == 1 and _is_fitted(reading, call) for reading, call in calls)


def _is_fitted(reading: TapeReading, call: Call) -> bool:
    """Return whether the score of a call is compared with a different number for each sample, not with a label."""
    (score,) = call.outs.values()
    after = reading.tape.descendants(score, through=lambda op: not op.in_model)
    targets = (target for output, target, _ in reading.compared() if output in after)
    contents = (reading.numbers.of(target) for target in targets)
    return any(content is not None and np.unique(content).size > 2 for content in contents)


def _lowered_value(reading: TapeReading, made: Call, makers: list[str]) -> Found:
    op = reading.tape.producer(next(iter(made.outs.values())))
    return Found(
        severity="critical",
        step=reading.tape.step,
        sites=tuple(dict.fromkeys((signals.LOSS, *(name.split(".")[0] for name in makers), made.path))),
        evidence=(fact("change of the loss as values rise", 1.0),),
        cause=f"The actor is trained to lower what {made.path} expects of its actions{reading.where(op)}: the minus "
        "before the value is missing.",
        fix="Minimise the negative value: actor_loss = -critic(state, actor(state)).mean().",
        refute=f"If {made.path} predicts a cost, not a return, this finding is wrong.",
    )


def _games(reading: TapeReading) -> Iterator[tuple[Call, list[str]]]:
    """Yield calls of a judge on samples with a gradient to their maker, which is trained alone; and its parameters."""
    tape = reading.tape
    trained = [{value for group in each.groups for value in group.parameters} for each in tape.optimizers]
    for made in tape.root_calls():
        if len(made.outs) != 1:
            continue
        given = [value for value in made.args.values() if tape.values[value].requires_grad]
        inside = {value for op in tape.ops[made.first : made.last] for _, value in op.inputs()}
        sources = [source for value in given for source in tape.gradient_sources(value)]
        makers = {source.id for source in sources if source.role == "parameter"}
        if makers and any(makers & held and not inside & held for held in trained):
            yield made, sorted(_names(reading, makers))


def _judgements(reading: TapeReading, path: str, makers: list[str]) -> Iterator[Call]:
    """Yield calls of a judge on samples of a maker that no gradient goes back to."""
    for call in reading.tape.root_calls():
        given = next(iter(call.args.values()), None)
        if call.path != path or len(call.args) != 1 or len(call.outs) != 1 or given is None:
            continue
        if not reading.tape.values[given].requires_grad and _made_of(reading, given) & set(makers):
            yield call


def _names(reading: TapeReading, values: set[int]) -> set[str]:
    return {reading.tape.values[each].name for each in values}


def _made_of(reading: TapeReading, value: int) -> set[str]:
    return {each for each in _names(reading, reading.tape.ancestors(value)) if each}


def _pull(reading: TapeReading, call: Call) -> int | None:
    """Return whether the loss of a call falls with its scores (1), or rises (-1); 0 if neither, None if unknown.

    Terms that the scores are no part of do not count: a penalty on gradients cannot be computed again.
    """
    (score,) = call.outs.values()
    within = functools.partial(reading.tape.ancestors, through=reading.tape.is_differentiable)
    roots = [root for root in dict.fromkeys(reading.tape.loss_values()) if score in within(root)]
    content = reading.tape.tensor(score)
    if len(roots) != 1 or content is None:
        return None
    terms = [term for term in reading.terms_of(roots[0]) if score in within(term.value)]
    base = np.asarray(content, dtype=np.float64)
    found: list[float] = []
    for shift in (-0.1, 0.0, 0.1):
        moved = TapedNumbers(reading.tape, {score: base + shift * (float(base.std()) + 1e-2)})
        numbers = [(term, moved.of(term.value)) for term in terms]
        if any(each is None or each.size != 1 or not np.isfinite(each).all() for _, each in numbers):
            return None
        found.append(sum(term.sign * term.factor * float(each.sum()) for term, each in numbers if each is not None))
    return 1 if found[0] > found[1] > found[2] else -1 if found[0] < found[1] < found[2] else 0


# --------------------------------------------------------------------------------
# Classes, pairs, padding.

MANY: Final = 16


@on_tape
def inverted_weights(reading: TapeReading) -> Found | None:
    """Find weights of classes that are larger the more frequent a class is."""
    for loss in reading.losses:
        given = loss.op.input("weight")
        weights = None if given is None else reading.numbers.of(given)
        targets = None if loss.target is None else reading.numbers.of(loss.target)
        if loss.kind not in ("cross_entropy", "nll_loss") or weights is None or targets is None or targets.size < MANY:
            continue
        counts = np.bincount(targets[(targets >= 0) & (targets < weights.size)].ravel(), minlength=weights.size)
        if _grows_with(counts, weights):
            return Found(
                sites=(signals.LOSS,),
                evidence=(fact("largest weight over the smallest", float(weights.max() / weights.min())),),
                cause=f"The more frequent a class is, the larger is its weight in {loss.kind}{reading.where(loss.op)}: "
                "rare classes count even less than without weights. The inverse was meant.",
                fix="Use weights that fall with the frequency: weight = total / (classes * counts).",
            )
    return _inverted_pos_weight(reading)


def _inverted_pos_weight(reading: TapeReading) -> Found | None:
    """Find a weight below 1 of positives that are rare, or above 1 of positives that are frequent."""
    for loss in reading.losses:
        given = loss.op.input("pos_weight")
        weights = None if given is None else reading.numbers.of(given)
        targets = None if loss.target is None else reading.numbers.of(loss.target)
        if weights is None or targets is None or len(targets) < MANY or not np.isin(targets, (0, 1)).all():
            continue
        share = targets.reshape(-1, weights.size).mean(axis=0) if targets.size % weights.size == 0 else targets.mean()
        share = np.clip(share, 1e-6, 1 - 1e-6)
        is_uneven = (share <= 1 / 4) | (share >= 3 / 4)
        # A weight of another size was chosen by hand.
        odd = is_uneven & (np.abs(np.log(np.maximum(weights, 1e-9) * (1 - share) / share)) < np.log(2))
        if odd.any():
            at = int(np.argmax(odd))
            return Found(
                sites=(signals.LOSS,),
                evidence=(
                    fact("weight of positives", float(np.ravel(weights)[at])),
                    fact("share of positives", float(np.ravel(share)[at])),
                ),
                cause=f"pos_weight is the wrong way round{reading.where(loss.op)}: positives are "
                f"{np.ravel(share)[at]:.0%} of the targets, and have a weight of {np.ravel(weights)[at]:.3g}.",
                fix="Use negatives / positives: pos_weight = (len(y) - y.sum()) / y.sum().",
            )
    return None


def _grows_with(counts: Numbers, weights: Numbers) -> bool:
    """Return whether weights have the order of counts, both clearly different."""
    if (
        weights.ndim != 1
        or weights.min() <= 0
        or weights.max() < 2 * weights.min()
        or counts.max() < 3 * max(counts.min(), 1)
    ):
        return False
    order = np.argsort(counts, kind="stable")
    return bool((np.diff(weights[order]) >= -1e-6 * weights.max()).all() and np.unique(weights).size > 1)


@on_tape
def itself_among_pairs(reading: TapeReading) -> Found | None:
    """Find similarities of samples with each other in which each sample competes with itself."""
    for op in reading.forward_ops:
        first, second = op.input("self"), op.input("mat2")
        if op.kind != "mm" or first is None or second is None or op.in_model:
            continue
        if not reading.tape.values[first].requires_grad or _behind(reading, first) != _behind(reading, second):
            continue
        for loss in reading.losses:
            if loss.kind != "cross_entropy" or not _only_scaled(reading, loss, op.outs[0]):
                continue
            if _are_own_answers(reading, loss):
                return Found(
                    sites=(signals.LOSS, "(data)"),
                    evidence=(fact("samples whose right answer is themselves", reading.tape.values[first].shape[0]),),
                    cause=f"All samples are compared with each other{reading.where(op)}, and the right answer of each "
                    f"is itself, in the very same view: {loss.kind}{reading.where(loss.op)} has nothing to learn from.",
                    fix="Compare the outputs of two views: logits = z1 @ z2.T.",
                    refute="Compare both sides with torch.equal: if it returns False, this finding is wrong.",
                )
            if not _is_diagonal(reading, loss):
                return Found(
                    sites=(signals.LOSS,),
                    evidence=(
                        fact("samples that are compared with themselves", reading.tape.values[op.outs[0]].shape[0]),
                    ),
                    cause=f"All samples are compared with each other{reading.where(op)}, each also with itself. "
                    "The similarity with itself, the largest of all, is a wrong answer for "
                    f"{loss.kind}{reading.where(loss.op)}.",
                    fix="Mask the diagonal: similarity.fill_diagonal_(float('-inf')) before the loss.",
                )
    return None


def _behind(reading: TapeReading, value: int) -> int:
    return reading.plain(value, RESHAPING | {"t", "transpose", "permute"}).id


def _only_scaled(reading: TapeReading, loss: TapedLoss, value: int) -> bool:
    through = frozenset({"div", "mul", *RESHAPING})
    return value in reading.tape.ancestors(loss.value, through=lambda op: op.kind in through)


def _are_own_answers(reading: TapeReading, loss: TapedLoss) -> bool:
    target = None if loss.target is None else reading.numbers.of(loss.target)
    return target is not None and np.array_equal(target, np.arange(target.size))


def _is_diagonal(reading: TapeReading, loss: TapedLoss) -> bool:
    """Return whether the right answer of each sample is itself, or not known."""
    target = None if loss.target is None else reading.numbers.of(loss.target)
    return target is None or target.ndim != 1 or bool((target == np.arange(len(target))).any())


_PICKS: Final = CARRIERS | {"diagonal", "masked_select"}


@on_tape
def scaled_in_part(reading: TapeReading) -> Found | None:
    """Find scores of one softmax of which some are divided by a temperature and others are not."""
    for op in reading.forward_ops:
        parts = references(op.args.get("tensors")) if op.kind == "cat" and not op.in_model else []
        if len(parts) < 2 or not all(reading.tape.values[each].requires_grad for each in parts):
            continue
        factors = {abs(reading.unscaled(each, _PICKS)[1]) for each in parts}
        kinds = {getattr(reading.tape.producer(reading.unscaled(each, _PICKS)[0].id), "kind", "") for each in parts}
        after = reading.tape.descendants(op.outs, through=lambda each: each.kind in _ONLY_SCALES)
        softmax = [use for each in after for use in reading.tape.consumers(each) if use.kind in _COMPETES]
        if len(factors) < 2 or 1.0 not in factors or not kinds <= _SIMILARITIES or not softmax:
            continue
        other = next(each for each in factors if each != 1.0)
        return Found(
            sites=(signals.LOSS,),
            evidence=(fact("factor of some scores", other), fact("factor of the others", 1.0)),
            cause=f"Some scores of a softmax are multiplied by {other:.3g}, and the others, which they compete with, "
            f"are not{reading.where(op)}: the temperature acts on one side only.",
            fix="Divide all scores by the temperature: torch.cat([positive, negatives], 1) / temperature.",
            refute="Print both parts before they are joined: if both were divided, this finding is wrong.",
        )
    return None


_ONLY_SCALES: Final = frozenset({"div", "mul", *RESHAPING})
_COMPETES: Final = ("_log_softmax", "_softmax", "logsumexp")
_SIMILARITIES: Final = frozenset({"mm", "bmm", "sum", "cosine_similarity", "addmm", "mv", "baddbmm", "div"})


@on_tape
def hidden_as_cell(reading: TapeReading) -> Found | None:
    """Find the hidden state of one LSTM that another takes for its cell state, while the cell state is lost."""
    made = {out: (call, place) for call in reading.tape.calls for place, out in call.outs.items()}
    for call in reading.tape.calls:
        cell = call.args.get("[1][1]") if call.kind in ("LSTM", "LSTMCell") else None
        source = None if cell is None else reading.source(cell).id
        about = made.get(source) if source is not None else None
        if about is None or source is None or not about[0].kind.startswith("LSTM"):
            continue
        other, place = about
        lost = other.outs.get("[1][1]" if other.kind == "LSTM" else "[1]")
        if place in ("[1][0]", "[0]") and lost is not None and lost != source and not _is_needed_value(reading, lost):
            return Found(
                sites=(other.path, call.path, "(model)"),
                evidence=(fact("uses of the cell state", 0),),
                cause=f"{call.path} ({call.kind}) starts from the hidden state of {other.path} in the place of its "
                f"cell state{reading.where(reading.tape.producer(cell) if cell is not None else None)}; the cell state "
                f"of {other.path} is not used.",
                fix="Return both states: h, c = h[...], c[...].",
                refute="Compare both states that it starts from: if they differ, this finding is wrong.",
            )
    return None


def _is_needed_value(reading: TapeReading, value: int) -> bool:
    """Return whether the loss depends on a value that a module returned, other than inside that module."""
    after = [use for use in reading.tape.consumers(value) if use.phase == "forward"]
    inside = getattr(reading.tape.producer(value), "module", "")
    return any(use.module != inside and not reading.needed.isdisjoint((*use.outs, *use.writes)) for use in after)


@on_tape
def learnt_padding(reading: TapeReading) -> Found | None:
    """Find a loss that counts the padding of sequences among its targets, where the model knows what padding is."""
    known = {int(op.args.get("padding_idx", -1)) for op in reading.tape.ops if op.kind == "embedding"} - {-1}
    padding = padding_of(reading) if known else []
    for loss in reading.losses if padding else ():
        targets = None if loss.target is None else reading.numbers.of(reading.plain(loss.target).id)
        if loss.kind not in ("cross_entropy", "nll_loss") or targets is None or targets.ndim != 2:
            continue
        ignored, weight = number(loss.op.args.get("ignore_index", -100)), loss.op.input("weight")
        for pad in known - {ignored} if weight is None and loss.op.args.get("reduction") != 0 else ():
            share = float((targets == pad).mean())
            if share > COUNTED and _ends_with(targets, pad):
                return Found(
                    severity="warning",
                    sites=(signals.LOSS, "loader"),
                    evidence=(fact("share of the targets that is padding", share),),
                    cause=f"{share:.0%} of the targets are padding (index {pad}, the padding_idx of the embedding), "
                    f"and {loss.kind} counts them{reading.where(loss.op)}: the model learns to predict padding.",
                    fix=f"Pass ignore_index={pad} to the loss.",
                )
    return None


COUNTED: Final = 0.2
"""Share of the targets: less padding does little harm."""


def _ends_with(targets: Numbers, pad: int) -> bool:
    """Return whether a number stands at the end of many rows in runs, and nowhere else."""
    is_pad = targets == pad
    changes = np.diff(is_pad.astype(np.int8), axis=1)
    return bool((changes >= 0).all() and (is_pad[:, -2:].all(axis=1)).mean() > 0.25)


# --------------------------------------------------------------------------------
# Samples that are mixed.


@on_tape
def mixed_without_targets(reading: TapeReading) -> Found | None:
    """Find inputs that are mixed with those of other samples, while neither targets nor losses are."""
    inputs = reading.tape.ancestors(reading.tape.inputs_of_root())
    for op in reading.tape.ops:
        if op.kind != "randperm" or op.phase not in ("forward", "between") or not op.outs:
            continue
        uses = [use for use in reading.tape.consumers(op.outs[0]) if use.kind in ("index", "index_select")]
        taken = {out for use in uses for out in use.outs}
        for mix in (each for out in taken for each in reading.tape.consumers(out)):
            if not _mixes(reading, mix, taken) or inputs.isdisjoint(mix.outs) or len(uses) != 1:
                continue
            source = uses[0].input("self")
            if source is None or reading.tape.values[source].shape[:1] != reading.tape.values[op.outs[0]].shape:
                continue
            return Found(
                severity="warning",
                sites=(signals.LOOP, "(data)", signals.LOSS),
                evidence=(fact("times the order is used for inputs", 1), fact("times it is used for targets", 0)),
                cause=f"Each input is mixed with that of another sample{reading.where(mix)}, but the targets of these "
                "others are not used: mixed inputs get the labels of one of the two.",
                fix="Mix the losses in the same way: lam * loss(out, y) + (1 - lam) * loss(out, y[order]).",
            )
    return None


def _mixes(reading: TapeReading, op: Op, taken: set[int]) -> bool:
    """Return whether an operation scales reordered samples that are then added to the samples in their own order."""
    if op.kind != "mul" or op.input("other") is not None:
        return False
    return any(
        use.kind == "add" and use.input("other") is not None for out in op.outs for use in reading.tape.consumers(out)
    )


# --------------------------------------------------------------------------------
# What a loss gets.

_ONE_SIDED: Final = frozenset(
    {"binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss"}
)


@on_tape
def swapped_arguments(reading: TapeReading) -> Found | None:
    """Find a loss that gets data as its input, and the output of the model as its target."""
    for loss in reading.losses:
        if loss.kind not in _ONE_SIDED or loss.target is None:
            continue
        if loss.target in reading.learnt and not reading.tape.ancestors(loss.value) & set(reading.held.values()):
            return Found(
                severity="critical",
                sites=(signals.LOSS,),
                evidence=(fact("inputs of the loss that are learnt", 0), fact("targets that are learnt", 1)),
                cause=f"The arguments of {loss.kind} are swapped{reading.where(loss.op)}: it gets data as its input, "
                "and the output of the model as its target.",
                fix=f"Call {loss.kind}(output, target).",
                refute="Print requires_grad of both arguments: if that of the first is True, this finding is wrong.",
            )
    return _activated_labels(reading)


def _activated_labels(reading: TapeReading) -> Found | None:
    """Find an activation of labels, zeros and ones, outside of models: it is meant for the output."""
    for op in reading.forward_ops:
        value = op.input("self") if op.kind in ("sigmoid", "_softmax", "_log_softmax") and not op.in_model else None
        if value is None or value in reading.learnt or op.outs[0] not in reading.needed:
            continue
        if _are_flags(reading, value):
            return Found(
                severity="critical",
                sites=(signals.LOSS,),
                evidence=(fact("labels that an activation is applied to", reading.tape.values[value].size),),
                cause=f"A {op.kind.strip('_')} is applied to labels, which are 0 or 1{reading.where(op)}: output and "
                "target have changed places.",
                fix="Call the loss with the output first, and the target second.",
                refute="Print the tensor that it is applied to: if it is not 0 or 1 everywhere, this finding is wrong.",
            )
    return None


def _are_flags(reading: TapeReading, value: int) -> bool:
    content = reading.numbers.of(value)
    return content is not None and content.size > 1 and bool(((content == 0) | (content == 1)).all())


_OF_SUMS: Final = frozenset({"add", "sum", "mul", *RESHAPING})


@on_tape
def overlap_of_logits(reading: TapeReading) -> Found | None:
    """Find an overlap with a mask, as in a Dice loss, of outputs of both signs: a layer's, without an activation."""
    for op in reading.forward_ops:
        first, second = op.input("self"), op.input("other")
        if op.kind != "div" or op.in_model or first is None or second is None or op.outs[0] not in reading.learning:
            continue
        above_ops, below_ops = (_made_by_sums(reading, each) for each in (first, second))
        added = {reading.source(value).id for each in below_ops for _, value in each.inputs()}
        for product in above_ops:
            pair = reading.pair(product) if product.kind == "mul" else None
            masks = [] if pair is None else [each for each in pair if each not in reading.learnt]
            if pair is None or len(masks) != 1 or not _are_flags(reading, masks[0]):
                continue
            output = pair[0] if pair[1] == masks[0] else pair[1]
            content = reading.tape.tensor(reading.source(output).id)
            if reading.source(output).id in added and content is not None and float(content.min()) < 0:
                return Found(
                    severity="critical",
                    sites=(signals.LOSS,),
                    evidence=(below("smallest output that is added up", float(content.min()), 0.0),),
                    cause=f"The overlap of outputs and a mask is computed of outputs of both signs{reading.where(op)}: "
                    "a sum of them is no area, and the loss has no floor.",
                    fix="Apply a sigmoid, or a softmax over the classes, to the outputs first.",
                    refute="Print the smallest output: if it is not negative, this finding is wrong.",
                )
    return None


def _made_by_sums(reading: TapeReading, value: int) -> list[Op]:
    return reading.makers((value,), lambda op: op.kind.removesuffix("_") in _OF_SUMS)


@on_tape
def dropped_answers(reading: TapeReading) -> Found | None:
    """Find a dropout between the last layer and the loss."""
    for loss in reading.losses:
        maker = reading.origin(loss.value)
        if maker is None or loss.value not in reading.learning:
            continue
        is_dropout = maker.kind == "native_dropout" or reading.kind_of(maker.module).startswith("Dropout")
        if is_dropout or maker.function == "dropout":
            return Found(
                severity="warning",
                sites=tuple(dict.fromkeys((reading.site(maker, signals.LOSS), signals.LOSS))),
                evidence=(fact("layers between the dropout and the loss", 0),),
                cause=f"Dropout is applied to the answers of the model{reading.where(maker)}: {loss.kind} gets outputs "
                "of which some are set to 0 at random, and the others scaled.",
                fix="Apply dropout before the last layer, not after it.",
                refute="Print the outputs in training mode: if none is exactly 0, this finding is wrong.",
            )
    return None


_REAL_DRAWS: Final = frozenset({"normal", "normal_", "randn"})
_LAYERS: Final = frozenset({"addmm", "mm", "bmm", "convolution", "linear", "matmul"})


@on_tape
def sampled_without_gradient(reading: TapeReading) -> Found | None:
    """Find real numbers drawn around what a layer computed, without a gradient, that other layers learn from."""
    scored = {value for op in reading.tape.ops if op.function == "log_prob" for _, value in op.inputs()}
    for op in reading.tape.ops:
        centres = [value for _, value in op.inputs() if reading.source(value).id in reading.learnt]
        if not op.is_random or op.grad_enabled or op.kind not in _REAL_DRAWS or not centres or not op.outs:
            continue
        after = reading.tape.descendants(op.outs[0])
        feeds = [use for value in after for use in reading.tape.consumers(value) if use.kind in _LAYERS]
        if scored.isdisjoint(after) and any(use.grad_enabled and _is_needed(reading, use) for use in feeds):
            return Found(
                severity="warning",
                sites=(reading.site(op, "(model)"), "(model)"),
                evidence=(fact("gradients through the draw", 0),),
                cause=f"Numbers are drawn around what the model computed without a gradient{reading.where(op)}: "
                "nothing before the draw learns from what comes after it.",
                fix="Use rsample() instead of sample(), or mean + std * torch.randn_like(std).",
                refute="Print requires_grad of what was drawn: if it is True, this finding is wrong.",
            )
    return None


def _is_needed(reading: TapeReading, op: Op) -> bool:
    return not reading.needed.isdisjoint(op.outs)
