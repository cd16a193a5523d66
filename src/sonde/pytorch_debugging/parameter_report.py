"""What a check of all parameters found, by name."""

from __future__ import annotations

from typing import Any, Final

from sonde import schema
from sonde.records import Reading

LARGEST_USUAL: Final = 1e4
"""Magnitudes beyond this are out of range: weights of healthy networks stay orders of magnitude below."""


def parameter_stats(readings: dict[str, Reading], limit: float) -> dict[str, Any]:
    """Return the numbers of all parameters.

    Counts are of elements. `constant_parameters` and `out_of_range_parameters` are names; a constant is no fault by
    itself, since norms begin with ones and biases with zeros.
    """
    rows = [reading.row for reading in readings.values()]
    return {
        "total_parameters": int(sum(row[schema.COUNT] for row in rows)),
        "nan_parameters": int(sum(row[schema.NAN] for row in rows)),
        "inf_parameters": int(sum(row[schema.POS_INF] + row[schema.NEG_INF] for row in rows)),
        "zero_parameters": int(sum(row[schema.ZERO] for row in rows)),
        "constant_parameters": [name for name, reading in readings.items() if _is_constant(reading)],
        "out_of_range_parameters": [name for name, reading in readings.items() if _largest(reading) > limit],
        "parameter_ranges": {
            name: {measure: reading.get(measure) for measure in ("min", "max", "mean", "std")}
            for name, reading in readings.items()
        },
    }


def counts_only(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers without the long table, for an event."""
    names = ("constant_parameters", "out_of_range_parameters")
    counts = {name: value for name, value in stats.items() if isinstance(value, int)}
    return counts | {name: stats[name][:20] for name in names} | {f"num_{name}": len(stats[name]) for name in names}


def _is_constant(reading: Reading) -> bool:
    row = reading.row
    return bool(row[schema.COUNT] > 1 and not reading.nonfinite and row[schema.MIN] == row[schema.MAX])


def _largest(reading: Reading) -> float:
    return float(max(abs(reading.row[schema.MIN]), abs(reading.row[schema.MAX])))
