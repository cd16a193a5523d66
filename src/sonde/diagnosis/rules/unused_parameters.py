"""Parameters that no training pass uses."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few, module_of, ran, runner_of, share_of
from sonde.diagnosis.reach import unreached
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find parameters without a gradient whose module never ran, or whose module uses its other parameters only."""
    modules = ran(case)
    lost = unreached(case)
    names = [name for name in lost.names if runner_of(case, name) not in modules or lost.has_live_kin(case, name)]
    names = [name for name in names if lost.steps[name] >= _patience(case, name, modules)]
    if not names:
        return None
    share = share_of(case, names)
    return RULE.finding(
        case,
        "warning" if share >= thresholds.UNUSED_SHARE.value else "info",
        0.93,
        sites=tuple(names),
        step=lost.first_step,
        evidence=(
            above("steps without a gradient", min(lost.steps[name] for name in names), thresholds.UNUSED_STEPS),
            above("their share of all trainable elements", share, thresholds.UNUSED_SHARE)
            if share >= thresholds.UNUSED_SHARE.value
            else fact("their share of all trainable elements", share),
        ),
        cause=f"No training pass uses {few(names)}: {by_number(names, 'it never gets', 'they never get')} a gradient.",
        fix="Use the layer in forward(), or delete it. Look for a layer that is called twice where two were meant.",
        refute=f"Set {names[0]} to zeros and run the same batch in eval mode: another output refutes it.",
    )


def _patience(case: Case, name: str, modules: frozenset[str]) -> float:
    """Experts and heads that are taken in turns have siblings that ran; they get more time."""
    family = module_of(name).rpartition(".")[0]
    is_listed = case.modules.get(family) is not None and case.modules[family].kind in ("ModuleList", "ModuleDict")
    kin = f"{family}." if is_listed else "\0"
    routed = any(other.startswith(kin) for other in modules)
    return (thresholds.ROUTED_STEPS if routed else thresholds.UNUSED_STEPS).value


RULE = Rule(kind="unused_parameters", check=check, since=10)
