"""An optimizer that holds parameters which the model no longer has."""

from __future__ import annotations

from sonde.diagnosis.case import Case
from sonde.diagnosis.ownership import by_number, few, held, module_of, output_module
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find strangers in an optimizer while parameters of the model have no optimizer.

    Strangers alone prove nothing: a loss with weights of its own, or a model that is not watched, is trained too.
    """
    facts = case.need_facts()
    orphans = [each.name for each in facts.parameters if each.trainable and not each.owners]
    shapes = [str(tuple(case.parameters[name].shape)) for name in orphans]
    for optimizer in facts.optimizers:
        same = sum(shape in shapes for shape in optimizer.foreign)
        # Swapped in part, some of the model is still held; swapped as a whole, the shapes agree.
        if not orphans or not optimizer.foreign or not (held(optimizer) or same == len(shapes)):
            continue
        whole = not held(optimizer)
        return RULE.finding(
            case,
            "critical" if whole or any(module_of(name) == output_module(case) for name in orphans) else "warning",
            0.97 if same else 0.9,
            sites=(optimizer.name, *orphans),
            step=0,
            evidence=(
                above("parameters it holds that the model does not have", len(optimizer.foreign), 1),
                above("trainable parameters of the model that no optimizer holds", len(orphans), 1),
                fact("of the strangers, those with the shape of such a parameter", same),
            ),
            cause=f"{optimizer.name} holds {len(optimizer.foreign)} parameter(s) that the model does not have (shapes "
            f"{few(optimizer.foreign)}), while {few(orphans)} "
            + by_number(orphans, "has no optimizer: it was", "have no optimizer: they were")
            + " replaced after it was made.",
            fix="Make the optimizer after the last change to the model: after replacing layers, loading, copying, "
            ".to(...) or wrapping it.",
            refute="If {id(p) for g in optimizer.param_groups for p in g['params']} has the id of every parameter of "
            "the model, it is wrong.",
        )
    return None


RULE = Rule(kind="stale_params_in_optimizer", check=check, since=1)
