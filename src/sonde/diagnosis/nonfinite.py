"""Find where the first non-finite number appeared, in the order in which a step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sonde.core import schema, signals
from sonde.diagnosis.case import Case
from sonde.diagnosis.symptoms import NOT_FINITE
from sonde.records import Finding, Site

BASIS: Final = "told_from"
READINGS: Final = "readings"
"""Marks findings about non-finite numbers that rest on readings; a repeated step gives better ones."""
KINDS: Final = frozenset(
    {
        "nan_in_data",
        "nan_in_weights",
        "nan_forward",
        "nan_in_loss",
        "nan_backward",
        "nan_in_optimizer",
        "fp16_overflow",
        "fully_masked_attention",
        "empty_target",
    }
)
"""Kinds of findings about non-finite numbers, from rules or from a repeated step."""
Stage = Literal["data", "weights", "forward", "loss", "backward", "update"]
_ORDER: Final[tuple[Stage, ...]] = ("data", "weights", "forward", "loss", "backward", "update")
_STAGES: Final[dict[str, Stage]] = {
    "input": "data",
    "output": "forward",
    "gradient": "backward",
    "output_gradient": "backward",
    "update": "update",
    "parameter": "update",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The first site that was not finite, and when."""

    stage: Stage
    site: Site
    step: int
    others: int
    """How many sites of the same stage were not finite in that step."""


def is_traced(finding: Finding) -> bool:
    """Return whether a finding about non-finite numbers rests on more than readings, such as a repeated step."""
    return finding.kind in KINDS and finding.data.get(BASIS) != READINGS


# Numbers that became too large: steps that are too long lead to them, so the operation may not be the cause.
_TOO_LARGE: Final = frozenset({"exp_overflow", "inf_minus_inf", "overflow", "unknown", "zero_times_inf"})


def is_known_operation(finding: Finding) -> bool:
    """Return whether a repeated step showed an operation outside its domain: a logarithm of 0, a division by 0."""
    reason = finding.data.get("reason")
    return is_traced(finding) and finding.exact and reason is not None and reason not in _TOO_LARGE


def is_earlier(finding: Finding, other: Finding) -> bool:
    """Return whether a finding about non-finite numbers comes before another that names no reason.

    A repeated step may not show all of it, as where parts of a model are called one by one. The order in which a step
    computes decides.
    """
    if finding.kind not in NOT_FINITE or other.kind not in NOT_FINITE or finding.step > other.step:
        return False
    if other.data.get("reason") != "unknown" and other.data.get("origin", {}).get("repeated") is not False:
        return False
    return NOT_FINITE.index(finding.kind) < NOT_FINITE.index(other.kind)


def find_origin(case: Case) -> Origin | None:
    """Return where the first non-finite number appeared; None if all numbers are finite."""
    return case.once("origin", lambda: _find(case))


def _find(case: Case) -> Origin | None:
    bad = [(step, site) for id_, step in case.history.first_bad.items() if (site := case.site(id_)) is not None]
    bad = [(step, site) for step, site in bad if site.phase == "train" and site.quantity in _STAGES]
    skipped = set(case.history.skipped_steps().tolist())
    # A gradient scaler tries scales until none overflows; the steps that it skips do no harm.
    bad = [(step, site) for step, site in bad if step not in skipped or _STAGES[site.quantity] != "backward"]
    if not bad:
        return None
    first = min(step for step, _ in bad)
    ranked = sorted(
        ((_stage(site, step), site) for step, site in bad if step == first),
        key=lambda pair: (_ORDER.index(pair[0]), -pair[1].id if pair[0] == "backward" else pair[1].id),
    )
    stage, site = ranked[0]
    return Origin(stage, site, first, sum(other == stage for other, _ in ranked))


def _stage(site: Site, step: int) -> Stage:
    if site.quantity == "parameter" and step == 0:
        return "weights"
    if site.name == signals.LOSS and site.quantity == "output":
        return "loss"
    if site.name == signals.LOSS and site.quantity == "input" and site.part == ".input":
        return "loss"
    return _STAGES[site.quantity]


def count_bad(case: Case, site: Site, step: int) -> float:
    """Return how many numbers of a site were not finite in a step; NaN if the step is no longer remembered."""
    track = case.track(site.key)
    at = np.flatnonzero(track.steps == step) if track is not None else np.zeros(0, np.intp)
    if track is None or not len(at):
        return float("nan")
    row = track.rows[int(at[0])]
    return float(row[schema.NAN] + row[schema.POS_INF] + row[schema.NEG_INF])
