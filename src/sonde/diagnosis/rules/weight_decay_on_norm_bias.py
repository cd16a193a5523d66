"""Weight decay on the scales of norms."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find scales of norms that are pulled to zero by a decay that somebody chose."""
    case.need_facts()
    for optimizer in case.facts.optimizers:
        for group in optimizer.groups:
            decay = group.settings.get("weight_decay")
            if not isinstance(decay, int | float) or decay < thresholds.DECAY_ON_NORMS.value:
                continue
            norms = [name for name in group.parameters if _is_norm(case, name)]
            if norms:
                return RULE.finding(
                    case,
                    "info",
                    0.8,
                    sites=tuple(norms[:8]),
                    step=0,
                    evidence=(
                        above("weight decay", decay, thresholds.DECAY_ON_NORMS),
                        fact("parameters of norms under it", len(norms)),
                    ),
                    cause="Weight decay also pulls the scales of norms towards 0, where they should be near 1.",
                    fix="Give the optimizer two groups: matrices with weight decay, biases and norms with 0.",
                    refute="Train with two groups: if the result is the same, it does not matter for this model.",
                )
    return None


def _is_norm(case: Case, name: str) -> bool:
    parameter = case.parameters.get(name)
    return parameter is not None and "Norm" in parameter.kind and len(parameter.shape) == 1


RULE = Rule(kind="weight_decay_on_norm_bias", check=check, since=0)
