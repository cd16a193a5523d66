"""Cause before symptom: which findings explain which others.

A symptom that a cause explains is not listed beside it; it is folded under it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sonde.records import Finding
from sonde.store.timeline import rank_of_finding

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
    "bad_init_scale": frozenset(_BADLY_SCALED - {"target_scale", "bad_init_scale"} | {"lr_too_low"}),
    "saturated_activation": frozenset({"vanishing_gradient", "constant_output"}),
    "vanishing_gradient": frozenset({"constant_output", "lr_too_low"}),
    "dead_relu": frozenset({"constant_output", "dormant_units", "vanishing_gradient", "lr_too_low"}),
    "symmetric_init": frozenset({"constant_output", "class_imbalance_collapse"}),
    "weight_decay_too_large": frozenset({*_TOO_FAR, "class_imbalance_collapse", "lr_too_high", "lr_too_low"}),
    "dropout_too_high": frozenset({"dormant_units", "loss_oscillation"}),
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
    "sampler_draws_few": frozenset({"duplicate_data_workers", "overfitting", "same_batch_every_step"}),
    "label_out_of_range": frozenset({"not_shuffled"}),
}


# ---------------------------------------------------------------- exact relations: wiring, loss, modes, numerics
_NOT_FINITE = {"nan_in_weights", "nan_forward", "nan_in_loss", "nan_backward", "nan_in_optimizer"}
_NOT_TRAINED = {
    "class_imbalance_collapse",
    "constant_output",
    "dead_relu",
    "dormant_units",
    "label_shuffle_mismatch",
    "large_initial_loss",
    "lr_too_low",
    "vanishing_gradient",
}
_ANY_STATISTIC = _TOO_FAR | _NOT_TRAINED | _NOT_FINITE | {"bad_init_scale", "lr_too_high", "overfitting"}
EXPLAINS |= {
    "missing_zero_grad": frozenset({*_ANY_STATISTIC, "momentum_state_stale"}),
    "zero_grad_misplaced": frozenset({*_NOT_TRAINED, "graph_break_detach", "optimizer_step_noop", "unused_parameters"}),
    "params_not_in_optimizer": frozenset(_NOT_TRAINED),
    "stale_params_in_optimizer": frozenset({*_NOT_TRAINED, "params_not_in_optimizer", "step_not_called"}),
    "frozen_by_mistake": frozenset({*_NOT_TRAINED, "bad_init_scale"}),
    "graph_break_detach": frozenset(_NOT_TRAINED),
    "optimizer_step_noop": frozenset(_NOT_TRAINED),
    "step_not_called": frozenset(_NOT_TRAINED),
    "double_step": frozenset({"lr_too_high", "exploding_gradient", "loss_divergence"}),
    "identical_layer_init": frozenset({"symmetric_init"}),
    "double_softmax": frozenset({*_NOT_TRAINED, "saturated_activation"}),
    "double_sigmoid": frozenset({*_NOT_TRAINED, "saturated_activation", "output_range_mismatch"}),
    "logits_into_prob_loss": frozenset({*_ANY_STATISTIC, "loss_sign_flipped"}),
    "relu_before_logits": frozenset(_NOT_TRAINED),
    "wrong_loss_reduction": frozenset(_ANY_STATISTIC),
    "accumulation_not_scaled": frozenset(_ANY_STATISTIC),
    "broadcast_loss": frozenset(_NOT_TRAINED),
    "wrong_dim_softmax": frozenset(_NOT_TRAINED),
    "constant_target": frozenset({*_NOT_TRAINED, "output_range_mismatch", "saturated_activation", "target_scale"}),
    "future_leak": frozenset({"overfitting", "attention_entropy_collapse"}),
    "target_not_detached": frozenset({*_NOT_TRAINED, "target_scale"}),
    "batch_axis_mixed": frozenset({*_NOT_TRAINED, "overfitting"}),
    "duplicate_param_in_groups": frozenset({"lr_too_high", "exploding_gradient", "loss_divergence"}),
    "loss_sign_flipped": frozenset(_ANY_STATISTIC),
    "output_range_mismatch": frozenset({*_NOT_TRAINED, "saturated_activation"}),
    "empty_target": frozenset({*_NOT_FINITE, "dead_relu", "lr_too_high"}),
    "train_mode_in_eval": frozenset({"overfitting", "train_val_preproc_mismatch"}),
    "eval_mode_in_training": frozenset({"overfitting"}),
    "batchnorm_small_batch": frozenset({"overfitting"}),
    "batchnorm_stats_stale": frozenset({"overfitting"}),
    "resume_incomplete": frozenset({"momentum_state_stale"}),
    "fp16_overflow": frozenset({*_NOT_FINITE, "loss_scale_collapse"}),
    "momentum_never_filled": frozenset({*_TOO_FAR, *_NOT_FINITE, "lr_too_high"}),
    "fully_masked_attention": frozenset({*_NOT_FINITE, "dead_relu", "loss_scale_collapse", "lr_too_high"}),
    "grad_underflow": frozenset(_NOT_TRAINED),
    "low_precision_stall": frozenset({*_NOT_TRAINED, "optimizer_step_noop"}),
    "nan_in_data": frozenset(
        {
            *_NOT_FINITE,
            "dead_relu",
            "exploding_activation",
            "exploding_gradient",
            "lr_too_high",
            "constant_output",
            "loss_scale_collapse",
        }
    ),
}
# What is not finite goes on through the rest of the step and into the next; whoever brings it about at one place may do
# so at another.
_STAGES = ("nan_in_weights", "nan_forward", "nan_in_loss", "nan_backward", "nan_in_optimizer")
EXPLAINS |= {
    kind: frozenset({*_STAGES[at + 1 :], "dead_relu", "constant_output", "loss_scale_collapse"})
    for at, kind in enumerate(_STAGES)
}
EXPLAINS |= {
    cause: symptoms | _NOT_FINITE
    for cause, symptoms in EXPLAINS.items()
    if "nan_forward" in symptoms and cause not in _STAGES
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
    ordered = sorted(findings, key=rank_of_finding)
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
        kept.append(_with(finding, under, ordered) if under else finding)
    return kept


def _with(cause: Finding, under: set[str], findings: list[Finding]) -> Finding:
    """Return a cause with what is folded under it. Where a bad number began is still worth knowing."""
    begun = next((each.data for each in findings if each.kind in under and "origin" in each.data), {})
    data = {name: begun[name] for name in ("origin", "reason") if name in begun} | cause.data
    return replace(cause, explains=tuple(sorted(under)), data=data)


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
    return explains(symptom, cause) and rank_of_finding(symptom) < rank_of_finding(cause)
