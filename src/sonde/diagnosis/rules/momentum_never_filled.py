"""A fused SGD that skipped its first step, and with it the filling of its momentum."""

from __future__ import annotations

import numpy as np

from sonde import measures
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import held
from sonde.diagnosis.panel import Panel
from sonde.diagnosis.rule import Rule, fact
from sonde.facts import OptimizerFacts
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find weights that the first step of a fused SGD has spoilt with finite gradients, after steps it had skipped."""
    fused = [each for each in case.need_facts().optimizers if _fills_late(each)]
    if not fused:
        raise NotMeasured("a fused SGD with momentum")
    return next((found for each in fused if (found := _check_one(case, each)) is not None), None)


def _fills_late(optimizer: OptimizerFacts) -> bool:
    settings = [group.settings for group in optimizer.groups]
    return optimizer.kind == "SGD" and any(each.get("fused") and each.get("momentum") for each in settings)


def _check_one(case: Case, optimizer: OptimizerFacts) -> Finding | None:
    flag = case.track(f"{optimizer.name}.found_inf:scalar")
    if flag is None or case.history.first_step not in (0, 1) or int(flag.steps[0]) != 1:
        return None
    taken = np.flatnonzero(flag.numbers() == 0)
    if not len(taken) or taken[0] == 0:
        return None
    skipped, step = int(taken[0]), int(flag.steps[taken[0]])
    mine = set(held(optimizer))
    gradients, parameters = (_bad(case.first_panel(quantity), step) for quantity in ("gradient", "parameter"))
    bad = [name for name in parameters if name in mine]
    if not bad or any(name in mine for name in gradients):
        return None
    return RULE.finding(
        case,
        "critical",
        0.97,
        sites=(optimizer.name, *bad[:4]),
        step=step,
        evidence=(
            fact("steps that were skipped before the first that was taken", skipped, f"{flag.key} mean"),
            fact("parameters that it made non-finite, with gradients that were finite", len(bad)),
        ),
        cause=f"{optimizer.name} is a fused SGD whose first step was skipped by the gradient scaler. Torch makes its "
        f"momentum then but fills it only in a step that is taken: step {step} added what the memory happened to hold.",
        fix="Leave fused=True out for SGD with momentum, or begin with a scale that does not overflow, such as "
        "GradScaler(init_scale=1024).",
        refute=f"Set fused=False: if the weights are spoilt in step {step} all the same, it is something else.",
    )


def _bad(panel: Panel, step: int) -> list[str]:
    """Return the names of sites that are not finite in a step."""
    at = np.flatnonzero(panel.steps == step)
    if not len(at):
        return []
    bad = measures.nonfinite(panel.rows[at[0]]) > 0
    return [name for name, is_bad in zip(panel.names, bad, strict=True) if is_bad]


RULE = Rule(kind="momentum_never_filled", check=check, since=2)
