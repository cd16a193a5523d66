"""Layers whose rectifiers never fire."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import gravity
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding, Severity


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    source: str
    dead: float
    samples: float
    step: int


_SMALLEST = float(np.finfo(np.float32).tiny)


def check(case: Case) -> Finding | None:
    """Find layers nine tenths of whose units were never positive for any sample."""
    dead = [layer for layer in _layers(case) if layer.dead >= thresholds.DEAD_SHARE.value]
    if not dead:
        return None
    order = {name: at for at, name in enumerate(case.facts.order)}
    dead.sort(key=lambda layer: order.get(layer.name, len(order)))
    first = dead[0]
    return RULE.finding(
        case,
        _severity(case, dead),
        0.85,
        sites=tuple(dict.fromkeys(name for layer in dead[:4] for name in (layer.source, layer.name) if name)),
        step=first.step,
        evidence=(
            above("share of units that were never positive", first.dead, thresholds.DEAD_SHARE),
            above("values looked at per unit", first.samples, thresholds.DEAD_SAMPLES),
            fact("layers like this", len(dead)),
        ),
        cause=f"The rectifiers after {first.source or first.name} are dead: {first.dead:.0%} of their units are never "
        "positive, so no gradient passes.",
        fix="Lower the learning rate, initialise with kaiming_normal_ and zero bias, or use LeakyReLU or GELU.",
        refute="Feed the whole training set: a unit that is positive for any sample is alive.",
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
        if len(track) >= thresholds.DEAD_LOOKS.value and samples >= thresholds.DEAD_SAMPLES.value:
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


def _severity(case: Case, dead: list[_Layer]) -> Severity:
    if gravity(case) == "info":
        return "info"
    return "critical" if any(layer.dead == 1.0 for layer in dead) else "warning"


RULE = Rule(kind="dead_relu", check=check, since=10)
