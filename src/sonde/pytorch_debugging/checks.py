"""Checks of gradients, parameters and losses. The judgement is that of `sonde.diagnosis`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.core import schema, statistics
from sonde.core.schema import Rows
from sonde.diagnosis.judgement import Moment, gradient_now
from sonde.probes.readings import total_norm
from sonde.records import Reading
from sonde.views.terminal.style import plural

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger

MAX_NAMES: Final = 20
HALF_PRECISION_MAX: Final = float(np.finfo(np.float16).max)
"""Parameters with larger magnitudes do not fit float16."""

RowsByName = Mapping[str, Rows]


@dataclass(slots=True, kw_only=True)
class GradientReport:
    """All gradients at one moment."""

    norm: float
    """The norm of all gradients together; NaN or infinite if an element is."""
    threshold: float | None
    """The limit that the user gave; None if the norm was compared with the run's own history."""
    moment: Moment
    """The judgement on the norm, which looks at this step only."""
    rows: RowsByName = field(repr=False)

    @property
    def usual_norm(self) -> float | None:
        """The median of the norms before it; None while there are too few."""
        return self.moment.usual

    @property
    def verdict(self) -> str:
        """`non-finite`, `exploding`, `vanishing`, or `usual`."""
        return self.moment.verdict if self.moment.is_wrong else "usual"

    @property
    def readings(self) -> dict[str, Reading]:
        """The reading of each gradient."""
        return {name: Reading(row) for name, row in self.rows.items()}

    @property
    def norms(self) -> dict[str, float | None]:
        """The norm of the finite elements of each gradient; None if there are none."""
        return dict(zip(self.rows, map(_known, statistics.norm(_stacked(self.rows)).tolist()), strict=True))

    @property
    def nan(self) -> dict[str, int]:
        """Parameters whose gradient has NaN, and how many."""
        return count_nonfinite(self.rows)["nan"]

    @property
    def inf(self) -> dict[str, int]:
        """Parameters whose gradient has infinities, and how many."""
        return count_nonfinite(self.rows)["inf"]

    @property
    def zero(self) -> tuple[str, ...]:
        """Parameters whose gradient is exactly zero everywhere."""
        return tuple(name for name, row in self.rows.items() if row[schema.ZERO] == row[schema.COUNT] > 0)

    @property
    def largest(self) -> list[tuple[str, float]]:
        """The gradients with the largest norms, largest first."""
        known = [(name, norm) for name, norm in self.norms.items() if norm is not None]
        return sorted(known, key=lambda item: -item[1])[:MAX_NAMES]

    def data(self) -> dict[str, Any]:
        """Return what an event carries; long lists of names are cut and counted."""
        return {
            "gradient_norm": self.norm,
            "threshold": self.threshold,
            "usual_norm": self.usual_norm,
            "parameter_count": len(self.rows),
            "nan": _some(self.nan),
            "inf": _some(self.inf),
            "largest": dict(self.largest[:5]),
        }


def check_gradients(
    debugger: PyTorchDebugger,
    rows: RowsByName,
    threshold: float | None = None,
    *,
    step: int | None = None,
    clip_norm: float | None = None,
) -> float:
    """Judge the gradients of a step, note what is wrong with them, and return their norm.

    `step` is given for automatic checks, `clip_norm` where gradients were clipped: their norm before that.
    """
    threshold = debugger.gradient_threshold if threshold is None else threshold
    norm = total_norm(Reading(row) for row in rows.values())
    if clip_norm is not None and not clip_norm <= norm:
        norm = clip_norm
    moment = gradient_now(norm, list(debugger.gradient_norms), weight=debugger._weight_norm, high=threshold)
    found = GradientReport(norm=norm, threshold=threshold, moment=moment, rows=rows)
    debugger.last_gradients = found
    debugger.gradient_norms.append(norm)
    violations = []
    for kind, bad in count_nonfinite(rows).items():
        if bad:
            debugger._count_nonfinite(kind, len(bad))
            violations.append((f"{kind}_gradient_detected", describe_nonfinite(kind, bad, "gradient")))
    if found.verdict != "usual":
        largest = f"; largest: {found.largest[0][0]}" if math.isfinite(norm) and found.largest else ""
        exploding = found.verdict != "vanishing"  # a norm that is not finite counts too; its message says what it is
        debugger.gradient_explosions += exploding
        debugger.gradient_vanishing += not exploding
        words = moment.words[:1].upper() + moment.words[1:] + largest
        violations.append(("gradient_explosion" if exploding else "gradient_vanishing", words))
    for kind, message in violations:
        debugger.gradient_violations.append(debugger._note(kind, message, found.data(), step=step))
    return norm


