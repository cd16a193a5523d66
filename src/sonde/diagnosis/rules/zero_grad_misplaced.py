"""Gradients that are cleared between the backward pass and the step."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.ownership import held, need_optimizers
from sonde.diagnosis.rule import Rule, above, fact
from sonde.facts import OptimizerFacts
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find an optimizer that has no gradient at all when it steps, though a backward pass reached its parameters."""
    found = (_look_at(case, optimizer) for optimizer in need_optimizers(case))
    return next((finding for finding in found if finding is not None), None)


def _look_at(case: Case, optimizer: OptimizerFacts) -> Finding | None:
    missing = case.need_vital(optimizer.name, vitals.NO_GRADIENT)
    backwards = case.vital(optimizer.name, vitals.BACKWARDS_SEEN)
    if backwards is None:
        raise NotMeasured(f"{optimizer.name}:vital.backwards_seen")
    # Where two optimizers hold the same parameters, one clears what the other's backward pass has left.
    if any(len(case.parameters[name].owners) > 1 for name in held(optimizer) if name in case.parameters):
        return None
    trainable = sum(case.parameters[name].trainable for name in set(held(optimizer)) if name in case.parameters)
    reached = dict(zip(backwards.steps.tolist(), (backwards.numbers() > 0).tolist(), strict=True))
    bare = [
        bool(count >= trainable > 0 and reached.get(step, False))
        for step, count in zip(missing.steps.tolist(), missing.numbers().tolist(), strict=True)
    ]
    if run_length(bare) < thresholds.CLEARED_STEPS.value:
        return None
    first = int(missing.steps[len(bare) - run_length(bare)])
    return RULE.finding(
        case,
        "critical",
        0.99,
        sites=(optimizer.name,),
        step=first,
        evidence=(
            above("parameters without a gradient at the step", missing.numbers()[-1], trainable, f"{missing.key} mean"),
            above("backward passes that reached them before", backwards.numbers()[-1], 1, f"{backwards.key} mean"),
            fact("steps in a row", run_length(bare)),
        ),
        cause=f"Gradients are cleared after the backward pass: {optimizer.name} steps without any gradient.",
        fix="Move optimizer.zero_grad() in front of loss.backward(), or behind optimizer.step().",
        refute="Print p.grad of any parameter on the line before optimizer.step(): a gradient there refutes it.",
    )


RULE = Rule(kind="zero_grad_misplaced", check=check, since=2)
