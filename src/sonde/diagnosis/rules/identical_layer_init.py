"""Layers that began with the same weights and stay the same."""

from __future__ import annotations

from sonde import measures, schema
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ownership import few
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


def check(case: Case) -> Finding | None:
    """Find trained layers with equal weights that several steps have not told apart.

    Copies one behind the other part at once and do no harm. Copies side by side get the same input and the same
    gradient, and remain one layer at the price of many. Biases whose layers are added up have the same gradient by
    nature, such as those of the last norm and of the shortcut in every residual network.
    """
    groups = {
        (each.name, *each.equal_to)
        for each in case.need_facts().parameters
        if len(each.shape) > 1 and each.equal_to and each.trainable and each.owners and each.name < min(each.equal_to)
    }
    if not groups:
        return None
    panel = case.panel("parameter", last=int(thresholds.TWIN_STEPS.value))
    if not panel.sites:
        raise NotMeasured("parameters")
    places = {name: at for at, name in enumerate(panel.names)}
    moved = {track.name for track in case.of("update") if float(measures.norm(track.rows[-1])) > 0}
    for group in sorted(groups):
        names = [name for name in group if name in places and name in moved and case.parameters[name].owners]
        rows = panel.rows[-1][[places[name] for name in names]] if names else panel.rows[-1][:0]
        twins = [name for name, row in zip(names, rows, strict=True) if row[schema.SEEN] and (row == rows[0]).all()]
        if len(twins) > 1:
            return _finding(case, twins)
    return None


def _finding(case: Case, twins: list[str]) -> Finding:
    return RULE.finding(
        case,
        "warning",
        0.93,
        sites=tuple(twins),
        step=1,
        evidence=(
            above("steps after which they are still equal", case.num_steps - 1, thresholds.TWIN_STEPS),
            fact("layers that are the same", len(twins), f"{twins[0]}:parameter norm"),
        ),
        cause=f"{few(twins)} began with the same weights and get the same gradients: they stay one layer in "
        f"{len(twins)} copies.",
        fix="Make each layer anew, or call reset_parameters() on each copy; copy.deepcopy and [layer] * n copy the "
        "values.",
        refute="Subtract one from the other after a step: anything but zeros refutes it.",
    )


RULE = Rule(kind="identical_layer_init", check=check, since=7)
