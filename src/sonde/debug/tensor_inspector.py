"""The tensor inspector: looks at tensors one by one, remembers the last ones, and says what is odd about them."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from numpy.typing import NDArray

from sonde.arguments import whole_number
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
    to_plain,
)
from sonde.errors import OptionError

AlertSeverity = Literal["info", "warning", "critical"]

EXTREME_VALUE: Final = 1e10
VANISHING_NORM: Final = 1e-8
EXPLODING_NORM: Final = 100.0
_MAX_ALERTS: Final = 1000
_MAX_EVENTS: Final = 32
_MAX_RELATIVES: Final = 1000
_KEPT_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAlert:
    """Something odd about a tensor."""

    id: str
    name: str
    kind: Literal["nan", "inf", "extreme_value", "vanishing_gradient", "exploding_gradient", "drift"]
    severity: AlertSeverity
    message: str
    timestamp: float


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
    """Its life: when what happened, the creation first."""
    alerts: list[TensorAlert] = field(default_factory=list)


class TensorInspector:
    """Inspects tensors, arrays and lists.

    Args:
        max_tracked_tensors: How many inspections are remembered; the oldest go first.
        max_kept_bytes: How much memory copies of the tensors may take, so that they can be compared later.
        on_alert: Called with every alert.
        clock: Tells the time.

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        whole_number("max_tracked_tensors", max_tracked_tensors)
        self.max_tracked_tensors = max_tracked_tensors
        self.monitoring = True
        self.num_inspected = 0
        self.num_evicted = 0
        self._max_kept_bytes = max_kept_bytes
        self._kept_bytes = 0
        self._on_alert = on_alert
        self._clock = clock
        self._numbers = itertools.count(1)
        self._infos: OrderedDict[str, TensorInfo] = OrderedDict()
        self._copies: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._series: OrderedDict[str, MeanSeries] = OrderedDict()
        self._alerts: deque[TensorAlert] = deque(maxlen=_MAX_ALERTS)

    # ------------------------------------------------------------------ looking

    def inspect_tensor(
        self, tensor: Any, name: str, layer: str | None = None, operation: str | None = None, *, describe: bool = True
    ) -> str:
        """Look at a tensor and return the id of this look; looks of one name make a time series.

        `describe=False` leaves out histogram, percentiles and outliers, which cost a sort.
        """
        array = as_array(tensor, f"inspect_tensor({name!r})")
        now = self._clock()
        info = TensorInfo(
            id=f"tensor-{next(self._numbers)}",
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
        stats = info.stats
        if stats.mean is not None:
            self.update_time_series(name, stats.mean, stats.std)
        if self.monitoring:
            self._check_values(info)
            self._check_drift(info)
        return info.id

    def inspect_gradients(self, tensor_id: str, gradients: Any) -> TensorStats:
        """Look at the gradient of a tensor that was inspected."""
        info = self._info(tensor_id)
        stats = info.gradient_stats = compute_stats(as_array(gradients, "inspect_gradients"))
        norm = stats.l2_norm
        if stats.nan_count or stats.inf_count:
            self._alert(info, "nan" if stats.nan_count else "inf", "critical", "its gradient is not finite")
        elif norm is not None and norm < VANISHING_NORM:
            self._alert(info, "vanishing_gradient", "warning", f"gradient norm {norm:.3g} < {VANISHING_NORM:g}")
        elif norm is not None and norm > EXPLODING_NORM:
            self._alert(info, "exploding_gradient", "critical", f"gradient norm {norm:.3g} > {EXPLODING_NORM:g}")
        return stats

    def compare_tensors(self, first: str, second: str) -> TensorComparison:
        """Compare two inspected tensors element by element.

        Raises:
            OptionError: One is not remembered any more, its copy had to go, or their shapes differ.

        """
        return compare_arrays(self._copy(first), self._copy(second))

    # ------------------------------------------------------------------ asking

    def get_tensor_info(self, tensor_id: str) -> TensorInfo | None:
        """Return what is known of a look; None if it is not remembered any more."""
        return self._infos.get(tensor_id)

    def get_all_tensors(self) -> list[TensorInfo]:
        """Return all remembered looks, the oldest first."""
        return list(self._infos.values())

    def get_tensors_by_layer(self, layer: str) -> list[TensorInfo]:
        """Return the remembered looks at a layer."""
        return [info for info in self._infos.values() if info.layer == layer]

    def get_alerts(self) -> list[TensorAlert]:
        """Return the last alerts, the oldest first."""
        return list(self._alerts)

    def get_time_series(self, name: str) -> list[tuple[float, float, float]]:
        """Return time, mean and standard deviation (NaN if not known) of the looks of a name."""
        series = self._series.get(name)
        return [] if series is None else [(when, mean, std) for when, mean, std in series.points().tolist()]

    def memory_usage(self) -> int:
        """Return the bytes that copies of tensors take."""
        return self._kept_bytes

    # ------------------------------------------------------------------ noting

    def enable_monitoring(self, enabled: bool = True) -> None:
        """Say whether inspected tensors are checked for oddities."""
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
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = MeanSeries(name)
        series.add(self._clock(), mean, std)
        self._series.move_to_end(name)
        while len(self._series) > self.max_tracked_tensors:
            self._series.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        for store in (self._infos, self._copies, self._series):
            store.clear()
        self._alerts.clear()
        self._kept_bytes = 0

    # ------------------------------------------------------------------ conclusions

    def drift(self, name: str) -> Drift | None:
        """Say how far the mean of a name has moved; None below ten looks."""
        series = self._series.get(name)
        return None if series is None else series.drift()

    def perform_advanced_analysis(self, tensor_id: str) -> dict[str, Any]:
        """Return everything about a look: statistics, distribution, drift of its name, family and life."""
        info = self._info(tensor_id)
        drift = self.drift(info.name)
        return {
            "stats": to_plain(info.stats),
            "distribution": None if info.distribution is None else to_plain(info.distribution),
            "gradient": None if info.gradient_stats is None else to_plain(info.gradient_stats),
            "drift": None if drift is None else to_plain(drift),
            "parents": list(info.parents),
            "children": list(info.children),
            "events": [{"timestamp": when, "event": what} for when, what in info.events],
            "alerts": [to_plain(alert) for alert in info.alerts],
        }

    def detect_advanced_anomalies(self) -> list[Drift]:
        """Return the names that have drifted."""
        found = (series.drift() for series in self._series.values())
        return [drift for drift in found if drift is not None and drift.drifted]

    def generate_report(self) -> dict[str, Any]:
        """Return everything in short, for JSON."""
        alerts = self.get_alerts()
        return {
            "total_inspected": self.num_inspected,
            "total_tracked": len(self._infos),
            "evicted": self.num_evicted,
            "memory_bytes": self._kept_bytes,
            "tensors_with_nan": sum(info.stats.nan_count > 0 for info in self._infos.values()),
            "tensors_with_inf": sum(info.stats.inf_count > 0 for info in self._infos.values()),
            "drifting": [to_plain(drift) for drift in self.detect_advanced_anomalies()],
            "alerts": [to_plain(alert) for alert in alerts],
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
        if stats.infinity_norm is not None and stats.infinity_norm > EXTREME_VALUE:
            self._alert(info, "extreme_value", "warning", f"largest magnitude {stats.infinity_norm:.3g}")

    def _check_drift(self, info: TensorInfo) -> None:
        series = self._series.get(info.name)
        # A drift takes many looks; asking at each of them would cost more than the looks.
        if series is None or series.told or series.total % DRIFT_POINTS:
            return
        drift = series.drift()
        if drift is not None and drift.drifted:
            series.told = True
            self._alert(info, "drift", "info", f"its mean moved from {drift.first:.3g} to {drift.last:.3g}")

    def _alert(self, info: TensorInfo, kind: Any, severity: AlertSeverity, what: str) -> None:
        place = f" in {info.layer}" if info.layer else ""
        alert = TensorAlert(
            id=info.id,
            name=info.name,
            kind=kind,
            severity=severity,
            message=f"{info.name}{place}: {what}",
            timestamp=self._clock(),
        )
        info.alerts.append(alert)
        self._alerts.append(alert)
        if self._on_alert is not None:
            self._on_alert(alert)