def check_parameters(debugger: PyTorchDebugger, rows: RowsByName, *, step: int | None = None) -> None:
    """Note what is wrong with the parameters of a step. An automatic check reports only what has become worse."""
    debugger._parameters, debugger._weight_norm = rows, finite_norm(rows)
    before, debugger._bad_parameters = debugger._bad_parameters, {}
    bad: dict[str, Any] = count_nonfinite(rows) | {"out_of_range": out_of_range(rows, debugger.parameter_limit)}
    for kind, names in bad.items():
        debugger._bad_parameters[kind] = frozenset(names)
        if not names or (step is not None and debugger._bad_parameters[kind] == before.get(kind)):
            continue
        if kind == "out_of_range":
            message = f"{plural(len(names), 'parameter')} beyond +-{debugger.parameter_limit:g}, first {names[0]}"
            data: dict[str, Any] = {"parameters": names[:MAX_NAMES]}
        else:
            message = describe_nonfinite(kind, names, "parameter")
            data = {"parameter_name": next(iter(names)), f"{kind}_count": names}
        debugger._note(f"{kind}_parameter_detected", message, data, step=step)


def check_loss(debugger: PyTorchDebugger, value: float, *, step: int | None = None) -> None:
    """Keep the loss of a step; one that is not finite is an event."""
    debugger.losses.append(value)
    if not math.isfinite(value):
        kind, name = ("nan", "NaN") if math.isnan(value) else ("inf", "infinite")
        debugger._count_nonfinite(kind, 1)
        data = {"loss_value": value, "loss_type": "NaN" if kind == "nan" else "Inf"}
        debugger._note(f"{kind}_loss_detected", f"The loss is {name}", data, step=step)


def count_nonfinite(rows: RowsByName) -> dict[str, dict[str, int]]:
    """Return by `nan` and `inf` the tensors that have such elements, and how many."""
    found: dict[str, dict[str, int]] = {"nan": {}, "inf": {}}
    every = _stacked(rows)
    if not statistics.nonfinite(every).any():
        return found
    for name, nan, inf in zip(rows, every[:, schema.NAN].tolist(), statistics.inf(every).tolist(), strict=True):
        if nan:
            found["nan"][name] = int(nan)
        if inf:
            found["inf"][name] = int(inf)
    return found


def parameter_stats(rows: RowsByName, limit: float) -> dict[str, Any]:
    """Return the statistics of all parameters.

    Counts are of elements. `constant_parameters` and `out_of_range_parameters` are names. A constant tensor is not a
    fault by itself: the weights of norms start as ones, many biases as zeros.
    """
    every = _stacked(rows)
    constant = (every[:, schema.COUNT] > 1) & (statistics.nonfinite(every) == 0)
    constant &= every[:, schema.MIN] == every[:, schema.MAX]
    names = list(rows)
    ranges = {measure: statistics.compute(measure, every) for measure in ("min", "max", "mean", "std")}
    return {
        "total_parameters": int(every[:, schema.COUNT].sum()),
        "nan_parameters": int(every[:, schema.NAN].sum()),
        "inf_parameters": int(statistics.inf(every).sum()),
        "zero_parameters": int(every[:, schema.ZERO].sum()),
        "constant_parameters": [names[at] for at in np.flatnonzero(constant)],
        "out_of_range_parameters": out_of_range(rows, limit),
        "parameter_ranges": {
            name: {measure: _known(values[at]) for measure, values in ranges.items()} for at, name in enumerate(names)
        },
    }


def out_of_range(rows: RowsByName, limit: float) -> list[str]:
    """Return the names of tensors with an element of larger magnitude than `limit`."""
    largest = np.abs(_stacked(rows)[:, [schema.MIN, schema.MAX]]).max(axis=1)
    return [name for name, value in zip(rows, largest.tolist(), strict=True) if value > limit]


def finite_norm(rows: RowsByName) -> float:
    """Return the norm of all finite elements together."""
    return float(np.sqrt(np.nansum(statistics.norm(_stacked(rows)) ** 2)))


def counts_only(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts without the long table, for an event."""
    names = ("constant_parameters", "out_of_range_parameters")
    counts = {name: value for name, value in stats.items() if isinstance(value, int)}
    short = {name: stats[name][:MAX_NAMES] for name in names}
    return counts | short | {f"num_{name}": len(stats[name]) for name in names}


def describe_nonfinite(kind: str, bad: Mapping[str, int], what: str) -> str:
    """Return a sentence on tensors with NaN or infinities.

    >>> describe_nonfinite("nan", {"fc.weight": 3}, "gradient")
    'NaN in 1 gradient, first fc.weight (3 elements)'
    """
    first = next(iter(bad))
    return f"{ {'nan': 'NaN', 'inf': 'Inf'}[kind] } in {plural(len(bad), what)}, first {first} ({bad[first]} elements)"


def _stacked(rows: RowsByName) -> Rows:
    return np.array(list(rows.values()), np.float64).reshape(-1, schema.NUM_COLUMNS)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _some(counts: Mapping[str, int]) -> dict[str, int]:
    kept = dict(list(counts.items())[:MAX_NAMES])
    return kept | ({"...": len(counts) - MAX_NAMES} if len(counts) > MAX_NAMES else {})
