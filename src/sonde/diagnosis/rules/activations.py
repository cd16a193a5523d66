"""Rules about the outputs of layers: dead, saturated, exploding or constant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde import vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity, is_learning_well
from sonde.diagnosis.rule import Found, Threshold, above, below, fact, rule
from sonde.diagnosis.track import Track
from sonde.records import Severity

DEAD_SHARE = Threshold(0.9, "of a layer's units never positive: what is left cannot carry what the layer should")
DEAD_SAMPLES = Threshold(300, "values per unit: a unit that fires for one sample in a hundred is missed by 5 %")
DEAD_LOOKS = Threshold(5, "looks in different steps")


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    source: str
    dead: float
    samples: float
    step: int


_SMALLEST = float(np.finfo(np.float32).tiny)


@rule(
    "dead_relu",
    needs=[vitals.EVER_ACTIVE, vitals.UNIT_SAMPLES, "gradient", "output", "facts.edges"],
    explains=["constant_output", "dormant_units", "lr_too_low", "vanishing_gradient"],
    fix="Lower the learning rate, initialise with kaiming_normal_ and zero bias, or use LeakyReLU or GELU.",
    refute="Feed the whole training set: a unit that is positive for any sample is alive.",
    since=10,
)
def dead_relu(case: Case) -> Found | None:
    """A layer's rectifiers never fire.

    Find layers nine tenths of whose units were never positive for any sample.
    """
    dead = [layer for layer in _layers(case) if layer.dead >= DEAD_SHARE]
    if not dead:
        return None
    order = {name: at for at, name in enumerate(case.facts.order)}
    dead.sort(key=lambda layer: order.get(layer.name, len(order)))
    first = dead[0]
    return Found(
        severity=_severity_of_dead_relu(case, dead),
        step=first.step,
        sites=tuple(dict.fromkeys(name for layer in dead[:4] for name in (layer.source, layer.name) if name)),
        evidence=(
            above("share of units that were never positive", first.dead, DEAD_SHARE),
            above("values looked at per unit", first.samples, DEAD_SAMPLES),
            fact("layers like this", len(dead)),
        ),
        cause=f"The rectifiers after {first.source or first.name} are dead: {first.dead:.0%} of their units are never "
        "positive, so no gradient passes.",
    )


def _layers(case: Case) -> list[_Layer]:
    active = case.vitals(vitals.EVER_ACTIVE)
    if not active:
        return _silent_layers(case)
    sources = {after: before for before, after in case.facts.edges}
    layers = []
    for track in active:
        seen = case.vital(track.name, vitals.UNIT_SAMPLES)
        samples = float(seen.numbers()[-1]) if seen is not None else float("nan")
        if len(track) >= DEAD_LOOKS and samples >= DEAD_SAMPLES:
            share = 1 - float(track.numbers()[-1])
            layers.append(_Layer(track.name, sources.get(track.name, ""), share, samples, int(track.steps[0])))
    return layers


def _silent_layers(case: Case) -> list[_Layer]:
    """Find layers that are followed by a rectifier that is no module: never positive, and without any gradient.

    Zeros, and what is about to become one, are no sign of it: so much has vanished on the way that nothing is left.
    """
    outputs, gradients = case.panel("output"), case.panel("gradient")
    if not outputs.sites or not gradients.sites:
        raise NotMeasured("module:vital.ever_active")
    grads = gradients.stat("abs_max")
    zero = {
        site.name.rpartition(".")[0]
        for at, site in enumerate(gradients.sites)
        if len(site.shape) >= 2
        and (known := grads[np.isfinite(grads[:, at]), at]).size >= 10
        and known[-10:].max() == 0
    }
    highest, lowest, counts = outputs.stat("max"), outputs.stat("min"), outputs.stat("count")
    layers = []
    for at, site in enumerate(outputs.sites):
        known = highest[np.isfinite(highest[:, at]), at]
        samples = counts[:, at].sum() / max(1, site.shape[-1] if site.shape else 1)
        if site.name in zero and len(known) >= 10 and known[-10:].max() <= 0 and np.nanmin(lowest[:, at]) < -_SMALLEST:
            layers.append(_Layer(site.name, site.name, 1.0, samples, int(outputs.steps[0])))
    return layers


def _severity_of_dead_relu(case: Case, dead: list[_Layer]) -> Severity:
    if gravity(case) == "info":
        return "info"
    return "critical" if any(layer.dead == 1.0 for layer in dead) else "warning"


DORMANT_SHARE = Threshold(0.3, "of the units: a third of the layer is paid for and not used")
DORMANT_SAMPLES = Threshold(2000, "values per unit, so that rare features have had their turn")


@rule(
    "dormant_units",
    needs=[vitals.EVER_ACTIVE, vitals.UNIT_SAMPLES],
    severity="info",
    fix="Make the layer narrower, lower the learning rate, or use LeakyReLU or GELU.",
    refute="Feed the whole training set: units that fire for any sample are in use.",
    since=100,
)
def dormant_units(case: Case) -> Found | None:
    """Many units of a layer are never used.

    Find layers a third of whose rectifiers never fired, though enough work.
    """
    tracks = case.vitals(vitals.EVER_ACTIVE)
    if not tracks:
        raise NotMeasured("module:vital.ever_active")
    idle: list[tuple[float, float, str]] = []
    for track in tracks:
        seen = case.vital(track.name, vitals.UNIT_SAMPLES)
        samples = float(seen.numbers()[-1]) if seen is not None else 0.0
        share = 1 - float(track.numbers()[-1])
        dormant = DORMANT_SHARE <= share < DEAD_SHARE
        if dormant and samples >= DORMANT_SAMPLES:
            idle.append((share, samples, track.name))
    if not idle:
        return None
    share, samples, name = max(idle)
    return Found(
        sites=tuple(name for _, _, name in sorted(idle, reverse=True)[:4]),
        evidence=(
            above(
                "share of units that were never positive",
                share,
                DORMANT_SHARE,
                f"{name}:vital.ever_active mean",
            ),
            above("values looked at per unit", samples, DORMANT_SAMPLES),
        ),
        cause=f"{share:.0%} of the units of {name} have never been active: the layer is wider than what it uses.",
    )


SATURATED_SHARE = Threshold(0.5, "of the inputs beyond +-5, where a sigmoid passes on less than 0.7 % of the gradient")
SATURATED_LOOKS = Threshold(5, "looks in different steps")
SATURATED_BORN = Threshold(0.6, "of the inputs from the first look on: not a trained layer that has become sure")


@rule(
    "saturated_activation",
    needs=[vitals.SATURATED, "facts.edges"],
    explains=["constant_output", "vanishing_gradient"],
    fix="Normalise the inputs, initialise with xavier_uniform_, put a norm in front, or use ReLU or GELU.",
    refute="Look at the histogram of its inputs: if most lie within +-5, it is not saturated.",
    since=5,
)
def saturated_activation(case: Case) -> Found | None:
    """Sigmoids or tanhs are driven into their flat ends.

    Find layers most of whose inputs stay beyond +-5; the last module may be sure of itself.
    """
    tracks = case.vitals(vitals.SATURATED)
    if not tracks:
        raise NotMeasured("module:vital.saturated")
    last = case.facts.order[-1:]
    flat = [track for track in tracks if track.name not in last and _is_saturated(track)]
    if not flat:
        return None
    worst = max(flat, key=lambda track: float(track.numbers()[-1]))
    sources = {after: before for before, after in case.facts.edges}
    names = (name for track in flat[:4] for name in (sources.get(track.name, ""), track.name) if name)
    return Found(
        severity=_severity_of_saturated_activation(case, flat),
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


def _severity_of_saturated_activation(case: Case, flat: list[Track]) -> Severity:
    # A layer that was born flat has never been of use, however well the layers after it make do.
    born = any(float(track.numbers().min()) >= SATURATED_BORN for track in flat)
    return "warning" if born else gravity(case)


ACTIVATION_HIGH = Threshold(1e3, "largest magnitude of an output; normalised networks stay below 100")
ACTIVATION_GROWTH = Threshold(10.0, "times the largest of the first steps")


@rule(
    "exploding_activation",
    needs=["output"],
    explains=["logit_drift", "saturated_activation"],
    fix="Lower the learning rate, add a norm before the layer, or add weight decay.",
    refute="Plot its abs_max over the run: if it has stopped growing, it is only large.",
    since=10,
)
def exploding_activation(case: Case) -> Found | None:
    """Outputs of layers grow and grow.

    Find outputs that are large, many times what they were at first, and larger than before at the last looks.
    """
    now, then = case.panel("output"), case.first_panel("output")
    if not now.sites:
        raise NotMeasured("outputs")
    largest = now.stat("abs_max")
    start = dict(zip(then.names, _typical(then.stat("abs_max")[:5]), strict=True))
    recent = np.nan_to_num(largest[-5:]).min(axis=0)
    grown = [
        at
        for at, site in enumerate(now.sites)
        if recent[at] >= ACTIVATION_HIGH and recent[at] >= ACTIVATION_GROWTH * start.get(site.name, np.inf) > 0
    ]
    if not grown or case.num_steps < 10:
        return None
    first = now.sites[grown[0]]
    return Found(
        severity=gravity(case),
        step=int(now.steps[-5]) if len(now) >= 5 else case.step,
        sites=tuple(dict.fromkeys(now.sites[at].name for at in grown))[:4],
        evidence=(
            above("largest output of the last steps", recent[grown[0]], ACTIVATION_HIGH, f"{first.key} abs_max"),
            above(
                "the same over that of the first steps",
                recent[grown[0]] / start[first.name],
                ACTIVATION_GROWTH,
            ),
        ),
        cause=f"Activations explode: the outputs of {first.name} have grown to {recent[grown[0]]:.3g}.",
    )


def _typical(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[float]:
    known = np.where(np.isfinite(values), values, 0.0).max(axis=0)
    return [float(value) if value > 0 else float("inf") for value in known]


ATTENTION_FALL = Threshold(0.2, "how far it has fallen since the first steps, in the same unit")
ATTENTION_LOW = Threshold(0.15, "of the logarithm of the length: each row looks at one or two places")
ATTENTION_BORN = Threshold(0.25, "of the logarithm of the length, from the first look on; fresh attention has 0.95")


@rule(
    "attention_entropy_collapse",
    needs=[vitals.ATTENTION_ENTROPY],
    fix="Normalise queries and keys (qk-norm), lower the learning rate or warm it up.",
    refute="Draw its attention maps: rows with several bright places refute it.",
    since=5,
)
def attention_entropy_collapse(case: Case) -> Found | None:
    """Attention looks at one place only.

    Find attention whose heads, on average, have become certain since the start; a few such heads are normal.
    """
    tracks = case.vitals(vitals.ATTENTION_ENTROPY)
    if not tracks:
        raise NotMeasured("module:vital.attention_entropy")
    for track in tracks:
        values = track.numbers()
        if len(values) < 5:
            continue
        now, before = float(np.median(values[-5:])), float(np.median(values[:5]))
        fell = before - now >= ATTENTION_FALL and now <= ATTENTION_LOW
        if fell or max(now, before) <= ATTENTION_BORN:
            return Found(
                severity=gravity(case) if fell or is_learning_well(case) else "warning",
                step=int(track.steps[values <= ATTENTION_BORN][0]),
                sites=(track.name,),
                evidence=(
                    below(
                        "entropy of attention over its highest, mean of heads",
                        now,
                        ATTENTION_BORN,
                        f"{track.key} mean",
                    ),
                    fact("fall since the first steps", before - now),
                ),
                cause=f"The attention of {track.name} has collapsed: every row looks at one place, and its gradient "
                "vanishes.",
            )
    return None


OUTPUT_SPREAD = Threshold(1e-6, "variance of the output across samples over what it should be")


@rule(
    "constant_output",
    needs=[vitals.SAMPLE_SPREAD, vitals.TARGET_SPREAD],
    fix="Look for the layer where samples become equal: dead rectifiers, weights at zero, a mean over the batch.",
    refute="Print the outputs for two different samples: a difference beyond rounding refutes it.",
    since=20,
)
def constant_output(case: Case) -> Found | None:
    """The model gives the same answer to every sample.

    Find outputs that do not differ between samples, at each look beyond the first steps.
    """
    spread = case.need_vital(vitals.LOSS, vitals.SAMPLE_SPREAD)
    values = spread.numbers()
    if len(values) < 6 or spread.steps[-1] < 20:
        return None
    target = case.vital(vitals.LOSS, vitals.TARGET_SPREAD)
    wanted = float(np.median(target.numbers())) if target is not None else _scale(case)
    if wanted <= 0:
        return None
    ratio = float(values[-4:].max()) / wanted
    if not ratio <= OUTPUT_SPREAD:
        return None
    flat = values <= OUTPUT_SPREAD * wanted
    return Found(
        severity=gravity(case),
        step=int(spread.steps[flat][0]),
        sites=("(model)",),
        evidence=(
            below(
                "variance of the output across samples over what it should be",
                ratio,
                OUTPUT_SPREAD,
                f"{spread.key} mean",
            ),
            fact("looks at which it was so", int(flat.sum())),
        ),
        cause="The model's output does not depend on its input: every sample gets the same answer.",
    )


def _scale(case: Case) -> float:
    """Return how far logits should differ at least: as much as their own size, or one."""
    inputs = case.track(f"{vitals.LOSS}:input.input")
    sizes = np.ones(1) if inputs is None else inputs.stat("rms")[-4:]
    sizes = sizes[np.isfinite(sizes)]
    size = float(np.median(sizes)) if len(sizes) else 0.0
    return min(1.0, size**2) if size > 0 else 0.0


LOG_Z_GROWTH = Threshold(2.0, "times that of the first steps")
LOG_Z_HIGH = Threshold(50.0, "log of the sum of exponentials: float16 overflows beyond 11, bfloat16 loses all digits")


@rule(
    "logit_drift",
    needs=[vitals.LOG_Z],
    fix="Add a small penalty on log Z (1e-4 * log_z ** 2), lower the learning rate, or decay the head's weight.",
    refute="Plot log Z over the run: if it has levelled off, it does no harm.",
    since=6,
)
def logit_drift(case: Case) -> Found | None:
    """All logits grow together.

    Find a log of the sum of exponentials that is large and has grown since the start.
    """
    track = case.need_vital(vitals.LOSS, vitals.LOG_Z)
    values = np.abs(track.numbers())
    if len(values) < 6 or not np.isfinite(values).all():
        return None
    now, before = float(np.min(values[-3:])), float(np.median(values[:3]))
    if now < LOG_Z_HIGH or now < LOG_Z_GROWTH * before:
        return None
    return Found(
        severity=gravity(case),
        step=int(track.steps[values >= LOG_Z_HIGH][0]),
        sites=("(model)",),
        evidence=(
            above("log of the sum of exponentials of the logits", now, LOG_Z_HIGH, f"{track.key} mean"),
            above("the same over that of the first steps", now / max(before, 1e-9), LOG_Z_GROWTH),
        ),
        cause="The logits drift: all of them grow, which the loss does not see but low precision does.",
    )
