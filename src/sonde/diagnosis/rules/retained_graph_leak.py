"""Memory that grows with every step."""

from __future__ import annotations

import numpy as np

from sonde.core.robust import growth, less
from sonde.diagnosis import thresholds
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding

_RSS = "process.rss"
_MEMORIES = ("cuda.allocated", _RSS)
_OWN = "process.sonde"
_MIB = 1 << 20


def check(case: Case) -> Finding | None:
    """Find memory that grows steadily after warming up, by more than caches and readers do."""
    curves = [(name, curve) for name in _names(case) if (curve := case.scalar(name)) is not None]
    if not curves:
        raise NotMeasured("process.rss")
    for name, (steps, values) in curves:
        own = case.scalar(_OWN) if name == _RSS else None
        if own is not None:  # what Sonde holds grows within its bounds as the first steps come in
            values = less(steps, values, *own)
        # A slope over all pairs of points is dear; a curve that has not risen needs none.
        if np.nanmax(values) - np.nanmin(values) < thresholds.LEAK_BYTES.value:
            continue
        found = growth(steps.astype(np.float64), values)
        base = float(values[np.isfinite(values)][:1].sum())
        share = found.total / base if base > 0 else 0.0
        large = found.total >= thresholds.LEAK_BYTES.value and share >= thresholds.LEAK_SHARE.value
        if found.steady and large:
            return RULE.finding(
                case,
                "warning",
                0.75,
                sites=("(loop)",),
                step=int(steps[0]),
                evidence=(
                    above(
                        "growth in MiB", found.total / _MIB, thresholds.LEAK_BYTES.value / _MIB, f"{name}:scalar mean"
                    ),
                    above("growth over memory at the start", share, thresholds.LEAK_SHARE),
                    fact("MiB per step", found.per_step / _MIB),
                ),
                cause=f"Memory ({name}) grows by {found.per_step / _MIB:.2f} MiB with every step: something keeps what "
                "steps leave behind, most often losses with their graphs.",
                fix="Add up loss.item() or loss.detach(), not loss; do not append outputs to a list without .detach(); "
                "look for retain_graph=True and create_graph=True.",
                refute="Train on one batch without keeping any result: if memory still grows, the graph is not what is "
                "kept.",
            )
    return None


def _names(case: Case) -> list[str]:
    return [name for name in case.scalars() if name in _MEMORIES or name.endswith(".allocated")]


RULE = Rule(kind="retained_graph_leak", check=check, since=50)
