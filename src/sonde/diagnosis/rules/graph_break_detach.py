"""Parameters whose module runs, but which the backward pass never reaches."""

from __future__ import annotations

from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.fresh import fresh_parameters
from sonde.diagnosis.ownership import few, ran, runner_of, share_of
from sonde.diagnosis.reach import unreached
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find parameters without a gradient in modules that ran and of which no parameter gets one."""
    modules = ran(case)
    lost = unreached(case)
    names = [name for name in lost.names if runner_of(case, name) in modules and not lost.has_live_kin(case, name)]
    names = [name for name in names if lost.steps[name] >= thresholds.BROKEN_STEPS.value]
    if not names:
        return None
    share = share_of(case, names)
    # Features of a trained model are often computed under no_grad on purpose; weights as drawn are not, nor is a part
    # that is small beside the rest.
    drawn = fresh_parameters(case, tuple(names)) or not any(len(case.parameters[name].shape) > 1 for name in names)
    meant = not drawn and share >= thresholds.EXTRACTOR_SHARE.value
    last = _last_in_order(case, names)
    return RULE.finding(
        case,
        "info" if meant else ("critical" if share > 0.5 else "warning"),
        0.7 if meant else 0.95,
        sites=tuple(names),
        step=lost.first_step,
        evidence=(
            above(
                "steps of their optimizer without any gradient",
                min(lost.steps[name] for name in names),
                thresholds.BROKEN_STEPS,
            ),
            fact("parameters", len(names)),
            fact("their share of all trainable elements", share),
        ),
        cause=f"The backward pass never reaches {few(names)}, though the module runs: the graph is cut behind {last}.",
        fix=f"Look behind {last} for .detach(), .data, .item(), .numpy(), torch.no_grad() or a new torch.tensor(...) "
        "made from its output, and remove it.",
        refute="Call the model once and print requires_grad of that module's output where it is used: if it is True up "
        "to the loss, the graph is whole.",
        data={"behind": last},
    )


def _last_in_order(case: Case, names: list[str]) -> str:
    cut = {runner_of(case, name) for name in names}
    return next((module for module in reversed(case.facts.order) if module in cut), sorted(cut)[-1])


RULE = Rule(kind="graph_break_detach", check=check, since=5)
