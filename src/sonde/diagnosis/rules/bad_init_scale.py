"""Weights that begin far too large or far too small."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import began_badly, gravity
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.diagnosis.weights import first_weights
from sonde.records import Evidence, Finding

MIN_DEPTH: Final = 4
MIN_CALLS: Final = 8


def check(case: Case) -> Finding | None:
    """Find weights whose initial size, for their number of inputs, blows the signal up or lets it fade."""
    if (grown := _through_time(case)) is not None:
        return grown
    gains = _gains(case)
    if len(gains) < 2:
        return None
    outputs = _output_spread(case)
    high = [name for name, gain in gains.items() if gain >= thresholds.GAIN_HIGH.value]
    low = [name for name, gain in gains.items() if 0 < gain <= thresholds.GAIN_LOW.value]
    loud = max(outputs.values(), default=0.0)
    quiet = min(outputs.values(), default=1.0)
    if high and loud >= thresholds.OUTPUT_STD_HIGH.value:
        evidence = (
            above(f"gain of {high[0]}, its size times the root of its inputs", gains[high[0]], thresholds.GAIN_HIGH),
            above("largest standard deviation of an output at the first step", loud, thresholds.OUTPUT_STD_HIGH),
        )
        return _finding(case, high, "large", evidence)
    normalised = any("Norm" in module.kind for module in case.facts.modules)
    if len(low) >= 2 and 2 * len(low) >= len(gains) and quiet <= thresholds.OUTPUT_STD_LOW.value and not normalised:
        evidence = (
            below(f"gain of {low[0]}, its size times the root of its inputs", gains[low[0]], thresholds.GAIN_LOW),
            below("smallest standard deviation of an output at the first step", quiet, thresholds.OUTPUT_STD_LOW),
        )
        return _finding(case, low, "small", evidence)
    return None if normalised else _through_depth(case, gains, outputs)


def _through_depth(case: Case, gains: dict[str, float], outputs: dict[str, float]) -> Finding | None:
    """Find layers none of which is far off, but whose gains multiply to nothing, or to far too much."""
    # The last layer may begin at zero on purpose.
    hidden = list(outputs.values())[:-1]
    if len(hidden) < MIN_DEPTH or not min(hidden) > 0:
        return None
    ratio = hidden[-1] / hidden[0]
    steps = np.array(hidden[1:]) / np.array(hidden[:-1])
    usual = sorted(gains.values())
    if ratio <= thresholds.FADE.value and (steps < 1).mean() >= thresholds.FADE_LAYERS.value:
        evidence = below("spread of the last hidden output over that of the first", ratio, thresholds.FADE)
        names = [name for name, gain in gains.items() if gain <= usual[len(usual) // 2]]
        return _finding(case, names, "small", (evidence, fact("hidden layers", len(hidden))))
    if ratio >= 1 / thresholds.FADE.value and (steps > 1).mean() >= thresholds.FADE_LAYERS.value:
        evidence = above("spread of the last hidden output over that of the first", ratio, 1 / thresholds.FADE.value)
        names = [name for name, gain in gains.items() if gain >= usual[len(usual) // 2]]
        return _finding(case, names, "large", (evidence, fact("hidden layers", len(hidden))))
    return None


def _through_time(case: Case) -> Finding | None:
    """Find a module that is called again and again in a pass, and whose output grows from call to call at the start."""
    calls: dict[str, dict[int, float]] = {}
    panel = case.first_panel("output")
    sizes = panel.stat("rms") if panel.sites else np.zeros((0, 0))
    passed = np.flatnonzero(np.isfinite(sizes).any(axis=1))
    for site, size in zip(panel.sites, sizes[passed[0]] if len(passed) else (), strict=False):
        if np.isfinite(size):
            calls.setdefault(site.name, {})[site.call] = float(size)
    for name, by_call in calls.items():
        if len(by_call) < MIN_CALLS:
            continue
        # The first call may be given a state of zeros; the last stands for all that come after it.
        outputs = np.array([by_call[call] for call in sorted(by_call)[1:-1]])
        growth = float(outputs[-1] / outputs[0]) if outputs[0] > 0 else 0.0
        grows = float((outputs[1:] > outputs[:-1]).mean())
        if growth >= thresholds.CALL_GROWTH.value and grows >= thresholds.FADE_LAYERS.value:
            evidence = above(f"output of {name}, last call of a pass over first", growth, thresholds.CALL_GROWTH)
            found = _finding(case, [name], "large", (evidence, fact("calls compared", len(outputs))))
            return replace(found, severity="warning") if began_badly(case) else found
    return None


def _gains(case: Case) -> dict[str, float]:
    """Return the factor by which each weight multiplies the spread of its inputs, as it was at the start."""
    weights = first_weights(case)
    shapes = {site.name: site.shape for site in case.sites("parameter")}
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


def _finding(case: Case, names: list[str], how: str, evidence: tuple[Evidence, ...]) -> Finding:
    return RULE.finding(
        case,
        gravity(case),
        0.8,
        sites=tuple(names[:6]),
        step=1,
        evidence=(*evidence, fact("weights like this", len(names))),
        cause=f"Weights begin far too {how} for their number of inputs, first of all {names[0]}.",
        fix="Leave torch's default, or use kaiming_normal_ (ReLU) or xavier_uniform_ (tanh, sigmoid).",
        refute="Re-initialise with kaiming_normal_ and train 50 steps: if the loss behaves the same, it is not this.",
    )


RULE = Rule(kind="bad_init_scale", check=check, since=2)
