"""How often the warnings of each kind were right, measured on the benchmark of faulty programs."""

from __future__ import annotations

import functools
import json
from importlib import resources

from sonde.records import Severity


def confidence_of(kind: str, severity: Severity) -> float | None:
    """Return how likely a warning of a kind names the right cause; None where it was never seen, and for notes.

    This is the mean of the posterior for a uniform prior, so that few programs give no extreme answer.
    """
    counts = _counts().get(kind)
    if counts is None or severity == "info":
        return None
    return posterior_mean(counts["right"], counts["wrong"])


def posterior_mean(right: float, wrong: float) -> float:
    """Return the mean of Beta(1 + right, 1 + wrong).

    >>> posterior_mean(0, 0), posterior_mean(3, 0), posterior_mean(8, 2)
    (0.5, 0.8, 0.75)
    """
    return (right + 1) / (right + wrong + 2)


@functools.cache
def _counts() -> dict[str, dict[str, float]]:
    """Return by kind in how many programs its warnings were right and wrong; `benchmarks/rule_table.py` counts them."""
    plain = json.loads(resources.files("sonde.diagnosis").joinpath("reliability.json").read_text())
    counts: dict[str, dict[str, float]] = plain["rules"]
    return counts
