"""What a check of all gradients found, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from sonde import schema
from sonde.checks import total_norm
from sonde.pytorch_debugging.norm_history import NormHistory, Verdict, judge
from sonde.records import Reading

MOST_NAMES: Final = 20


@dataclass(slots=True, kw_only=True)
class GradientReport:
    """All gradients at one moment."""

    norm: float
    """Of all gradients together; NaN or infinite if an element is."""
    readings: dict[str, Reading] = field(repr=False)
    threshold: float | None
    """What the norm was held against, if it was a given number."""
    usual_norm: float | None
    """The median of the last norms, if enough are known."""
    verdict: Verdict
    nan: dict[str, int]
    """Parameters whose gradient has NaN, and how many."""
    inf: dict[str, int]
    zero: tuple[str, ...]
    """Parameters whose gradient is exactly zero everywhere."""

    @property
    def norms(self) -> dict[str, float | None]:
        """The norm of the finite elements of each gradient; None if there are none."""
        return {name: reading.norm for name, reading in self.readings.items()}

    @property
    def largest(self) -> list[tuple[str, float]]:
        """The gradients with the largest norms, largest first."""
        known = [(name, norm) for name, norm in self.norms.items() if norm is not None]
        return sorted(known, key=lambda item: -item[1])[:MOST_NAMES]

    def held_against(self) -> str:
        """Say in words what the norm was held against."""
        if self.threshold is not None:
            return f"the threshold {self.threshold:g}"
        return "nothing yet" if self.usual_norm is None else f"{self.usual_norm:.3g}, the usual norm of this run"

    def data(self) -> dict[str, Any]:
        """Return what an event carries: names are bounded, their number is told."""
        return {
            "gradient_norm": self.norm,
            "threshold": self.threshold,
            "usual_norm": self.usual_norm,
            "parameter_count": len(self.readings),
            "nan": _some(self.nan),
            "inf": _some(self.inf),
            "largest": dict(self.largest[:5]),
        }


def report_gradients(readings: dict[str, Reading], threshold: float | None, history: NormHistory) -> GradientReport:
    """Judge gradients; their norm then becomes a part of the history."""
    norm = total_norm(readings.values())
    usual = history.usual()
    history.add(norm)
    return GradientReport(
        norm=norm,
        readings=readings,
        threshold=threshold,
        usual_norm=None if usual is None else usual.median,
        verdict=judge(norm, threshold, usual),
        nan={name: int(each.row[schema.NAN]) for name, each in readings.items() if each.row[schema.NAN]},
        inf={name: count for name, each in readings.items() if (count := _inf(each))},
        zero=tuple(name for name, each in readings.items() if each.row[schema.ZERO] == each.row[schema.COUNT] > 0),
    )


def _inf(reading: Reading) -> int:
    return int(reading.row[schema.POS_INF] + reading.row[schema.NEG_INF])


def _some(counts: dict[str, int]) -> dict[str, int]:
    kept = dict(list(counts.items())[:MOST_NAMES])
    return kept | ({"...": len(counts) - MOST_NAMES} if len(counts) > MOST_NAMES else {})
