"""Gradients that are cleared between the backward pass and the step, or between passes that are to be gathered."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured, run_length
from sonde.diagnosis.ownership import held, need_optimizers
from sonde.diagnosis.rule import Rule, above, fact
from sonde.facts import OptimizerFacts
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find an optimizer that has no gradient at all when it steps, though a backward pass reached its parameters.

    Or one that has the gradient of the last of several passes only, time and again.
    """
    found = (_look_at(case, optimizer) for optimizer in need_optimizers(case))
    return next((finding for finding in found if finding is not None), None) or _thrown_away(case)


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


def _thrown_away(case: Case) -> Finding | None:
    optimizers = need_optimizers(case)
    if len(optimizers) != 1 or case.facts.input_gradient:
        return None  # another one's passes may reach it; or a gradient of the input is what the first pass is for
    name = optimizers[0].name
    thrown, passes = case.vital(name, vitals.THROWN_AWAY), case.vital(name, vitals.BACKWARDS_SEEN)
    if thrown is None or passes is None:
        return None
    lost = thrown.numbers() == 1
    if run_length(lost) < thresholds.THROWN_STEPS.value or len(thrown) < 0.8 * len(passes):
        return None
    return RULE.finding(
        case,
        "warning",
        0.9,
        sites=(name,),
        step=int(thrown.steps[len(lost) - run_length(lost)]),
        evidence=(
            above("steps in a row that had the last backward pass only", run_length(lost), thresholds.THROWN_STEPS),
            fact("backward passes before a step", float(passes.numbers()[-1]), f"{passes.key} mean"),
        ),
        cause=f"Gradients are cleared between the {passes.numbers()[-1]:.0f} backward passes of a step: {name} applies "
        "that of the last one, and the others are computed for nothing.",
        fix="To gather gradients, call optimizer.zero_grad() once after optimizer.step(), not before each backward().",
        refute="Print p.grad before each loss.backward(): if only the first is None or zero, it is wrong.",
    )


RULE = Rule(kind="zero_grad_misplaced", check=check, since=2)
