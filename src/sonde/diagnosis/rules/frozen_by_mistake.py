"""Parameters that are handed to an optimizer and cannot be trained."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.diagnosis.case import Case
from sonde.diagnosis.fresh import fresh_parameters
from sonde.diagnosis.ownership import by_number, few, held, module_of, need_optimizers, output_module, size
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding, Severity

_LAYERS = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN", "MultiheadAttention", "NonDynamicallyQuantizableLinear")


@dataclass(frozen=True, slots=True)
class _Reason:
    names: list[str]
    words: str
    severity: Severity
    confidence: float


def check(case: Case) -> Finding | None:
    """Find frozen parameters in an optimizer that nobody freezes on purpose.

    A frozen backbone is usual. What is not: an output layer that is frozen, weights that are frozen as they were drawn,
    and a model in which only norms can be trained.
    """
    optimizers = need_optimizers(case)
    names = [name for optimizer in optimizers for name in held(optimizer) if name in case.parameters]
    frozen = [name for name in dict.fromkeys(names) if not case.parameters[name].trainable]
    free = [name for name in dict.fromkeys(names) if case.parameters[name].trainable]
    reason = _reason(case, frozen, free) if frozen else None
    if reason is None:
        return None
    total = sum(size(case.parameters[name]) for name in {*frozen, *free})
    return RULE.finding(
        case,
        reason.severity,
        reason.confidence,
        sites=tuple(reason.names),
        step=0,
        evidence=(
            above("frozen parameters that an optimizer holds", len(frozen), 1),
            fact("their share of its elements", sum(size(case.parameters[name]) for name in frozen) / total),
            fact("parameters it can train", len(free)),
        ),
        cause=f"{few(reason.names)} {reason.words}: requires_grad is False, so the optimizer skips "
        + by_number(reason.names, "it.", "them."),
        fix="Call .requires_grad_(True) on them before training; if they are meant to be frozen, leave them out of the "
        "optimizer.",
        refute="If they were meant to stay as they are, this is wrong.",
    )


def _reason(case: Case, frozen: list[str], free: list[str]) -> _Reason | None:
    if not free:
        return _Reason(frozen, "are all that the optimizer holds", "critical", 0.99)
    head = output_module(case)
    last = [name for name in frozen if module_of(name) == head]
    if last:
        return _Reason(last, "belong to the output layer and are frozen", "critical", 0.95)
    kinds = {case.parameters[name].kind for name in free}
    if kinds and all("Norm" in kind for kind in kinds):
        return _Reason(frozen, "are frozen and only norms can be trained", "warning", 0.8)
    # A parameter that a module of the user's makes without a gradient, such as a fixed encoding, is meant so.
    layers = tuple(name for name in frozen if case.parameters[name].kind.startswith(_LAYERS))
    fresh = fresh_parameters(case, layers)
    if fresh:
        return _Reason(fresh, "are frozen as they were drawn at random", "warning", 0.85)
    return None


RULE = Rule(kind="frozen_by_mistake", check=check, since=1)
