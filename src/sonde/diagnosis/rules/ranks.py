"""Rules about runs with several ranks."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.core import schema
from sonde.diagnosis.case import Case, Drift, NotMeasured
from sonde.diagnosis.rule import Found, Threshold, above, fact, rule
from sonde.store import Run
from sonde.store.series import ALL_COLUMNS

TOLERANCE = Threshold(1e-5, "difference over the weight: ranks may round a mean differently, but by less")
MAX_PARAMETERS: Final = 64
"""How many parameters are compared: replicas that drift apart do so everywhere."""


@rule(
    "ddp_replicas_diverge",
    severity="critical",
    exact=True,
    fix=(
        "Call the DistributedDataParallel wrapper instead of the module inside it, wrap the model after moving it "
        "to its device and dtype, and clip or change gradients in the same way on all ranks."
    ),
    refute="Gather one parameter from all ranks after a step: if the values are equal, this finding is wrong.",
)
def ddp_replicas_diverge(case: Case) -> Found | None:
    """The replicas of the model have different weights.

    Judged from the files of all ranks, not while the run is recorded.
    """
    if case.replicas is None:
        raise NotMeasured("parameters of more than one rank")
    if not case.replicas:
        return None
    first = case.replicas[0]
    return Found(
        step=first.step,
        sites=tuple(drift.name for drift in case.replicas[:8]),
        evidence=(
            above("difference between ranks over the weight, when it began", first.first, TOLERANCE),
            above("difference between ranks at the end", first.last, TOLERANCE, f"{first.name}:parameter mean"),
            fact("parameters that differ", len(case.replicas)),
        ),
        cause=f"The replicas diverge: after step {first.step} {first.name} is not the same on all ranks.",
    )


def compare_ranks(run: Run) -> list[Drift] | None:
    """Return the parameters that differ between ranks, the earliest first; None if there is nothing to compare.

    Shards are not replicas: a parameter whose ranks hold different numbers of elements is skipped.
    """
    if len(run.ranks) < 2:
        return None
    sites = [site for site in run.sites if site.quantity == "parameter" and len(run.ranks_of(site)) > 1]
    found = []
    compared = False
    for site in sites[:: max(1, len(sites) // MAX_PARAMETERS)]:
        parts = [run.stored(site, ALL_COLUMNS, bins=False, rank=rank) for rank in run.ranks_of(site)]
        steps = parts[0].step
        for part in parts[1:]:
            steps = np.intersect1d(steps, part.step)
        rows = [part.rows[np.searchsorted(part.step, steps)] for part in parts]
        if not len(steps) or any((row[:, schema.COUNT] != rows[0][:, schema.COUNT]).any() for row in rows):
            continue
        compared = True
        apart = np.max([_apart(rows[0], row) for row in rows[1:]], axis=0)
        differs = np.flatnonzero(apart > TOLERANCE)
        # At step 0 replicas may differ: the wrapper copies the weights of rank 0 when it is created.
        differs = differs[steps[differs] > 0]
        if len(differs):
            at = differs[0]
            found.append(Drift(site.name, int(steps[at]), float(apart[at]), float(apart[-1])))
    return sorted(found, key=lambda drift: drift.step) if compared else None


def _apart(left: schema.Rows, right: schema.Rows) -> schema.Rows:
    """Return the largest difference between two rows over their size."""
    size = np.maximum(np.maximum(np.abs(left[:, schema.MIN]), np.abs(left[:, schema.MAX])), 1e-30)
    columns = [schema.MIN, schema.MAX, schema.MEAN]
    distance: schema.Rows = np.abs(left[:, columns] - right[:, columns]).max(1) / size
    return distance
