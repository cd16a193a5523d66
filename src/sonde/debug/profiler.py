"""The profiler of a session: timers, layer times and memory, and what limits the speed."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np

from sonde.debug.alerts import PerformanceAlert, make_finding
from sonde.diagnosis.judgement import Curves, judge_curves
from sonde.diagnosis.rules.loading import WAIT_SECONDS, WAIT_STEPS
from sonde.errors import OptionError
from sonde.probes.profile.advice import judge_phases, outstanding

_KEPT: Final = 1000
_MAX_NAMES: Final = 10_000
_STEP: Final = "step"
"""The timer that holds whole steps; those of its phases have their own names."""


@dataclass(slots=True)
class Timing:
    """Durations of one name, in seconds. The last thousand are kept."""

    name: str
    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, seconds: float) -> None:
        """Add a duration."""
        if not seconds >= 0:
            raise OptionError(f"{self.name!r} cannot have taken {seconds!r} seconds; give a number of at least 0.")
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)
        self.recent.append(seconds)

    def summary(self) -> dict[str, Any]:
        """Return the durations in numbers."""
        recent = np.array(self.recent)
        return {
            "count": self.count,
            "total": self.total,
            "mean": self.total / self.count if self.count else None,
            "median": float(np.median(recent)) if len(recent) else None,
            "p95": float(np.percentile(recent, 95)) if len(recent) else None,
            "longest": self.longest,
        }


@dataclass(slots=True)
class LayerProfile:
    """A layer's times, memory and size."""

    name: str
    layer_type: str
    forward: Timing
    backward: Timing
    memory: int | None = None
    parameters: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Where time or memory goes."""

    kind: Literal["layer", "operation", "phase", "memory"]
    name: str
    severity: Literal["warning", "critical"]
    share: float
    """Of the time of all layers, of all operations, or of the step; for memory: how many times it has grown."""
    message: str
    """What was measured."""
    suggestion: str
    """What to do, why, and what it gains at most."""
    gain: float | None = None
    """Share of the measured time that can be saved at most; None if that is not known."""

    def alert(self, step: int) -> PerformanceAlert:
        """Return it as an alert of a step."""
        return PerformanceAlert(make_finding(self.kind, "warning", self.message, step=step, fix=self.suggestion))


class Profiler:
    """Collects times and finds bottlenecks.

    Example:
        profiler = Profiler()
        profiler.start_timer("layer_forward")
        seconds = profiler.end_timer("layer_forward")

    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: dict[str, float] = {}
        self._timers: OrderedDict[str, Timing] = OrderedDict()
        self._layers: OrderedDict[str, LayerProfile] = OrderedDict()
        self._operations: OrderedDict[str, Timing] = OrderedDict()
        self._inferences: deque[dict[str, float]] = deque(maxlen=_KEPT)
        self._memory: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    # ------------------------------------------------------------------ recording

    def start_timer(self, name: str) -> None:
        """Start a timer; a timer that runs is restarted."""
        self._running[name] = self._clock()

    def end_timer(self, name: str) -> float:
        """End a timer and return its seconds.

        Raises:
            OptionError: It was not started.

        """
        began = self._running.pop(name, None)
        if began is None:
            running = ", ".join(self._running) or "none"
            raise OptionError(f"The timer {name!r} was not started (running: {running}).")
        seconds = self._clock() - began
        _timing(self._timers, name).add(seconds)
        return seconds

    def record_time(self, name: str, seconds: float) -> None:
        """Add a time that was measured elsewhere to a timer. A session does so with the phases of steps."""
        _timing(self._timers, name).add(seconds)

    def record_layer_execution(
        self,
        name: str,
        layer_type: str,
        forward_time: float,
        backward_time: float | None = None,
        memory_usage: int | None = None,
        parameter_count: int | None = None,
    ) -> None:
        """Record the times of a layer, in seconds, with its memory and size where they are known."""
        profile = self._layers.get(name)
        if profile is None:
            if len(self._layers) >= _MAX_NAMES:
                self._layers.popitem(last=False)
            profile = self._layers[name] = LayerProfile(name, layer_type, Timing(name), Timing(name))
        profile.forward.add(float(forward_time))
        if backward_time is not None:
            profile.backward.add(float(backward_time))
        profile.memory = memory_usage if memory_usage is not None else profile.memory
        profile.parameters = parameter_count if parameter_count is not None else profile.parameters

    def record_tensor_operation(self, name: str, duration: float) -> None:
        """Record the duration of an operation, in seconds."""
        _timing(self._operations, name).add(float(duration))

    def record_model_inference(self, batch_size: int, duration: float, tokens: int | None = None) -> None:
        """Record the duration of a whole inference, in seconds."""
        found = {"batch_size": float(batch_size), "duration": float(duration)}
        self._inferences.append(found if tokens is None else found | {"tokens": float(tokens)})

    def record_memory(self, megabytes: float) -> None:
        """Record how much memory the process holds now."""
        self._memory.append((self._clock(), float(megabytes)))

    # ------------------------------------------------------------------ asking

    def clear(self) -> None:
        """Forget everything but the timers that run."""
        for store in (self._timers, self._layers, self._operations, self._inferences, self._memory):
            store.clear()

    def get_statistics(self) -> dict[str, dict[str, Any]]:
        """Return every timer in numbers."""
        return {name: timing.summary() for name, timing in self._timers.items()}

    def get_layer_profiles(self) -> dict[str, dict[str, Any]]:
        """Return every layer in numbers, the slowest first."""
        layers = sorted(self._layers.values(), key=lambda layer: -(layer.forward.total + layer.backward.total))
        return {
            layer.name: {
                "type": layer.layer_type,
                "forward": layer.forward.summary(),
                "backward": layer.backward.summary() if layer.backward.count else None,
                "memory": layer.memory,
                "parameters": layer.parameters,
            }
            for layer in layers
        }

    def throughput(self) -> dict[str, float] | None:
        """Return samples (and tokens, if known) per second over the inferences; None before any."""
        time_spent = sum(each["duration"] for each in self._inferences)
        if not time_spent:
            return None
        found = {"samples_per_second": sum(each["batch_size"] for each in self._inferences) / time_spent}
        if all("tokens" in each for each in self._inferences):
            found["tokens_per_second"] = sum(each["tokens"] for each in self._inferences) / time_spent
        return found

    def analyze_performance(self) -> list[Bottleneck]:
        """Return where the time goes and whether memory grows, the worst first."""
        found = [*self._slow_layers(), *self._slow_operations(), *self._slow_phases(), *self._growing_memory()]
        return sorted(found, key=lambda bottleneck: -bottleneck.share)

    def suggestions(self) -> list[str]:
        """Return what to do about the bottlenecks."""
        return [bottleneck.suggestion for bottleneck in self.analyze_performance()]

    def generate_report(self) -> dict[str, Any]:
        """Return a summary as JSON-ready values."""
        return {
            "timers": self.get_statistics(),
            "layers": self.get_layer_profiles(),
            "operations": {name: timing.summary() for name, timing in self._operations.items()},
            "throughput": self.throughput(),
            "memory_mb": [megabytes for _, megabytes in self._memory],
            "bottlenecks": [asdict(bottleneck) for bottleneck in self.analyze_performance()],
        }

    # ------------------------------------------------------------------ how

    def _slow_layers(self) -> list[Bottleneck]:
        times = {layer.name: layer.forward.total + layer.backward.total for layer in self._layers.values()}
        return [
            _slow("layer", name, times, f"Look into {name} ({self._layers[name].layer_type}) first.")
            for name in outstanding(times)
        ]

    def _slow_operations(self) -> list[Bottleneck]:
        times = {name: timing.total for name, timing in self._operations.items()}
        advice = "Call {} less often, on larger batches, or in a lower precision."
        return [_slow("operation", name, times, advice.format(name)) for name in outstanding(times)]

    def _slow_phases(self) -> list[Bottleneck]:
        """Judge the phases of a step as a profile does, unless steps are too few or too short for the doctor."""
        step = self._timers.get(_STEP)
        if step is None or step.count < WAIT_STEPS or step.total / step.count < WAIT_SECONDS:
            return []
        shares = {name: timing.total / step.total for name, timing in self._timers.items() if name != _STEP}
        milliseconds = 1e3 * step.total / step.count
        return [
            Bottleneck(
                kind="phase",
                name=verdict.kind,
                severity="warning",
                share=(share := shares[verdict.kind]),
                message=verdict.text,
                suggestion=f"{verdict.text} {_gain(share, milliseconds, 'A step')}",
                gain=share,
            )
            for verdict in judge_phases(shares, step_ms=milliseconds, workers=None)
        ]

    def _growing_memory(self) -> list[Bottleneck]:
        values = [megabytes for _, megabytes in self._memory]
        curves = Curves(scalars={"process.rss": [megabytes * 2**20 for megabytes in values]})
        return [
            Bottleneck(
                kind="memory",
                name="process",
                severity="warning",
                share=values[-1] / values[0],
                message=f"memory grew from {values[0]:.0f} to {values[-1]:.0f} MB over {len(values)} looks",
                suggestion=f"{finding.cause} {finding.fix}",
            )
            for finding in judge_curves(curves).findings
        ]


