"""The three scopes of a debugger. Each restores what it changed, however its block ends, and swallows no exception."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from sonde.forensics.nonfinite_scope import NonFinite, NonFiniteScope, collect_anomaly_traces
from sonde.parallel.ranks import suffix, this_rank
from sonde.probes.memory.scope import MemoryScope, memory_scope
from sonde.probes.profile.scope import ProfileScope, profile_scope

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger

_MAX_VERDICTS: Final = 5
_MAX_OPERATORS: Final = 10


@contextlib.contextmanager
def anomaly_scope(debugger: PyTorchDebugger) -> Iterator[NonFiniteScope]:
    """Turn on torch's anomaly mode, and search for what it does not find, until the block ends."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    scope = NonFiniteScope(lambda found: _report_nonfinite(debugger, found))
    debugger._log_debug_event("anomaly_detection_start", "Anomaly detection started")
    with collect_anomaly_traces() as traces:
        torch.set_anomaly_enabled(True, True)
        scope.open()
        try:
            yield scope
        except Exception as error:
            debugger.anomaly_detected = True
            data: dict[str, Any] = {"error": str(error), "error_type": type(error).__name__}
            data |= {"stack_trace": traceback.format_exc(), "forward_traces": traces.texts, "source": traces.source}
            at = f" Its forward operation is at {traces.source}." if traces.source else ""
            debugger._log_debug_event(
                "anomaly_detected", f"Anomaly detected: {type(error).__name__}: {error}{at}", data
            )
            raise
        finally:
            scope.close()
            torch.set_anomaly_enabled(*before)
            counts = {"sightings": scope.sightings, "spread": scope.spread}
            debugger._log_debug_event("anomaly_detection_end", "Anomaly detection ended", counts)


def _report_nonfinite(debugger: PyTorchDebugger, found: NonFinite) -> None:
    debugger._count_nonfinite("nan", bool(found.nan))
    debugger._count_nonfinite("inf", bool(found.inf))
    what = "nan" if found.nan else "inf"
    place = "parameter" if found.place == "optimizer" else found.place
    data = {name: getattr(found, name) for name in found.__slots__}
    entry = debugger._log_debug_event(f"{what}_{place}_detected", str(found), data)
    if place == "gradient":
        debugger.gradient_violations.append(entry)


@contextlib.contextmanager
def profiler_scope(debugger: PyTorchDebugger, output_file: str | Path | None, schedule: Any) -> Iterator[ProfileScope]:
    """Profile the block and write a trace that chrome://tracing and Perfetto open."""
    if output_file is None:
        output_file = debugger.log_dir / f"profile_{datetime.now():%Y%m%d_%H%M%S_%f}{suffix(this_rank())}.json"
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    debugger._log_debug_event("profiling_start", "Profiling started", {"output_file": str(path)})
    # While anomaly detection is open, most Python calls are its own: their stacks would fill the trace.
    scope = profile_scope(path, schedule=schedule, stacks="anomaly" not in debugger._open)
    try:
        with scope:
            debugger.profiler_active = True
            yield scope
    except Exception as error:
        data = {"error": str(error), "error_type": type(error).__name__, "stack_trace": traceback.format_exc()}
        debugger._log_debug_event("profiling_error", f"{type(error).__name__} while profiling: {error}", data)
        raise
    finally:
        debugger.profiler_active = False
        debugger.last_profile = data = _profile_data(scope)
        text = f": {data['verdict'][0]}" if data.get("verdict") else ""
        debugger._log_debug_event("profiling_end", f"Profiling ended{text}", data)


def _profile_data(scope: ProfileScope) -> dict[str, Any]:
    found: dict[str, Any] = {"trace_files": [str(path) for path in scope.trace_files], "notes": list(scope.notes)}
    if scope.trace_files:
        found["verdict"] = [each.text for each in scope.verdict()[:_MAX_VERDICTS]]
        found["slowest_operators"] = {
            each.name: {"calls": each.calls, "share": each.share} for each in scope.operators()[:_MAX_OPERATORS]
        }
    return found


@contextlib.contextmanager
def tracking_scope(debugger: PyTorchDebugger, **options: Any) -> Iterator[MemoryScope]:
    """Take memory snapshots before and after the block and samples at every optimizer step; report what grew."""
    debugger._log_debug_event("memory_tracking_start", "Memory tracking started")
    notes = debugger._notes
    scope = memory_scope(**{"own_bytes": lambda: notes.held_bytes} | options)
    try:
        with scope:
            debugger.memory_snapshots.append(_dated(scope.before))
            yield scope
    finally:
        debugger.memory_snapshots.append(_dated(scope.after))
        debugger.memory_statistics = scope.statistics()
        _report_memory(debugger, scope)


def _report_memory(debugger: PyTorchDebugger, scope: MemoryScope) -> None:
    change = scope.change()
    data = {"difference": change, "steps": scope.steps, "statistics": scope.statistics()}
    debugger._log_debug_event("memory_tracking_end", f"Memory tracking ended: {_changes(change)}", data)
    for leak in scope.leaks():
        about = {"place": leak.place, "bytes_per_step": leak.growth.per_step, "phase": leak.phase}
        about["lines"] = [str(line) for line in leak.lines]
        debugger._log_debug_event("memory_leak_detected", leak.text, about)
    for kept in scope.kept():
        about = {"place": kept.place, "bytes": kept.bytes, "lines": [str(line) for line in kept.lines]}
        debugger._log_debug_event("excessive_memory_detected", kept.text, about)


def _changes(change: Mapping[str, float]) -> str:
    text = [f"{name} {change[name] / 2**20:+.1f} MiB" for name in ("rss", "cuda_allocated") if name in change]
    return ", ".join(text) or "the system reports no numbers"


def _dated(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot with its time as text, as events have it."""
    seconds = snapshot.get("timestamp")
    return dict(snapshot) | ({"timestamp": datetime.fromtimestamp(seconds).isoformat()} if seconds is not None else {})
