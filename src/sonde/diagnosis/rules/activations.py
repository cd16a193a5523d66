"""Rules about the outputs of layers: dead, saturated, exploding or constant."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sonde.core import signals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import anomaly_severity, is_learning_well
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.tape.contracts import multiplied_scores
from sonde.diagnosis.tape.losses import lost_in_norm
from sonde.diagnosis.track import Track, Values
from sonde.records import Severity

DEAD_SHARE = Threshold(0.9, "share of units that are never positive: the rest cannot carry what the layer should")
DEAD_SAMPLES = Threshold(300, "values per unit: a unit that is active for one sample in a hundred is missed by 5 %")
DEAD_LOOKS = Threshold(5, "samples of the activations, in different steps")
SILENT_STEPS = Threshold(10, "persistence: steps without a positive output and without any gradient")
DORMANT_SHARE = Threshold(0.3, "share of units that are never positive: a third of the layer is not used")
DORMANT_SAMPLES = Threshold(2000, "values per unit, so that rare features had a chance to be active")
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    source: str
    dead: float
    samples: float
    step: int


@rule(
    "dead_relu",
    needs=[signals.EVER_ACTIVE, signals.UNIT_SAMPLES, "gradient", "output", "facts.edges", "facts.order"],
    explains=["constant_output", "lr_too_low", "optimizer_step_noop", "vanishing_gradient"],
    fix="Lower the learning rate, initialise with kaiming_normal_ and zero bias, or use LeakyReLU or GELU.",
    refute="Run the whole training set through the model: if the units are positive for any sample, they are not dead.",
    since=SILENT_STEPS,
)
def dead_relu(case: Case) -> Found | None:
    """Most ReLU units of a layer are never active.

    A layer of which a third is never active, in a model that works, is worth a note: it is wider than it needs to be.
    """
    layers = _layers(case)
    dead = [layer for layer in layers if layer.dead >= DEAD_SHARE]
    if not dead:
        return _dormant([layer for layer in layers if layer.dead >= DORMANT_SHARE and layer.samples >= DORMANT_SAMPLES])
    order = {name: at for at, name in enumerate(case.facts.order)}
    dead.sort(key=lambda layer: order.get(layer.name, len(order)))
    first = dead[0]
    return Found(
        severity=_severity_of_dead(case, dead),
        step=first.step,
        sites=tuple(dict.fromkeys(name for layer in dead[:4] for name in (layer.source, layer.name) if name)),
        evidence=(
            above("share of units that were never positive", first.dead, DEAD_SHARE),
            above("values seen per unit", first.samples, DEAD_SAMPLES),
            fact("layers like this", len(dead)),
        ),
        cause=f"The ReLU units after {first.source or first.name} are dead: {first.dead:.0%} of them are never "
        "positive, "
        "so no gradient passes.",
    )


def _dormant(layers: list[_Layer]) -> Found | None:
    if not layers:
        return None
    layers = sorted(layers, key=lambda layer: -layer.dead)
    worst = layers[0]
    return Found(
        severity="info",
        sites=tuple(layer.name for layer in layers[:4]),
        evidence=(
            above("share of units that were never positive", worst.dead, DORMANT_SHARE),
            above("values seen per unit", worst.samples, DORMANT_SAMPLES),
        ),
        cause=f"{worst.dead:.0%} of the units of {worst.name} were never active: the layer is wider than it needs to "
        "be.",
        fix="Make the layer narrower, lower the learning rate, or use LeakyReLU or GELU.",
    )


def _layers(case: Case) -> list[_Layer]:
    active = case.vitals(signals.EVER_ACTIVE)
    if not active:
        return _silent_layers(case)
    sources = {after: before for before, after in case.facts.edges}
    layers = []
    for track in active:
        seen = case.vital(track.name, signals.UNIT_SAMPLES)
        samples = float(seen.numbers()[-1]) if seen is not None else float("nan")
        if len(track) >= DEAD_LOOKS and samples >= DEAD_SAMPLES:
            share = 1 - float(track.numbers()[-1])
            layers.append(_Layer(track.name, sources.get(track.name, ""), share, samples, int(track.steps[0])))
    return layers


def _silent_layers(case: Case) -> list[_Layer]:
    """Find layers followed by a ReLU that is not a module: their output is never positive, and they have no gradient.

    Outputs that are zero or denormal do not count: there the signal vanished on the way.
    """
    outputs, gradients = case.panel("output"), case.panel("gradient")
    if not outputs.sites or not gradients.sites:
        raise NotMeasured("module:vital.ever_active")
    grads, steps = gradients.stat("abs_max"), int(SILENT_STEPS)
    zero = {
        site.name.rpartition(".")[0]
        for at, site in enumerate(gradients.sites)
        if len(site.shape) >= 2
        and (known := grads[np.isfinite(grads[:, at]), at]).size >= steps
        and known[-steps:].max() == 0
    }
    highest, lowest, counts = outputs.stat("max"), outputs.stat("min"), outputs.stat("count")
    layers = []
    for at, site in enumerate(outputs.sites):
        known = highest[np.isfinite(highest[:, at]), at]
        samples = counts[:, at].sum() / max(1, site.shape[-1] if site.shape else 1)
        silent = len(known) >= steps and known[-steps:].max() <= 0 and np.nanmin(lowest[:, at]) < -_SMALLEST
        if site.name in zero and silent:
            layers.append(_Layer(site.name, site.name, 1.0, samples, int(outputs.steps[0])))
    return layers


def _severity_of_dead(case: Case, dead: list[_Layer]) -> Severity:
    whole = any(layer.dead == 1.0 for layer in dead)
    if anomaly_severity(case) == "info":
        return "warning" if whole and not is_learning_well(case) else "info"
    return "critical" if whole else "warning"


SATURATED_SHARE = Threshold(0.5, "share of inputs beyond +-5, where a sigmoid passes less than 0.7 % of the gradient")
SATURATED_LOOKS = Threshold(5, "persistence: samples of the inputs, in different steps")
SATURATED_BORN = Threshold(0.6, "share of inputs from the start on, which training did not bring about")


@rule(
    "saturated_activation",
    needs=[signals.SATURATED, "facts.edges", "facts.order"],
    explains=["constant_output", "optimizer_step_noop", "vanishing_gradient"],
    fix="Normalise the inputs, initialise with xavier_uniform_, put a norm in front, or use ReLU or GELU.",
    refute="Look at the histogram of its inputs: if most lie within +-5, this finding is wrong.",
    since=5,
)
def saturated_activation(case: Case) -> Found | None:
    """A sigmoid or tanh is saturated: most of its inputs lie where it is flat.

    The last module does not count: a trained classifier may be certain.
    """
    tracks = case.need_vitals("module", signals.SATURATED)
    last = case.facts.order[-1:]
    flat = [track for track in tracks if track.name not in last and _is_saturated(track)]
    if not flat:
        return None
    worst = max(flat, key=lambda track: float(track.numbers()[-1]))
    sources = {after: before for before, after in case.facts.edges}
    names = (name for track in flat[:4] for name in (sources.get(track.name, ""), track.name) if name)
    return Found(
        severity=_severity_of_saturated(case, flat),
        step=int(flat[0].steps[0]),
        sites=tuple(dict.fromkeys(names)),
        evidence=(
            above("share of inputs beyond +-5", worst.numbers()[-1], SATURATED_SHARE, f"{worst.key} mean"),
            fact("layers like this", len(flat)),
        ),
        cause=f"{worst.name} is saturated: most of its inputs lie where it is flat, so almost no gradient passes.",
    )


def _is_saturated(track: Track) -> bool:
    looks = int(SATURATED_LOOKS)
    return len(track) >= looks and bool(np.min(track.numbers()[-looks:]) > SATURATED_SHARE)


def _severity_of_saturated(case: Case, flat: list[Track]) -> Severity:
    # A layer that is saturated from the start was never of use, even if the layers after it learn.
    born = any(float(track.numbers().min()) >= SATURATED_BORN for track in flat)
    return "warning" if born else anomaly_severity(case)


ACTIVATION_HIGH = Threshold(1e3, "largest magnitude of an output; normalised networks stay below 100")
ACTIVATION_GROWTH = Threshold(10.0, "largest magnitude over that of the first steps")
ACTIVATION_STEPS = Threshold(5, "persistence: first and last steps that are compared")


@rule(
    "exploding_activation",
    needs=["output"],
    explains=["saturated_activation"],
    fix="Lower the learning rate, add a norm before the layer, or add weight decay.",
    refute="Plot its abs_max over the run: if it has stopped growing, this finding is wrong.",
    since=2 * ACTIVATION_STEPS,
)
def exploding_activation(case: Case) -> Found | None:
    """The outputs of a layer are large and many times what they were at first."""
    now, then = case.panel("output"), case.first_panel("output")
    if not now.sites:
        raise NotMeasured("outputs")
    steps = int(ACTIVATION_STEPS)
    start = dict(zip(then.names, _largest(then.stat("abs_max")[:steps]), strict=True))
    recent = np.nan_to_num(now.stat("abs_max")[-steps:]).min(axis=0)
    grown = [
        at
        for at, site in enumerate(now.sites)
        if recent[at] >= ACTIVATION_HIGH and recent[at] >= ACTIVATION_GROWTH * start.get(site.name, np.inf) > 0
    ]
    if not grown:
        return None
    first = now.sites[grown[0]]
    return Found(
        severity=anomaly_severity(case),
        step=int(now.steps[-steps:][0]),
        sites=tuple(dict.fromkeys(now.sites[at].name for at in grown))[:4],
        evidence=(
            above("largest output of the last steps", recent[grown[0]], ACTIVATION_HIGH, f"{first.key} abs_max"),
            above("the same over that of the first steps", recent[grown[0]] / start[first.name], ACTIVATION_GROWTH),
        ),
        cause=f"Activations explode: the outputs of {first.name} have grown to {recent[grown[0]]:.3g}.",
    )


def _largest(values: Values) -> list[float]:
    """Return the largest value of each column; infinity where there is none to compare with."""
    known = np.where(np.isfinite(values), values, 0.0).max(axis=0)
    return [float(value) if value > 0 else float("inf") for value in known]


ATTENTION_LOW = Threshold(0.15, "entropy over the logarithm of the length: each row attends to one or two positions")
ATTENTION_FALL = Threshold(0.2, "how far that ratio has fallen since the first steps")
ATTENTION_BORN = Threshold(0.25, "the same ratio from the first steps on; fresh attention has 0.95")
ATTENTION_LOOKS = Threshold(5, "persistence: first and last samples that are compared")


@rule(
    "attention_entropy_collapse",
    needs=[signals.ATTENTION_ENTROPY],
    fix="Normalise queries and keys (qk-norm), lower the learning rate or warm it up.",
    refute="Draw its attention maps: if rows have several bright positions, this finding is wrong.",
    since=ATTENTION_LOOKS,
)
def attention_entropy_collapse(case: Case) -> Found | None:
    """Attention has collapsed to a single position.

    The mean over heads counts: a few such heads are normal.
    """
    if (taped := multiplied_scores(case)) is not None:
        return replace(taped, exact=True)
    tracks = case.need_vitals("module", signals.ATTENTION_ENTROPY)
    for track in tracks:
        values, looks = track.numbers(), int(ATTENTION_LOOKS)
        if len(values) < looks:
            continue
        now, before = float(np.median(values[-looks:])), float(np.median(values[:looks]))
        fell = before - now >= ATTENTION_FALL and now <= ATTENTION_LOW
        if fell or max(now, before) <= ATTENTION_BORN:
            return Found(
                severity=anomaly_severity(case) if fell or is_learning_well(case) else "warning",
                step=int(track.steps[values <= ATTENTION_BORN][0]),
                sites=(track.name,),
                evidence=(
                    below("entropy over its maximum, mean of heads", now, ATTENTION_BORN, f"{track.key} mean"),
                    fact("fall since the first steps", before - now),
                ),
                cause=f"The attention of {track.name} has collapsed: each row attends to one position, and its "
                "gradient vanishes.",
            )
    return None


OUTPUT_SPREAD = Threshold(1e-6, "variance across samples over that of the target, or of logits: rounding only")
OUTPUT_LOOKS = Threshold(6, "persistence: samples of the output")
OUTPUT_STEPS = Threshold(20, "steps: a fresh model may give nearly equal answers")


@rule(
    "constant_output",
    needs=[signals.SAMPLE_SPREAD, signals.TARGET_SPREAD],
    fix="Find the layer where samples become equal: dead ReLUs, weights at zero, or a mean over the batch.",
    refute="Print the outputs for two samples: if they differ by more than rounding, this finding is wrong.",
    since=OUTPUT_STEPS,
)
def constant_output(case: Case) -> Found | None:
    """The model gives the same answer to every sample."""
    if (taped := lost_in_norm(case)) is not None:
        return taped
    spread = case.need_vital(signals.LOSS, signals.SAMPLE_SPREAD)
    values = spread.numbers()
    if len(values) < OUTPUT_LOOKS or spread.steps[-1] < OUTPUT_STEPS:
        return None
    target = case.vital(signals.LOSS, signals.TARGET_SPREAD)
    wanted = float(np.median(target.numbers())) if target is not None else _scale(case)
    if wanted <= 0:
        return None
    ratio = float(values[-4:].max()) / wanted
    if not ratio <= OUTPUT_SPREAD:
        return None
    flat = values <= OUTPUT_SPREAD * wanted
    return Found(
        severity="warning" if case.final and not is_learning_well(case) else anomaly_severity(case),
        step=int(spread.steps[flat][0]),
        sites=("(model)",),
        evidence=(
            below("variance across samples over what it should be", ratio, OUTPUT_SPREAD, f"{spread.key} mean"),
            fact("samples of the output with this", int(flat.sum())),
        ),
        cause="The model's output does not depend on its input: every sample gets the same answer.",
    )


def _scale(case: Case) -> float:
    """Return the variance that logits should have at least: that of their own size, at most 1."""
    inputs = case.track(f"{signals.LOSS}:input.input")
    sizes = np.ones(1) if inputs is None else inputs.stat("rms")[-4:]
    sizes = sizes[np.isfinite(sizes)]
    size = float(np.median(sizes)) if len(sizes) else 0.0
    return min(1.0, size**2) if size > 0 else 0.0
