"""An eps that is 0 in float16."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, below, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find float16 parameters whose optimizer adds an eps that rounds to 0 before it divides."""
    case.need_facts()
    for optimizer in case.facts.optimizers:
        for group in optimizer.groups:
            eps = group.settings.get("eps")
            halves = [name for name in group.parameters if _is_half(case, name)]
            if isinstance(eps, float) and eps < thresholds.EPS_ROUNDS_TO_ZERO.value and halves:
                return RULE.finding(
                    case,
                    "critical",
                    0.95,
                    sites=(optimizer.name, *halves[:4]),
                    step=0,
                    evidence=(
                        below("eps", eps, thresholds.EPS_ROUNDS_TO_ZERO),
                        fact("parameters in float16", len(halves)),
                    ),
                    cause=f"{optimizer.kind} works in float16, where eps={eps:g} is 0: a gradient of 0 makes it "
                    "divide 0 by 0.",
                    fix="Keep the parameters in float32 and use autocast, or set eps=1e-4.",
                    refute="Run one step with a gradient of zeros: if the parameters stay finite, eps is large enough.",
                )
    return None


def _is_half(case: Case, name: str) -> bool:
    parameter = case.parameters.get(name)
    return parameter is not None and parameter.dtype.endswith("float16") and not parameter.dtype.endswith("bfloat16")


RULE = Rule(kind="adam_eps_too_small", check=check, since=0)
