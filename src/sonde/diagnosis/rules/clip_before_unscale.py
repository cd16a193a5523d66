"""Gradients that are clipped while they are still multiplied by the loss scale."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find clipping of scaled gradients, three times in a row."""
    tracks = case.vitals(vitals.SCALED_CLIP)
    if not tracks:
        raise NotMeasured("optimizer:vital.scaled_clip")
    for track in tracks:
        scaled = track.numbers() == 1
        if run_length(scaled) >= 3:
            norms = case.vital(track.name, vitals.CLIP_NORM)
            return RULE.finding(
                case,
                "warning",
                0.98,
                sites=(track.name,),
                step=int(track.steps[scaled][0]),
                evidence=(
                    above(
                        "times in a row that scaled gradients were clipped", run_length(scaled), 3, f"{track.key} mean"
                    ),
                    fact("norm that was clipped", float("nan") if norms is None else norms.numbers()[-1]),
                ),
                cause="Gradients are clipped before they are unscaled: the limit is compared with a norm that is "
                "thousands of times too large, so that the step that is left is thousands of times too short.",
                fix="Call scaler.unscale_(optimizer) before clip_grad_norm_.",
                refute="Print what clip_grad_norm_ returns: if it does not grow with scaler.get_scale(), it is fine.",
            )
    return None


RULE = Rule(kind="clip_before_unscale", check=check, since=3)
