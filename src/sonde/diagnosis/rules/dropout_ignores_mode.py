"""A dropout that drops in evaluation too, whatever the mode of its module."""

from __future__ import annotations

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import MODEL
from sonde.diagnosis.rule import Rule, above, below
from sonde.facts import ModuleFacts
from sonde.records import Finding

_OF_TORCH = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")


def check(case: Case) -> Finding | None:
    """Find values that F.dropout dropped in evaluation passes of a model in evaluation mode.

    Who writes a dropout module of their own that ignores the mode means to sample.
    """
    dropped = case.vital(vitals.LOOP, vitals.DROPPED, "eval")
    mode = case.curve(f"{MODEL}:vital.training@eval")
    if dropped is None or mode is None or mode[1][-1] != 0:
        return None
    later = dropped.since(int(mode[0][-1]))
    if not len(later) or any(_is_own_dropout(module) for module in case.modules.values()):
        return None
    return RULE.finding(
        case,
        "warning",
        0.85,
        sites=(MODEL, vitals.LOOP),
        step=int(later.steps[0]),
        evidence=(
            above("evaluations in which values were dropped", len(later), 1, f"{dropped.key} mean"),
            below("training flag of the model meanwhile", 0, 0, f"{MODEL}:vital.training@eval mean"),
        ),
        cause="The model is in evaluation mode, but dropout still drops values: F.dropout is called without the mode.",
        fix="Write F.dropout(x, p, training=self.training), or use nn.Dropout, which knows the mode.",
        refute="Call the model twice on the same input in eval() mode: equal outputs refute it. If you mean to sample, "
        "it is fine.",
    )


def _is_own_dropout(module: ModuleFacts) -> bool:
    return "dropout" in module.kind.lower() and module.kind not in _OF_TORCH and module.name != MODEL


RULE = Rule(kind="dropout_ignores_mode", check=check, since=1)
