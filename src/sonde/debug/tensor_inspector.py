"""The tensor inspector: looks at tensors one by one, remembers the last ones, and reports what is wrong with them."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sonde.core.arguments import whole_number
from sonde.core.robust import growth
from sonde.debug.alerts import AlertBook, TensorAlert, make_finding
from sonde.debug.numbers import as_array
from sonde.debug.tensor_stats import (
    DRIFT_POINTS,
    Drift,
    MeanSeries,
    TensorComparison,
    TensorDistribution,
    TensorStats,
    compare_arrays,
    compute_distribution,
    compute_stats,
)
from sonde.diagnosis.judgement import gradient_now, output_now
from sonde.errors import OptionError
from sonde.records import Severity

_MAX_EVENTS: Final = 32
_MAX_RELATIVES: Final = 1000
_MAX_COUNTS: Final = 200
_KEPT_BYTES: Final = 256 << 20
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class TensorInfo:
    """A tensor that was inspected."""

    id: str
    name: str
    layer: str | None
    operation: str | None
    timestamp: float
    stats: TensorStats
    distribution: TensorDistribution | None
    gradient_stats: TensorStats | None = None
    parents: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """What happened to it, and when; the creation comes first."""
    alerts: list[TensorAlert] = field(default_factory=list)


@dataclass(slots=True)
class _Living:
    """The inspected tensors of one name that the program still holds."""

    bytes_of: dict[int, int] = field(default_factory=dict)
    refs: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    counts: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_COUNTS))
    reported: bool = False

    def add(self, tensor: Any, size: int) -> None:
        number = id(tensor)
        known = self.refs.get(number)
        if known is None or known() is not tensor:
            self.bytes_of[number] = size
            self.refs[number] = weakref.ref(tensor, lambda ref: self._forget(number, ref))
        self.counts.append(len(self.refs))

    def _forget(self, number: int, ref: weakref.ref[Any]) -> None:
        if self.refs.get(number) is ref:
            del self.refs[number], self.bytes_of[number]

    def grows(self) -> bool:
        """Return whether more and more of them are held."""
        counts = np.array(self.counts, np.float64)
        return growth(np.arange(len(counts), dtype=np.float64), counts).steady


class TensorInspector:
    """Inspects tensors, arrays and lists.

    Args:
        max_tracked_tensors: How many inspections are remembered; the oldest are dropped first.
        max_kept_bytes: How much memory copies of the tensors may take, so that they can be compared later.
        on_alert: Called with every alert.
        accepts: Called with what is passed in and its layer; returns whether to look at it.
        clock: Returns the time.

    Example:
        inspector = TensorInspector()
        first = inspector.inspect_tensor([1.0, 2.0], "weights")
        second = inspector.inspect_tensor([1.0, 2.5], "weights")
        inspector.compare_tensors(first, second).max_absolute_difference  # 0.5

    """

    def __init__(
        self,
        max_tracked_tensors: int = 1000,
        *,
        max_kept_bytes: int = _KEPT_BYTES,
        on_alert: Callable[[TensorAlert], None] | None = None,
        accepts: Callable[[str, str | None], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_tracked_tensors = whole_number("max_tracked_tensors", max_tracked_tensors)
        self.monitoring = True
        self.num_inspected = 0
        self.num_skipped = 0
        self.num_evicted = 0
        self.step_now: Callable[[], int] = int
        """Returns the current step, where it is known; else 0."""
        self._max_kept_bytes = max_kept_bytes
        self._kept_bytes = 0
        self._accepts = accepts or (lambda what, layer: True)
        self._clock = clock
        self._numbers = itertools.count(1)
        self._infos: OrderedDict[str, TensorInfo] = OrderedDict()
        self._copies: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._series: OrderedDict[str, MeanSeries] = OrderedDict()
        self._living: OrderedDict[str, _Living] = OrderedDict()
        self._gradient_norms: OrderedDict[str, deque[float]] = OrderedDict()
        self._alerts = AlertBook[TensorAlert](on_alert)

    # ------------------------------------------------------------------ looking

    def inspect_tensor(
        self, tensor: Any, name: str, layer: str | None = None, operation: str | None = None, *, describe: bool = True
    ) -> str:
        """Inspect a tensor and return the id of the inspection; those of one name make a time series.

        `describe=False` leaves out histogram, percentiles and outliers, which cost a sort. In a session that skips
        this tensor (`sampling_rate`, `layers`, `enable_tensor_inspection`) nothing is known under the id.
        """
        number = f"tensor-{next(self._numbers)}"
        if not self._accepts(f"tensor {name}", layer):
            self.num_skipped += 1
            return number
        array = as_array(tensor, f"inspect_tensor({name!r})")
        now = self._clock()
        info = TensorInfo(
            id=number,
            name=name,
            layer=layer,
            operation=operation,
            timestamp=now,
            stats=compute_stats(array),
            distribution=compute_distribution(array) if describe else None,
            events=[(now, "created")],
        )
        self.num_inspected += 1
        self._remember(info, array)
        if info.stats.mean is not None:
            self._add_to_series(name, info.stats.mean, info.stats.std, info.stats.infinity_norm)
        if self.monitoring:
            self._check_values(info)
            self._check_drift(info)
            self._check_leak(info, tensor)
        return info.id

    def inspect_gradients(self, tensor_id: str, gradients: Any) -> TensorStats:
        """Inspect the gradient of a tensor that was inspected."""
        info = self._info(tensor_id)
        stats = info.gradient_stats = compute_stats(as_array(gradients, "inspect_gradients"))
        past = _entry(self._gradient_norms, info.name, lambda: deque(maxlen=_MAX_COUNTS), self.max_tracked_tensors)
        if stats.nan_count or stats.inf_count:
            self._alert(info, "nan" if stats.nan_count else "inf", "critical", "its gradient is not finite")
        elif stats.l2_norm is not None:
            moment = gradient_now(stats.l2_norm, past, weight=info.stats.l2_norm)
            past.append(stats.l2_norm)
            if moment.verdict in ("vanishing", "exploding"):
                self._alert(info, f"{moment.verdict}_gradient", "warning", moment.words)
        return stats

    def compare_tensors(self, first: str, second: str) -> TensorComparison:
        """Compare two inspected tensors element by element.

        Raises:
            OptionError: One is not remembered any more, its copy was dropped, or their shapes differ.

        """
        return compare_arrays(self._copy(first), self._copy(second))

    # ------------------------------------------------------------------ asking

    def get_tensor_info(self, tensor_id: str) -> TensorInfo | None:
        """Return what is known of an inspection; None if it was skipped or is not remembered any more."""
        return self._infos.get(tensor_id)

    def get_all_tensors(self) -> list[TensorInfo]:
        """Return all remembered inspections, the oldest first."""
        return list(self._infos.values())

    def get_tensors_by_layer(self, layer: str) -> list[TensorInfo]:
        """Return the remembered inspections of a layer."""
        return [info for info in self._infos.values() if info.layer == layer]

    def get_values(self, tensor_id: str) -> NDArray[Any] | None:
        """Return the values of an inspected tensor; None if its copy is not kept."""
        return self._copies.get(tensor_id)

    def get_alerts(self) -> list[TensorAlert]:
        """Return the last alerts, the oldest first."""
        return self._alerts.all()

    def get_time_series(self, name: str) -> list[tuple[float, float, float]]:
        """Return time, mean and standard deviation (NaN if not known) of the inspections of a name."""
        series = self._series.get(name)
        return [] if series is None else [(when, mean, std) for when, mean, std, _ in series.points().tolist()]

    def memory_usage(self) -> int:
        """Return the bytes that copies of tensors take."""
        return self._kept_bytes

    def live_tensors(self) -> dict[str, dict[str, int]]:
        """Return by name how many of the inspected tensors the program still holds, and their bytes."""
        return {
            name: {"count": len(living.refs), "bytes": sum(living.bytes_of.values())}
            for name, living in self._living.items()
            if living.refs
        }

    # ------------------------------------------------------------------ noting

    def enable_monitoring(self, enabled: bool = True) -> None:
        """Switch the checks of inspected tensors on or off."""
        self.monitoring = enabled

    def track_dependency(self, parent: str, child: str, operation: str | None = None) -> None:
        """Note that one inspected tensor was made from another."""
        of, to = self._info(parent), self._info(child)
        if child not in of.children and len(of.children) < _MAX_RELATIVES and len(to.parents) < _MAX_RELATIVES:
            of.children.append(child)
            to.parents.append(parent)
        if operation is not None:
            to.operation = to.operation or operation

    def record_lifecycle_event(self, tensor_id: str, event: str) -> None:
        """Note what happened to an inspected tensor: `modified`, `moved`, `freed`."""
        events = self._info(tensor_id).events
        if len(events) < _MAX_EVENTS:
            events.append((self._clock(), event))

    def update_time_series(self, name: str, mean: float, std: float | None = None) -> None:
        """Add a point to the series of a name."""
        self._add_to_series(name, mean, std)

    def clear(self) -> None:
        """Forget everything."""
        for store in (self._infos, self._copies, self._series, self._living, self._gradient_norms):
            store.clear()
        self._alerts.clear()
        self._kept_bytes = 0

    # ------------------------------------------------------------------ conclusions

    def drift(self, name: str) -> Drift | None:
        """Return how far the mean of a name has moved; None below ten inspections."""
        series = self._series.get(name)
        return None if series is None else series.drift()

    def perform_advanced_analysis(self, tensor_id: str) -> dict[str, Any]:
        """Return everything about an inspection: statistics, distribution, drift of its name, relatives and events."""
        info = self._info(tensor_id)
        drift = self.drift(info.name)
        return {
            "stats": asdict(info.stats),
            "distribution": None if info.distribution is None else asdict(info.distribution),
            "gradient": None if info.gradient_stats is None else asdict(info.gradient_stats),
            "drift": None if drift is None else asdict(drift),
            "parents": list(info.parents),
            "children": list(info.children),
            "events": [{"timestamp": when, "event": what} for when, what in info.events],
            "alerts": [alert.to_json() for alert in info.alerts],
        }

    def detect_advanced_anomalies(self) -> list[Drift]:
        """Return the names that have drifted."""
        found = (series.drift() for series in self._series.values())
        return [drift for drift in found if drift is not None and drift.drifted]

    def generate_report(self) -> dict[str, Any]:
        """Return a summary as JSON-ready values."""
        return {
            "total_inspected": self.num_inspected,
            "total_tracked": len(self._infos),
            "skipped": self.num_skipped,
            "evicted": self.num_evicted,
            "memory_bytes": self._kept_bytes,
            "live_tensors": self.live_tensors(),
            "tensors_with_nan": sum(info.stats.nan_count > 0 for info in self._infos.values()),
            "tensors_with_inf": sum(info.stats.inf_count > 0 for info in self._infos.values()),
            "drifting": [asdict(drift) for drift in self.detect_advanced_anomalies()],
            "alerts": [alert.to_json() for alert in self.get_alerts()],
        }

    # ------------------------------------------------------------------ how

    def _remember(self, info: TensorInfo, array: NDArray[Any]) -> None:
        self._infos[info.id] = info
        while len(self._infos) > self.max_tracked_tensors:
            gone, _ = self._infos.popitem(last=False)
            self._drop_copy(gone)
            self.num_evicted += 1
        if array.nbytes > self._max_kept_bytes:
            return
        self._copies[info.id] = array
        self._kept_bytes += array.nbytes
        while self._kept_bytes > self._max_kept_bytes:
            self._drop_copy(next(iter(self._copies)))

    def _drop_copy(self, tensor_id: str) -> None:
        array = self._copies.pop(tensor_id, None)
        self._kept_bytes -= 0 if array is None else array.nbytes

    def _add_to_series(self, name: str, mean: float, std: float | None, largest: float | None = None) -> None:
        series = _entry(self._series, name, lambda: MeanSeries(name), self.max_tracked_tensors)
        series.add(self._clock(), mean, std, largest)

    def _info(self, tensor_id: str) -> TensorInfo:
        info = self._infos.get(tensor_id)
        if info is None:
            raise OptionError(
                f"{tensor_id!r} is not among the last {self.max_tracked_tensors} inspected tensors "
                "(max_tracked_tensors)."
            )
        return info

    def _copy(self, tensor_id: str) -> NDArray[Any]:
        info = self._info(tensor_id)
        array = self._copies.get(tensor_id)
        if array is None:
            raise OptionError(
                f"The values of {info.name!r} ({tensor_id}) are not kept any more: copies take at most "
                f"{self._max_kept_bytes >> 20} MiB (max_kept_bytes)."
            )
        return array

    def _check_values(self, info: TensorInfo) -> None:
        stats = info.stats
        if stats.nan_count:
            self._alert(info, "nan", "critical", f"{stats.nan_count} of {stats.total_elements} elements are NaN")
        if stats.inf_count:
            self._alert(info, "inf", "critical", f"{stats.inf_count} of {stats.total_elements} elements are infinite")
        if stats.infinity_norm is not None:
            moment = output_now(stats.infinity_norm, self._series[info.name].largest())
            if moment.verdict == "exploding":
                self._alert(info, "extreme_value", "warning", moment.words)

    def _check_drift(self, info: TensorInfo) -> None:
        series = self._series.get(info.name)
        # A drift takes many inspections; checking at each of them would cost more than they do.
        if series is None or series.reported or series.total % DRIFT_POINTS:
            return
        drift = series.drift()
        if drift is not None and drift.drifted:
            series.reported = True
            self._alert(info, "drift", "info", f"its mean moved from {drift.first:.3g} to {drift.last:.3g}")

    def _check_leak(self, info: TensorInfo, tensor: Any) -> None:
        """Report a name of which the program holds more and more tensors."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            return
        living = _entry(self._living, info.name, _Living, self.max_tracked_tensors)
        living.add(tensor, info.stats.memory_usage_bytes)
        if living.reported or len(living.counts) % DRIFT_POINTS or not living.grows():
            return
        living.reported = True
        held = f"{len(living.refs)} of the tensors inspected under this name are still held by the program"
        size = sum(living.bytes_of.values()) / 2**20
        self._alert(info, "leak", "warning", f"{held} ({size:.1f} MiB, and their graphs): keep .detach() or .item()")

    def _alert(self, info: TensorInfo, kind: str, severity: Severity, what: str) -> None:
        place = f" in {info.layer}" if info.layer else ""
        finding = make_finding(
            kind,
            severity,
            f"{info.name}{place}: {what}",
            step=self.step_now(),
            site=info.layer or info.name,
            id=info.id,
            name=info.name,
            timestamp=self._clock(),
        )
        alert = TensorAlert(finding)
        info.alerts.append(alert)
        self._alerts.add(alert)


def _entry(store: OrderedDict[str, T], name: str, make: Callable[[], T], most: int) -> T:
    """Return the entry of a name, made at first use; the names used longest ago are dropped."""
    entry = store.get(name)
    if entry is None:
        entry = store[name] = make()
    store.move_to_end(name)
    while len(store) > most:
        store.popitem(last=False)
    return entry
