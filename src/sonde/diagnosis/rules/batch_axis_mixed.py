"""Samples of a batch that are taken for steps of a sequence, or cut up across each other."""

from __future__ import annotations

from collections.abc import Iterator

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.rule import Rule, fact
from sonde.facts import ReshapeFacts
from sonde.records import Finding, Site


def check(case: Case) -> Finding | None:
    """Find a sequence layer that runs along the batch, or a view that changes the shape where it should move axes."""
    case.need_facts()
    for site in _sequences(case):
        return _along_the_batch(case, site)
    return _cut_up(case, case.facts.reshapes[0]) if case.facts.reshapes else None


def _sequences(case: Case) -> Iterator[Site]:
    """Yield outputs of layers that take the first axis for time, though it has a row for each target."""
    # A loss with one answer per sample says how many samples there are; any other may count words or pixels.
    counts = {
        loss.target_shape[0]
        for loss in case.facts.losses
        if loss.target_shape
        and loss.input_shape[:1] == loss.target_shape[:1]
        and max(loss.target_shape[1:], default=1) == 1
    }
    for site in case.sites("output"):
        module = case.modules.get(site.name)
        if module is None or module.settings.get("batch_first") is not False or len(site.shape) != 3:
            continue
        first, second = site.shape[:2]
        if counts == {first} and first > 1 and second > 1 and first != second:
            yield site


def _along_the_batch(case: Case, site: Site) -> Finding:
    rows, steps, _ = site.shape
    return RULE.finding(
        case,
        "critical",
        0.95,
        sites=(site.name,),
        step=1,
        evidence=(
            fact("size of the axis that it takes for time", rows),
            fact("samples in the batch, as the loss has them", rows),
            fact("size of the axis that it takes for samples", steps),
        ),
        cause=f"{site.name} ({site.kind}) runs along the batch: it was made with batch_first=False and takes the first "
        f"axis for time, but that has the {rows} samples. Each sample is read as what follows the one before.",
        fix=f"Make it with batch_first=True, or hand it x.transpose(0, 1), which begins with ({steps}, {rows}) here.",
        refute="Change one sample of a batch: if the outputs of all others stay the same, it is wrong.",
    )


def _cut_up(case: Case, reshape: ReshapeFacts) -> Finding:
    where = reshape.module or "(model)"
    return RULE.finding(
        case,
        "critical",
        0.9,
        sites=(where, vitals.LOSS) if where == "(model)" else (where, "(model)"),
        step=1,
        evidence=(
            fact("size of the first axis that changed before", reshape.before[_moved(reshape)]),
            fact("the same after", reshape.after[_moved(reshape)]),
        ),
        cause=f"A view or reshape turns {reshape.before} into {reshape.after}: the same sizes in another order. That "
        "moves no axes but cuts the numbers up anew, so that samples and steps get mixed.",
        fix="Write transpose or permute to move axes; view and reshape only part or join neighbours.",
        refute="Compare it with .transpose on a tensor of counted numbers: if both are equal, it is wrong.",
    )


def _moved(reshape: ReshapeFacts) -> int:
    pairs = zip(reshape.before, reshape.after, strict=True)
    return next(at for at, (before, after) in enumerate(pairs) if before != after)


RULE = Rule(kind="batch_axis_mixed", check=check, since=2)
