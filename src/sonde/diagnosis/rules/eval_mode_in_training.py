"""Training with modules in evaluation mode."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.modes import Mode, modes
from sonde.diagnosis.ownership import by_number, few, module_of
from sonde.diagnosis.rule import Rule, above, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find steps of a model in evaluation mode, of which a part that is trained would behave differently.

    Batch norms that are kept in evaluation mode inside a model in training mode are so on purpose.
    """
    known = modes(case, "train")
    off = [mode for mode in known if mode.training == 0 and mode.root in (0, None) and _is_trained(case, mode)]
    if not off or (off[0].root is None and len(off) < len(known)):
        return None
    since = min(mode.since for mode in off)
    steps = case.step - since + 1
    if steps < thresholds.MODE_STEPS.value:
        return None
    names = [mode.name for mode in off]
    when = "from the start" if since <= 1 else f"since step {since}"
    return RULE.finding(
        case,
        "warning",
        0.96,
        sites=tuple(names),
        step=since,
        evidence=(
            below("training flag of these modules in training passes", 0, 0, f"{names[0]}:vital.training mean"),
            above("steps trained like that", steps, thresholds.MODE_STEPS),
            fact("modules", len(names)),
        ),
        cause=f"The model trains in evaluation mode {when}: {few(names)} "
        + (
            by_number(names, "uses and keeps", "use and keep") + " old statistics instead of the batch's."
            if off[0].is_norm
            else by_number(names, "does", "do") + " not drop anything."
        ),
        fix="Call model.train() before the training loop, and again after every evaluation.",
        refute="Print model.training where the training pass begins: True refutes it.",
    )


def _is_trained(case: Case, mode: Mode) -> bool:
    """Say whether a module is meant to learn: a norm whose own weights are frozen is not."""
    own = [each for name, each in case.parameters.items() if module_of(name) == mode.name]
    return not mode.is_norm or not own or any(each.trainable for each in own)


RULE = Rule(kind="eval_mode_in_training", check=check, since=3)
