"""Parameters that get gradients which no optimizer applies."""

from __future__ import annotations

import numpy as np

from sonde import measures
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few, module_of, need_optimizers, output_module, share_of
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding, Severity


def check(case: Case) -> Finding | None:
    """Find trainable parameters with gradients whose values nobody changes."""
    need_optimizers(case)
    if case.facts.hidden:
        tensors = [each.name for each in case.facts.hidden if each.tensor]
        return _no_parameters(case, tensors) if len(tensors) == len(case.facts.hidden) else _out_of_sight(case)
    panel = case.panel("gradient")
    alive = (panel.read & (measures.norm(panel.rows) > 0)).sum(axis=0)
    counts = dict(zip(panel.names, alive.tolist(), strict=True))
    orphans = [
        name
        for name, each in case.parameters.items()
        if each.trainable and not each.owners and counts.get(name, 0) >= thresholds.ORPHAN_STEPS.value
    ]
    orphans = [name for name in orphans if not _is_changed(case, name)]
    if not orphans:
        return None
    last = case.track(f"{orphans[0]}:gradient")
    share = share_of(case, orphans)
    head = output_module(case)
    severity: Severity = "critical" if any(module_of(name) == head for name in orphans) else "warning"
    return RULE.finding(
        case,
        severity,
        0.97,
        sites=tuple(orphans),
        step=int(last.steps[0]) if last is not None else None,
        evidence=(
            above("steps in which they got a gradient", max(counts[name] for name in orphans), thresholds.ORPHAN_STEPS),
            fact("parameters that no optimizer holds", len(orphans)),
            fact("their share of all trainable elements", share),
        ),
        cause=f"{few(orphans)} "
        + by_number(
            orphans,
            "gets gradients, but no optimizer holds it: it never changes.",
            "get gradients, but no optimizer holds them: they never change.",
        ),
        fix="Build the optimizer after the model is complete, from model.parameters(), or add them with "
        "optimizer.add_param_group(...). If they are meant to stay as they are, call requires_grad_(False) on them.",
        refute="Compare one of them before and after optimizer.step(): a change refutes it.",
    )


def _no_parameters(case: Case, names: list[str]) -> Finding:
    return RULE.finding(
        case,
        "warning",
        0.95,
        sites=tuple(names),
        step=1,
        evidence=(fact("plain tensors of modules that get gradients and never change", len(names)),),
        cause=f"{few(names)} {by_number(names, 'is a plain tensor', 'are plain tensors')} with requires_grad, not "
        f"nn.Parameter: {by_number(names, 'it gets', 'they get')} gradients, but model.parameters() does not list "
        f"{by_number(names, 'it', 'them')}, so no optimizer moves {by_number(names, 'it', 'them')}.",
        fix="Write nn.Parameter(...) around what is to be learnt, and build the optimizer after that; what is to stay "
        "as it is goes to register_buffer.",
        refute="Compare one of them before and after optimizer.step(): a change refutes it.",
    )


def _out_of_sight(case: Case) -> Finding:
    names = [each.name for each in case.facts.hidden]
    keeper = names[0].split(".")[0]
    return RULE.finding(
        case,
        "critical",
        0.97,
        sites=tuple(names),
        step=1,
        evidence=(fact("parameters that get gradients, but that model.parameters() does not list", len(names)),),
        cause=f"{few(names)} {by_number(names, 'stands', 'stand')} in a plain list or dict ({keeper}), which torch "
        f"does not look into: {by_number(names, 'it gets', 'they get')} gradients, but no optimizer has "
        f"{by_number(names, 'it', 'them')}, nor has state_dict().",
        fix="Use nn.ModuleList, nn.ModuleDict or nn.ParameterList instead of the plain list or dict, and build the "
        "optimizer after that.",
        refute="Print len(list(model.parameters())): if these are counted, it is wrong.",
    )


def _is_changed(case: Case, name: str) -> bool:
    """Say whether a parameter was written to after the run began: then somebody trains it whom we do not know."""
    track = case.track(f"{name}:parameter")
    return track is not None and len(track) > 1 and bool(np.any(np.diff(track.rows, axis=0) != 0))


RULE = Rule(kind="params_not_in_optimizer", check=check, since=2)
