"""Layers with nothing between them that bends."""

from __future__ import annotations

from typing import Final

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.outlook import is_learning_well
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding, Severity

_TRANSPARENT: Final = frozenset({"Identity", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d"})
_LINEAR: Final = frozenset({"Linear", "LazyLinear", "Conv1d", "Conv2d", "Conv3d"})


def check(case: Case) -> Finding | None:
    """Find a linear layer that is handed the very output of another one."""
    facts = case.need_facts()
    if not facts.edges:
        raise NotMeasured("how modules follow each other")
    pairs = [(a, b) for a, b in _hops(case) if a != b and _is_wasted(case, a, b)]
    if not pairs:
        return None
    names = tuple(dict.fromkeys(name for pair in pairs for name in pair))
    return RULE.finding(
        case,
        _severity(case, len(pairs)),
        0.8,
        sites=names[:8],
        step=1,
        evidence=(
            above("pairs of linear layers without anything between them", len(pairs), 1),
            fact("layers in such pairs", len(names)),
        ),
        cause=f"{pairs[0][0]} hands its output straight to {pairs[0][1]}: together they can do no more than one layer.",
        fix="Put an activation between them (nn.ReLU(), nn.GELU()), or make them one layer.",
        refute="Replace both by the one layer that is their product: if the outputs differ, something is between them.",
    )


def _hops(case: Case) -> list[tuple[str, str]]:
    """Return which module feeds which, looking through those that bend nothing."""
    after: dict[str, list[str]] = {}
    for first, second in case.facts.edges:
        after.setdefault(first, []).append(second)
    hops = []
    for start in after:
        waiting, seen = list(after[start]), {start}
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            module = case.modules.get(name)
            if module is not None and module.kind in _TRANSPARENT:
                waiting.extend(after.get(name, ()))
            else:
                hops.append((start, name))
    return hops


def _is_wasted(case: Case, first: str, second: str) -> bool:
    """Say whether two layers do no more than one; a narrow waist makes a low rank, which may be meant."""
    modules = case.modules
    kinds = [modules[name].kind if name in modules else "" for name in (first, second)]
    weights = [case.parameters.get(f"{name}.weight") for name in (first, second)]
    if kinds[0] != kinds[1] or kinds[0] not in _LINEAR or weights[0] is None or weights[1] is None:
        return False
    if any(modules[name].settings.get("groups", 1) != 1 for name in (first, second)):
        return False
    one, two = weights[0].shape, weights[1].shape
    if len(one) > 2 and (one[2:] == (1,) * len(one[2:]) or two[2:] == (1,) * len(two[2:])):
        return False  # pointwise kernels factorise on purpose
    narrow = len(one) >= 2 and len(two) >= 2 and one[0] < min(one[1], two[0])
    return not narrow and "lora" not in f"{first}.{second}".lower()


def _severity(case: Case, pairs: int) -> Severity:
    # One pair in a deep network wastes a layer; several leave a network that cannot bend where it should.
    return "warning" if pairs >= 2 and not is_learning_well(case) else "info"


RULE = Rule(kind="linear_stack", check=check, since=1)