def _timing(timings: OrderedDict[str, Timing], name: str) -> Timing:
    if name not in timings and len(timings) >= _MAX_NAMES:
        timings.popitem(last=False)
    return timings.setdefault(name, Timing(name))


def _slow(kind: Literal["layer", "operation"], name: str, times: dict[str, float], advice: str) -> Bottleneck:
    """Describe one that takes far more time than the others: at their pace, what is left shows what can be gained."""
    total, own, usual = sum(times.values()), times[name], statistics.median(times.values())
    share, gain = own / total, (own - usual) / total
    message = f"{name} takes {share:.0%} of the time of all {len(times)} {kind}s"
    times_usual = f", {own / usual:.1f} times the median {kind}" if usual else ""
    cause = f"It takes {own * 1e3:.3g} of {total * 1e3:.3g} ms{times_usual}."
    return Bottleneck(
        kind=kind,
        name=name,
        severity="critical" if share > 0.5 else "warning",
        share=share,
        message=message,
        suggestion=f"{advice} {cause} {_gain(gain, total * 1e3, f'At its pace, all {kind}s')}",
        gain=gain,
    )


def _gain(share: float, milliseconds: float, what: str) -> str:
    left = milliseconds * (1 - share)
    faster = f": at most {milliseconds / left:.2g} times as fast" if left > 0 else ""
    return f"{what} would take {left:.3g} instead of {milliseconds:.3g} ms{faster}."
