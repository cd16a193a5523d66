"""Cause before symptom: which findings explain which others.

A symptom that a cause explains is not listed beside it; it is folded under it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sonde.records import Finding
from sonde.store.findings import rank

OUTCOMES: Final = frozenset(
    {
        "loss_plateau",
        "loss_oscillation",
        "loss_spike",
        "loss_divergence",
        "not_learning",
        "underfitting",
    }
)
"""What any disease can lead to: reported on its own only if nothing else was found."""

EXPLAINS: dict[str, frozenset[str]] = {}
"""By cause: the kinds that follow from it, besides the outcomes, which follow from every warning."""

# ---------------------------------------------------------------- learning rate, activations, data
_TOO_FAR = {
    "adam_eps_too_large",
    "attention_entropy_collapse",
    "clip_always_active",
    "constant_output",
    "dead_relu",
    "dormant_units",
    "exploding_activation",
    "exploding_gradient",
    "fp16_overflow",
    "logit_drift",
    "loss_scale_collapse",
    "missing_warmup",
    "nan_backward",
    "nan_forward",
    "saturated_activation",
    "vanishing_gradient",
}
_BADLY_SCALED = {
    "bad_init_scale",
    "clip_always_active",
    "constant_output",
    "dead_relu",
    "exploding_activation",
    "exploding_gradient",
    "large_initial_loss",
    "lr_too_high",
    "missing_warmup",
    "nan_backward",
    "nan_forward",
    "saturated_activation",
    "target_scale",
    "vanishing_gradient",
}
EXPLAINS |= {
    "lr_too_high": frozenset(_TOO_FAR),
    "lr_schedule_collapse": frozenset({"lr_too_low"}),
    "scheduler_never_called": frozenset({"lr_too_low", "lr_too_high"}),
    "clip_before_unscale": frozenset({"clip_always_active", "lr_too_low"}),
    "clip_always_active": frozenset({"lr_too_low"}),
    "clip_after_step": frozenset({"exploding_gradient", "lr_too_high", "nan_forward", "nan_backward"}),
    "adam_eps_too_small": frozenset({"nan_forward", "nan_backward", "lr_too_high", "exploding_activation"}),
    "adam_eps_too_large": frozenset({"lr_too_low"}),
    "unnormalised_inputs": frozenset(_BADLY_SCALED),
    "target_scale": frozenset(_BADLY_SCALED - {"target_scale", "bad_init_scale"}),
    "bad_init_scale": frozenset(_BADLY_SCALED - {"target_scale", "bad_init_scale"}),
    "saturated_activation": frozenset({"vanishing_gradient", "constant_output"}),
    "dead_relu": frozenset({"constant_output", "dormant_units", "vanishing_gradient", "lr_too_low"}),
    "symmetric_init": frozenset({"constant_output", "class_imbalance_collapse"}),
    "zero_init_blocked": frozenset(
        {"constant_output", "dead_relu", "dormant_units", "symmetric_init", "vanishing_gradient"}
    ),
    "exploding_activation": frozenset({"logit_drift", "saturated_activation"}),
    "exploding_gradient": frozenset({"clip_always_active", "exploding_activation"}),
    "not_shuffled": frozenset(
        {"class_imbalance_collapse", "constant_output", "exploding_gradient", "lr_too_high", "overfitting"}
    ),
    "class_imbalance_collapse": frozenset({"constant_output", "dormant_units"}),
    "label_shuffle_mismatch": frozenset({"constant_output", "lr_too_high", "overfitting"}),
    "train_val_preproc_mismatch": frozenset({"overfitting"}),
    "bad_batch_spike": frozenset({"exploding_gradient"}),
    "double_normalised": frozenset({"bad_init_scale", "constant_output", "lr_too_low", "vanishing_gradient"}),
    "same_batch_every_step": frozenset({"duplicate_data_workers", "overfitting"}),
    "label_out_of_range": frozenset({"not_shuffled"}),
}


def explains(cause: Finding, symptom: Finding) -> bool:
    """Say whether one finding accounts for another."""
    if cause.kind == symptom.kind or (cause.severity == "info" and symptom.severity != "info"):
        return False
    if symptom.kind in EXPLAINS.get(cause.kind, ()):
        return True
    return symptom.kind in OUTCOMES and cause.kind not in OUTCOMES and cause.severity != "info"


def fold(findings: list[Finding]) -> list[Finding]:
    """Fold symptoms under their causes and return what is left, best first."""
    ordered = sorted(findings, key=rank)
    folded = {
        symptom.kind
        for symptom in ordered
        if any(explains(cause, symptom) and not _is_circular(cause, symptom) for cause in ordered)
    }
    kept = []
    for finding in ordered:
        if finding.kind in folded:
            continue
        under = _under(finding, ordered, folded)
        kept.append(replace(finding, explains=tuple(sorted(under))) if under else finding)
    return kept


def _under(cause: Finding, findings: list[Finding], folded: set[str]) -> set[str]:
    """Return the folded kinds that a cause explains, also through one another."""
    under: set[str] = set()
    open_causes = [cause]
    while open_causes:
        current = open_causes.pop()
        for symptom in findings:
            if symptom.kind in folded and symptom.kind not in under and explains(current, symptom):
                under.add(symptom.kind)
                open_causes.append(symptom)
    return under


def _is_circular(cause: Finding, symptom: Finding) -> bool:
    """Two that explain each other: the better of them stays."""
    return explains(symptom, cause) and rank(symptom) < rank(cause)
