"""Rules about how weights begin."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from sonde.core import schema, signals, statistics
from sonde.core.facts import ParameterFacts
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import began_badly, beginning_severity, is_learning_well, wastes_steps
from sonde.diagnosis.ownership import output_module
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, few, rule
from sonde.diagnosis.seen_loss import SeenLoss, seen_losses
from sonde.diagnosis.symptoms import BADLY_SCALED
from sonde.diagnosis.weights import first_weights, last_weights
from sonde.records import Evidence

GAIN_HIGH = Threshold(5.0, "rms of a weight times the root of its inputs; He has 1.4, torch's default 0.6")
GAIN_LOW = Threshold(0.05, "the same; the smallest of common recipes, GPT-2's for narrow layers, has 0.1")
GROWN_ANEW = Threshold(10.0, "size of a weight over its first size: of what it began with nothing is left")
BIAS_HIGH = Threshold(5.0, "size of biases at the start; torch's are below 1, that of a head for rare classes is 4.6")
OUTPUT_STD_HIGH = Threshold(10.0, "standard deviation of a layer's outputs at the first step; He keeps it near 1")
OUTPUT_STD_LOW = Threshold(0.01, "the same, in a model without norms")
FADE = Threshold(1e-3, "spread of the last hidden layer over that of the first; torch's default stays above 0.05")
FADE_LAYERS = Threshold(0.75, "share of layers at which the signal fades: one narrow layer is not a trend")
FADE_DEPTH = Threshold(4, "hidden layers: gains multiply only over several")
CALL_GROWTH = Threshold(30.0, "output of a module, last call of a pass over first; an orthogonal matrix has 1")
CALLS = Threshold(8, "calls of a module in a pass, as of a recurrent cell")


@rule(
    "bad_init_scale",
    needs=["gradient", "output", "parameter", "update", "facts.order"],
    explains=[*BADLY_SCALED, "lr_too_low"],
    fix="Leave torch's default, or use kaiming_normal_ (ReLU) or xavier_uniform_ (tanh, sigmoid).",
    refute="Re-initialise with kaiming_normal_ and train 50 steps: if the loss does not change, this finding is wrong.",
    since=2,
)
def bad_init_scale(case: Case) -> Found | None:
    """The initial weights are far too large or far too small.

    For their number of inputs, they make the signal explode or fade: in one layer, over depth, or over calls.
    """
    if (found := _through_time(case) or _biases(case)) is not None:
        return found
    gains = _gains(case)
    if len(gains) < 2:
        return None
    outputs = _output_spread(case)
    high = [name for name, gain in gains.items() if gain >= GAIN_HIGH]
    low = [name for name, gain in gains.items() if 0 < gain <= GAIN_LOW]
    loud = max(outputs.values(), default=0.0)
    quiet = min(outputs.values(), default=1.0)
    if high and (loud >= OUTPUT_STD_HIGH or began_badly(case)):
        evidence = (
            above(f"gain of {high[0]}, its size times the root of its inputs", gains[high[0]], GAIN_HIGH),
            fact("largest standard deviation of an output at the first step", loud),
        )
        return _badly_scaled(case, high, "large", evidence)
    normalised = _is_normalised(case)
    if len(low) >= 2 and 2 * len(low) >= len(gains) and quiet <= OUTPUT_STD_LOW and not normalised:
        evidence = (
            below(f"gain of {low[0]}, its size times the root of its inputs", gains[low[0]], GAIN_LOW),
            below("smallest standard deviation of an output at the first step", quiet, OUTPUT_STD_LOW),
        )
        found = _badly_scaled(case, low, "small", evidence)
        return replace(found, severity="warning") if _growth(case, low) >= GROWN_ANEW else found
    return None if normalised else _through_depth(case, gains, outputs)


def _biases(case: Case) -> Found | None:
    """Find biases most of which begin so large that they outweigh what is added to them."""
    panel = case.first_panel("parameter")
    known = zip(panel.sites, panel.stat("rms")[0].tolist(), strict=True) if len(panel) else ()
    sizes = {
        site.name: size
        for site, size in known
        if len(site.shape) == 1 and "bias" in site.name.rpartition(".")[2] and "Norm" not in site.kind
    }
    large = sorted((name for name, size in sizes.items() if size >= BIAS_HIGH), key=sizes.__getitem__, reverse=True)
    if len(large) < 2 or 2 * len(large) < len(sizes):
        return None
    return Found(
        severity="info" if is_learning_well(case) and not wastes_steps(case) else "warning",
        step=1,
        sites=tuple(large[:6]),
        evidence=(
            above(f"size of {large[0]} at the start", sizes[large[0]], BIAS_HIGH),
            fact("biases like this", len(large)),
        ),
        cause=f"The biases begin far too large, most of all {large[0]} at {sizes[large[0]]:.2g}: they outweigh what is "
        "added to them, so that units are always on, always off or saturated.",
        fix="Begin biases at 0, as torch's default nearly does.",
        refute="Set all biases to 0 and train 50 steps: if the loss does not change, this finding is wrong.",
    )


def _is_normalised(case: Case) -> bool:
    """Return whether norms bring the signal back to its scale: not those whose own scales are almost nothing."""
    norms = [module.name for module in case.facts.modules if "Norm" in module.kind]
    panel = case.first_panel("parameter")
    sizes = dict(zip(panel.names, panel.stat("rms")[0].tolist(), strict=True)) if len(panel) else {}
    scales = [sizes.get(f"{name}.weight", 1.0) for name in norms]
    return bool(norms) and not np.median(scales) <= GAIN_LOW


def _growth(case: Case, names: list[str]) -> float:
    """Return the present size of weights over their first, median."""
    first, last = first_weights(case), last_weights(case)
    if first.names != last.names:
        return 1.0
    mine = np.isin(first.names, names) & (first.sizes[0] > 0) & np.isfinite(last.sizes[-1])
    return float(np.median(last.sizes[-1, mine] / first.sizes[0, mine])) if mine.any() else 1.0


def _through_depth(case: Case, gains: dict[str, float], outputs: dict[str, float]) -> Found | None:
    """Find layers none of which is far off, but whose gains multiply to almost nothing or to far too much."""
    # The last layer may start at zero on purpose.
    hidden = list(outputs.values())[:-1]
    if len(hidden) < FADE_DEPTH or not min(hidden) > 0:
        return None
    ratio = hidden[-1] / hidden[0]
    steps = np.array(hidden[1:]) / np.array(hidden[:-1])
    usual = sorted(gains.values())
    if ratio <= FADE and (steps < 1).mean() >= FADE_LAYERS:
        evidence = below("spread of the last hidden output over that of the first", ratio, FADE)
        names = [name for name, gain in gains.items() if gain <= usual[len(usual) // 2]]
        return _badly_scaled(case, names, "small", (evidence, fact("hidden layers", len(hidden))))
    if ratio >= 1 / FADE and (steps > 1).mean() >= FADE_LAYERS:
        evidence = above("spread of the last hidden output over that of the first", ratio, 1 / FADE)
        names = [name for name, gain in gains.items() if gain >= usual[len(usual) // 2]]
        return _badly_scaled(case, names, "large", (evidence, fact("hidden layers", len(hidden))))
    return None


def _through_time(case: Case) -> Found | None:
    """Find a module that is called many times in a pass, and whose output grows from call to call at the start."""
    calls: dict[str, dict[int, float]] = {}
    panel = case.first_panel("output")
    sizes = panel.stat("rms") if panel.sites else np.zeros((0, 0))
    passed = np.flatnonzero(np.isfinite(sizes).any(axis=1))
    for site, size in zip(panel.sites, sizes[passed[0]] if len(passed) else (), strict=False):
        if np.isfinite(size):
            calls.setdefault(site.name, {})[site.call] = float(size)
    for name, by_call in calls.items():
        if len(by_call) < CALLS:
            continue
        # The first call may get a state of zeros; the last represents all calls after it.
        outputs = np.array([by_call[call] for call in sorted(by_call)[1:-1]])
        growth = float(outputs[-1] / outputs[0]) if outputs[0] > 0 else 0.0
        grows = float((outputs[1:] > outputs[:-1]).mean())
        if growth >= CALL_GROWTH and grows >= FADE_LAYERS:
            evidence = above(f"output of {name}, last call of a pass over first", growth, CALL_GROWTH)
            found = _badly_scaled(case, [name], "large", (evidence, fact("calls compared", len(outputs))))
            return replace(found, severity="warning") if began_badly(case) else found
    return None


def _gains(case: Case) -> dict[str, float]:
    """Return the factor by which each initial weight multiplies the spread of its inputs."""
    weights = first_weights(case)
    shapes = {site.name: site.shape for site in case.sites("parameter")}
    if not weights.sizes.size:
        return {}
    known = np.isfinite(weights.sizes)
    first = weights.sizes[known.argmax(axis=0), np.arange(len(weights.names))]
    any_known = np.atleast_1d(known.any(axis=0))
    return {
        name: float(first[at]) * math.sqrt(math.prod(shapes[name][1:]))
        for at, name in enumerate(weights.names)
        if any_known[at] and len(shapes[name]) >= 2
    }


def _output_spread(case: Case) -> dict[str, float]:
    panel = case.first_panel("output")
    if not panel.sites:
        raise NotMeasured("outputs")
    wanted = [at for at, site in enumerate(panel.sites) if "Linear" in site.kind or "Conv" in site.kind]
    if not wanted:
        return {}
    stds = panel.pick(wanted).stat("std")
    known = np.isfinite(stds)
    first = stds[known.argmax(axis=0), np.arange(len(wanted))]
    any_known = np.atleast_1d(known.any(axis=0))
    return {panel.sites[index].name: float(first[at]) for at, index in enumerate(wanted) if any_known[at]}


def _badly_scaled(case: Case, names: list[str], how: str, evidence: tuple[Evidence, ...]) -> Found:
    return Found(
        severity=beginning_severity(case),
        step=1,
        sites=tuple(names[:6]),
        evidence=(*evidence, fact("weights like this", len(names))),
        cause=f"The initial weights are far too {how} for their number of inputs, most of all those of {names[0]}.",
    )


ROWS_APART = Threshold(1e-5, "spread between units over the spread of all elements: rounding only")


@rule(
    "symmetric_init",
    needs=[signals.ROW_SPREAD, "update", "facts.parameters"],
    explains=["class_imbalance_collapse", "constant_output"],
    exact=True,
    fix="Initialise it at random (kaiming_normal_, xavier_uniform_), not with a constant.",
    refute="Train 50 steps from random weights: if the loss does not change, this finding is wrong.",
    since=3,
)
def symmetric_init(case: Case) -> Found | None:
    """All units of a layer started with the same weights.

    They are still equal, or started at a constant other than zero: residual branches, adapters and heads start at zero.
    """
    case.need_facts()
    started = [
        each
        for each in case.facts.parameters
        if each.equal_rows and each.trainable and len(each.shape) >= 2 and each.shape[0] > 1 and _is_layer(each)
    ]
    together = {each.name: spread for each in started if (spread := _spread(case, each.name)) is not None}
    equal = [name for name, spread in together.items() if spread <= ROWS_APART]
    alike = equal or [each.name for each in started if not each.zero and not _is_beside_others(case, each)]
    if not alike:
        return None
    stuck = bool(equal)
    name = alike[0]
    # One layer may be an average by design; several constant layers are not.
    several = len(alike) > 1
    return Found(
        severity="warning" if stuck or several or not is_learning_well(case) else "info",
        step=int(case.history.first_step or 0),
        sites=tuple(alike[:6]),
        evidence=(
            fact("weights that started with all rows equal", len(alike)),
            fact("spread between rows over the spread of all, now", together.get(name, float("nan"))),
        ),
        cause=f"All units of {name} started with the same weights: they get almost the same gradient, and the layer "
        "acts "
        "as a single unit.",
    )


def _is_beside_others(case: Case, parameter: ParameterFacts) -> bool:
    """Return whether its module has another weight of this shape whose rows differ, as the means beside deviations do.

    Each unit has a row of both, so that units differ.
    """
    module = parameter.name.rpartition(".")[0]
    return any(
        each.shape == parameter.shape and not each.equal_rows and each.name.rpartition(".")[0] == module
        for each in case.facts.parameters
        if each.name != parameter.name
    )


def _is_layer(parameter: ParameterFacts) -> bool:
    return any(word in parameter.kind for word in ("Linear", "Conv", "RNN", "LSTM", "GRU", "Attention"))


def _spread(case: Case, name: str) -> float | None:
    """Return how far rows differ after some steps that moved the weight; None if that is not known."""
    track, update = case.vital(name, signals.ROW_SPREAD), case.track(f"{name}:update")
    moved = update is None or bool((update.stat("norm") > 0).any())
    if track is None or track.steps[-1] < 2 or not moved:
        return None
    return float(track.numbers()[-1])


BLOCKED_STEPS = Threshold(3, "persistence: steps with gradients of exactly zero")


@rule(
    "zero_init_blocked",
    needs=["gradient", "parameter", "facts.parameters"],
    explains=["constant_output", "dead_relu", "symmetric_init", "vanishing_gradient"],
    exact=True,
    fix="Initialise at least one of them at random; only one factor of a product may start at zero.",
    refute="Set one of them to small random values: if the other's gradient stays zero, this finding is wrong.",
    since=BLOCKED_STEPS,
)
def zero_init_blocked(case: Case) -> Found | None:
    """Two weights that started at zero keep each other from learning.

    At least two have had no gradient but zero since; one zero factor is how LoRA and residual branches start.
    """
    case.need_facts()
    zero = {each.name for each in case.facts.parameters if each.zero and each.trainable and len(each.shape) >= 2}
    if len(zero) < 2:
        return None
    gradients, parameters = case.panel("gradient"), case.panel("parameter")
    chosen = [at for at, site in enumerate(gradients.sites) if site.name in zero]
    if len(chosen) < 2:
        return None
    largest = gradients.pick(chosen).stat("abs_max")
    sizes = np.nan_to_num(parameters.stat("abs_max")).max(axis=0)
    still = {site.name for at, site in enumerate(parameters.sites) if site.name in zero and sizes[at] == 0}
    blocked = [
        gradients.sites[index].name
        for at, index in enumerate(chosen)
        if (known := largest[np.isfinite(largest[:, at]), at]).size >= BLOCKED_STEPS
        and known.max() == 0
        and gradients.sites[index].name in still
    ]
    if len(blocked) < 2:
        return None
    return Found(
        severity="critical" if case.learning.failed else "warning",
        step=int(case.history.first_step or 0),
        sites=tuple(blocked[:6]),
        evidence=(
            above("weights at zero whose gradients were always zero", len(blocked), 2),
            fact("largest gradient among them", 0.0, f"{blocked[0]}:gradient abs_max"),
        ),
        cause=f"{blocked[0]} and {blocked[1]} are both zero: the gradient of each is multiplied by the other, so "
        "neither "
        "ever changes.",
    )


TWIN_STEPS = Threshold(5, "persistence: steps after which layers that started equal are still equal to the last bit")


@rule(
    "identical_layer_init",
    needs=["parameter", "update", "facts.parameters"],
    explains=["symmetric_init"],
    exact=True,
    fix=(
        "Create each layer separately, or call reset_parameters() on each copy; copy.deepcopy and [layer] * n copy the "
        "values."
    ),
    refute="Subtract one from the other after a step: if the result is not zero, this finding is wrong.",
    since=TWIN_STEPS + 2,
)
def identical_layer_init(case: Case) -> Found | None:
    """Layers started with the same weights and remain equal.

    Copies in sequence differ after one step and do no harm. Copies in parallel get the same input and the same
    gradient, and stay one layer at the cost of many. Biases do not count: where the outputs of layers are added, as in
    residual networks, their gradients are equal.
    """
    groups = {
        (each.name, *each.equal_to)
        for each in case.need_facts().parameters
        if len(each.shape) > 1 and each.equal_to and each.trainable and each.owners and each.name < min(each.equal_to)
    }
    if not groups:
        return None
    panel = case.panel("parameter", last=int(TWIN_STEPS))
    if not panel.sites:
        raise NotMeasured("parameters")
    places = {name: at for at, name in enumerate(panel.names)}
    moved = {track.name for track in case.of("update") if float(statistics.norm(track.rows[-1])) > 0}
    for group in sorted(groups):
        names = [name for name in group if name in places and name in moved and case.parameters[name].owners]
        rows = panel.rows[-1][[places[name] for name in names]] if names else panel.rows[-1][:0]
        twins = [name for name, row in zip(names, rows, strict=True) if row[schema.SEEN] and (row == rows[0]).all()]
        if len(twins) > 1:
            return _twins(case, twins)
    return None


def _twins(case: Case, twins: list[str]) -> Found:
    return Found(
        step=1,
        sites=tuple(twins),
        evidence=(
            above("steps after which they are still equal", case.num_steps - 1, TWIN_STEPS),
            fact("layers that are the same", len(twins), f"{twins[0]}:parameter norm"),
        ),
        cause=f"{few(twins)} started with the same weights and get the same gradients: they stay one layer in "
        f"{len(twins)} copies.",
    )


INITIAL_LOSS_RATIO = Threshold(2.0, "first loss over that of a uniform guess; default layers start at 1.0 to 1.1")
_SCALED: Final = ("mul", "div", "sub", "add")
HUGE_INITIAL_LOSS_RATIO = Threshold(4.0, "the same: logits are certain of wrong answers; language models start below 2")


@rule(
    "large_initial_loss",
    needs=["facts.losses", "facts.order"],
    fix=(
        "Make the initial weights of {the_last_layer} smaller (for example nn.init.normal_(w, std=0.01)), "
        "or normalise its input."
    ),
    refute=(
        "Multiply the logits by 0.1 before the first step: if the loss does not come near ln(classes), this finding is "
        "wrong."
    ),
)
def large_initial_loss(case: Case) -> Found | None:
    """The loss starts far above that of guessing.

    The classifier is certain of wrong answers before it has learnt anything. One with frozen weights has learnt: it is
    certain of the answers to another question. It is a warning where a twentieth of the run or more goes by before the
    loss is near that of guessing.
    """
    if any(not each.trainable for each in case.facts.parameters):
        return None
    for loss in seen_losses(case, "cross_entropy", "nll_loss"):
        expected, output = _expected(loss), loss.output
        if expected is None or output is None or output.steps[0] > 1 or case.history.first_step not in (0, 1):
            continue
        # An optimizer with a closure may have tried several steps within the first: the lowest loss of all counts.
        ratio = float(output.rows[0, schema.MIN]) / expected
        if np.isfinite(ratio) and ratio >= INITIAL_LOSS_RATIO:
            return _starts_high(case, loss, ratio, expected)
    return None


def _expected(loss: SeenLoss) -> float | None:
    facts = loss.facts
    if facts is None or facts.settings.get("reduction") != "mean" or facts.settings.get("weighted"):
        return None
    return math.log(facts.classes) if facts.classes and facts.classes > 1 else None


def _head(case: Case, loss: SeenLoss) -> str | None:
    """Return the layer whose outputs are the logits; None where they are computed further.

    Cosines over a temperature do not show how large the weights are.
    """
    head, facts = output_module(case), loss.facts
    outputs = None if head is None else case.track(f"{head}:output")
    if outputs is None or facts is None:
        return head
    same_size = outputs.rows[0, schema.COUNT] == outputs.rows[0, schema.SEEN] * math.prod(facts.input_shape)
    return head if same_size and facts.made_by not in _SCALED else None


def _tied_head(case: Case) -> str | None:
    """Return the module whose trained weight the logits are products with, where they are computed without a layer.

    Cosines are products with another tensor, the normalised weight.
    """
    reading = case.taped
    makers = () if reading is None else (reading.origin(loss.value) for loss in reading.losses)
    for op in makers:
        if reading is not None and op is not None and op.kind in ("mm", "bmm", "addmm"):
            names = [reading.source(value).name for _, value in op.inputs()]
            return next((name.rpartition(".")[0] for name in names if name in reading.held), None)
    return None


def _starts_high(case: Case, loss: SeenLoss, ratio: float, expected: float) -> Found:
    huge = ratio >= HUGE_INITIAL_LOSS_RATIO
    head = _head(case, loss) or _tied_head(case)
    output = loss.output
    return Found(
        severity="warning" if huge and head and wastes_steps(case) else "info",
        step=1,
        sites=(head, signals.LOSS) if head else (signals.LOSS,),
        evidence=(
            above("first loss over that of guessing", ratio, INITIAL_LOSS_RATIO),
            fact("first loss", ratio * expected, "" if output is None else f"{output.key} mean"),
            fact("loss of guessing, ln(classes)", expected),
        ),
        cause=f"The loss starts at {ratio * expected:.2f}, {ratio:.1f} times the {expected:.2f} of a guess: the first "
        "outputs are large and wrong, and the first steps only undo them.",
        values={"the_last_layer": head or "the last layer"},
    )
