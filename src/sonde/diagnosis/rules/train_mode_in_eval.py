"""Evaluation with modules in training mode."""

from __future__ import annotations

from sonde import schema
from sonde.diagnosis.case import Case
from sonde.diagnosis.modes import modes
from sonde.diagnosis.ownership import by_number, few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find evaluation passes of a model that is in training mode as a whole.

    Dropout alone in training mode, inside a model in evaluation mode, is how uncertainty is sampled.
    """
    on = [mode for mode in modes(case, "eval") if mode.training == 1 and mode.root in (1, None)]
    if not on or (on[0].root is None and not any(mode.is_norm for mode in on)):
        return None
    since = min(mode.since for mode in on)
    # A single pass may be a dry run before training.
    passes = _passes(case, on[0].name, since)
    if passes < 2:
        return None
    names = [mode.name for mode in on]
    norms = [mode.name for mode in on if mode.is_norm]
    return RULE.finding(
        case,
        "warning",
        0.93,
        sites=tuple(names),
        step=since,
        evidence=(
            above(
                "training flag of these modules in passes without gradients",
                1,
                1,
                f"{names[0]}:vital.training@eval mean",
            ),
            above("such passes", passes, 2),
            fact("batch norms that learn from evaluation data", len(norms)),
        ),
        cause=f"Evaluation runs in training mode: {few(names)} "
        + (
            by_number(names, "takes its statistics from, and remembers,", "take their statistics from, and remember,")
            + " evaluation batches."
            if norms
            else by_number(names, "drops", "drop") + " values at random."
        ),
        fix="Call model.eval() before evaluating, and model.train() after it.",
        refute="Evaluate the same batch twice: equal results, and running statistics that do not move, refute it.",
    )


def _passes(case: Case, name: str, since: int) -> float:
    track = case.track(f"{name}:output@eval")
    return 0.0 if track is None else float(track.since(since).rows[:, schema.SEEN].sum())


RULE = Rule(kind="train_mode_in_eval", check=check, since=1)
