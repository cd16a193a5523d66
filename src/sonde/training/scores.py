"""Collect scores sample by sample, aggregate them, and write them as strict JSON.

{"aggregated":    {"accuracy": 0.97},
 "per_datapoint": {"accuracy": [1.0, 0.0, ...]},
 "ids":           [0, 1, ...],            the samples, in the order of the lists above
 "directions":    {"accuracy": 1},
 "captures":      {"complete": false,     only where captures are missing, or a debugger failed
                   "missing": [7],        samples without a capture
                   "failed": {"gradcam": [3]}, "errors": {"gradcam": "ValueError: ..."}}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sonde import strict_json
from sonde.errors import OptionError
from sonde.training.datapoints import SampleId
from sonde.training.metrics import aggregate, directions_of


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of an evaluation."""

    aggregated: dict[str, Any]
    per_datapoint: dict[str, list[Any]]
    ids: list[SampleId] = field(default_factory=list)
    directions: dict[str, int] = field(default_factory=dict)
    captures: dict[str, Any] = field(default_factory=dict)
    """What is missing from the captures; empty if they are complete, or nothing was captured."""

    def write(self, path: Path) -> None:
        """Write the scores, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: getattr(self, name) for name in self.__slots__}
        if not self.captures:
            del plain["captures"]
        strict_json.write(path, plain)

    @classmethod
    def read(cls, path: Path) -> Scores:
        """Read what `write` wrote.

        Raises:
            RunDamaged: The file holds something else.
            OSError: It cannot be read.

        """
        plain = strict_json.read_object(path)
        aggregated = {name: _number(value) for name, value in plain.get("aggregated", {}).items()}
        lists = {name: _number(values) for name, values in plain.get("per_datapoint", {}).items()}
        ids, directions, captures = plain.get("ids", []), plain.get("directions", {}), plain.get("captures", {})
        return cls(aggregated, lists, ids, directions, captures)

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Return the aggregated scores as single numbers; lists become `name[0]`, `name[1]` and so on."""
        numbers: dict[str, float] = {}
        for name, value in self.aggregated.items():
            if isinstance(value, list):
                numbers.update((f"{prefix}{name}[{index}]", each) for index, each in enumerate(value))
            else:
                numbers[f"{prefix}{name}"] = value
        return numbers

    def worst(self, name: str, most: int = 5) -> list[tuple[SampleId, float]]:
        """Return the samples that score worst by a metric, the worst first; NaN is worse than any number."""
        sign = self.directions.get(name, 1)
        pairs = zip(self.ids, self.per_datapoint.get(name, []), strict=True)
        ranked = sorted(pairs, key=lambda pair: -math.inf if math.isnan(pair[1]) else sign * pair[1])
        return ranked[:most]


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value)  # what is not finite is written as "nan", "inf" or "-inf"


class ScoreBook:
    """Collects the scores of samples, in any order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._scores: dict[SampleId, dict[str, Any]] = {}

    def add(self, ids: Sequence[SampleId], scores: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take the scores of a batch, and return them sample by sample.

        Raises:
            OptionError: A metric did not return one score for each sample, or two samples have the same id.

        """
        lists = {name: _one_each(name, values, len(ids)) for name, values in scores.items()}
        rows = [{name: values[row] for name, values in lists.items()} for row in range(len(ids))]
        for sample, each in zip(ids, rows, strict=True):
            if sample in self._scores:
                raise OptionError(
                    f"Two samples have the id {sample!r}; scores and captures need unique ids. "
                    "Check meta_info['idx'] of the dataset."
                )
            self._scores[sample] = each
        return rows

    def close(self) -> Scores:
        """Return all scores, in the order of the ids."""
        ids = sorted(self._scores, key=lambda sample: (isinstance(sample, str), sample))
        names = dict.fromkeys(name for row in self._scores.values() for name in row)
        lists = {name: [self._scores[sample].get(name, math.nan) for sample in ids] for name in names}
        aggregated = aggregate(self._metric, lists) if ids else {}
        return Scores(aggregated, lists, ids, dict(directions_of(self._metric)))


def _one_each(name: str, values: Any, size: int) -> list[Any]:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu()
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        values = [values]
    if len(values) != size:
        raise OptionError(
            f"The metric returned {len(values)} value(s) of {name!r} for {size} samples; return one for each sample."
        )
    return [_number(list(each)) if isinstance(each, list | tuple) else float(each) for each in values]
