"""What a report shows, before it is Markdown or HTML: a verdict, and sections with a table each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sonde.pytorch_debugging.events import ROUTINE, is_trouble

MOST_ROWS: Final = 60
Mood = Literal["well", "trouble"]
_TROUBLE: Final = ("nan_detections", "inf_detections", "gradient_explosions", "gradient_vanishing")
_QUIET: Final = ("debug_mode", "profiler_active")


@dataclass(slots=True, kw_only=True)
class Section:
    """A heading, a sentence, a table and perhaps a curve."""

    title: str
    note: str = ""
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    curves: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Page:
    """A report as a reader goes through it."""

    title: str
    verdict: str
    mood: Mood
    made: str
    sections: list[Section]


def compose(report: dict[str, Any]) -> Page:
    """Arrange a report for reading; sections with nothing to show are left out."""
    verdict, mood = _verdict(report)
    sections = [
        _findings(report),
        _violations(report),
        _gradients(report),
        _performance(report),
        _parameters(report),
        _layers(report),
        _memory(report),
        _events(report),
        _summary(report),
    ]
    shown = [section for section in sections if section.rows or section.curves]
    return Page(title="Debug report", verdict=verdict, mood=mood, made=str(report["timestamp"])[:19], sections=shown)


def _verdict(report: dict[str, Any]) -> tuple[str, Mood]:
    summary = report["debug_summary"]
    found = [f"{summary[name]:,} {name.replace('_', ' ')}" for name in _TROUBLE if summary[name]]
    if summary["anomaly_detected"]:
        found.insert(0, "an anomaly")
    kinds = [each["kind"].replace("_", " ") for each in report["findings"] if each["severity"] != "info"]
    found += kinds[:3]
    leaks = sum(event["event_type"] == "memory_leak_detected" for event in report["debug_events"])
    found += [f"{leaks} memory leak{'s' if leaks != 1 else ''}"] if leaks else []
    if not found:
        return f"Nothing wrong was seen in {summary['debug_events_count']:,} events.", "well"
    first = next((event for event in report["debug_events"] if is_trouble(event)), None)
    begun = f" First: {first['message']}" if first else ""
    return f"Seen: {', '.join(found)}.{begun}", "trouble"


def _findings(report: dict[str, Any]) -> Section:
    rows = [
        (
            str(each["step"]),
            each["severity"],
            each["kind"].replace("_", " "),
            ", ".join(each["sites"][:3]),
            each["cause"],
            each["fix"],
        )
        for each in report["findings"][:MOST_ROWS]
    ]
    return Section(title="Findings", columns=("step", "severity", "kind", "where", "cause", "cure"), rows=rows)


def _violations(report: dict[str, Any]) -> Section:
    entries = report["gradient_violations"]
    rows = [
        (_time(entry), entry["event_type"].replace("_", " "), entry["message"]) for entry in _ends(entries, MOST_ROWS)
    ]
    total = report["debug_summary"]["gradient_violations_count"]
    return Section(
        title="Gradient violations", note=_shown(len(rows), total), columns=("time", "kind", "what"), rows=rows
    )


def _gradients(report: dict[str, Any]) -> Section:
    by_name = report["gradients"].get("by_name", {})
    ordered = sorted(by_name.items(), key=lambda item: -_as_number(item[1].get("norm")))
    rows = [
        (name, number(each.get("norm")), str(each.get("nan", "")), str(each.get("inf", "")))
        for name, each in ordered[:MOST_ROWS]
        if isinstance(each, dict)
    ]
    norm = report["gradients"].get("gradient_norm")
    note = f"Total norm {number(norm)}. {_shown(len(rows), len(by_name))}" if by_name else ""
    return Section(
        title="Gradients at the last check", note=note, columns=("parameter", "norm", "NaN", "Inf"), rows=rows
    )


def _performance(report: dict[str, Any]) -> Section:
    rows, curves = [], {}
    for name, each in report["performance"].items():
        spread = (number(each.get(key)) for key in ("last", "mean", "min", "max"))
        rows.append((name.replace("_", " "), f"{each['count']:,}", *spread))
        curves[name.replace("_", " ")] = [_as_number(value) for value in each["values"]]
    return Section(
        title="Curves and times", columns=("what", "count", "last", "mean", "min", "max"), rows=rows, curves=curves
    )


def _parameters(report: dict[str, Any]) -> Section:
    ranges = report["parameters"].get("parameter_ranges", {})
    rows = [
        (name, *(number(each.get(key)) for key in ("min", "max", "mean", "std")))
        for name, each in list(ranges.items())[:MOST_ROWS]
        if isinstance(each, dict)
    ]
    counts = [
        f"{report['parameters'][name]:,} {name.partition('_')[0]}"
        for name in report["parameters"]
        if _is_count(report, name)
    ]
    note = f"Elements: {', '.join(counts)}. {_shown(len(rows), len(ranges))}" if ranges else ""
    return Section(
        title="Parameters at the last check", note=note, columns=("parameter", "min", "max", "mean", "std"), rows=rows
    )


def _is_count(report: dict[str, Any], name: str) -> bool:
    return isinstance(report["parameters"][name], int)


def _layers(report: dict[str, Any]) -> Section:
    calls = report["layer_calls"]
    rows = [
        (
            name,
            str(call["class"]),
            _shapes(call["inputs"]),
            _shapes(call["outputs"]),
            number(_first(call["outputs"], "mean")),
            number(_first(call["outputs"], "std")),
            str(sum(each.get("nan", 0) + each.get("inf", 0) for each in call["outputs"]) or ""),
            number(call["time_ms"]),
            size(call["output_bytes"]),
        )
        for name, call in list(calls.items())[:MOST_ROWS]
        if isinstance(call, dict)
    ]
    return Section(
        title="Layers in the last forward pass",
        note=_shown(len(rows), len(calls)),
        columns=("layer", "class", "inputs", "outputs", "mean", "std", "not finite", "ms", "memory"),
        rows=rows,
    )


def _memory(report: dict[str, Any]) -> Section:
    snapshots = [each for each in _ends(report["memory_snapshots"], 20) if isinstance(each, dict)]
    names = [
        name
        for name in ("rss", "cpu_memory_available", "cuda_allocated", "cuda_reserved", "cuda_max_allocated")
        if any(name in each for each in snapshots)
    ]
    rows = [tuple(size(each.get(name)) for name in names) for each in snapshots]
    total = report["debug_summary"]["memory_snapshots_count"]
    columns = tuple(name.replace("_", " ") for name in names)
    return Section(title="Memory", note=_shown(len(rows), total), columns=columns, rows=rows if names else [])


def _events(report: dict[str, Any]) -> Section:
    events = report["debug_events"]
    special = [each for each in events if each["event_type"] not in ROUTINE] or events
    rows = [(_time(each), each["event_type"], each["message"]) for each in _ends(special, MOST_ROWS)]
    kinds = Counter(each["event_type"] for each in events).most_common(6)
    note = f"{len(rows)} of {report['debug_summary']['debug_events_count']:,} events, without what every step says. "
    note += "Most frequent: " + ", ".join(f"{kind} ({count:,})" for kind, count in kinds) + "." if kinds else ""
    return Section(title="Timeline", note=note, columns=("time", "event", "what"), rows=rows)


def _summary(report: dict[str, Any]) -> Section:
    rows = [(name.replace("_", " "), str(value)) for name, value in report["debug_summary"].items()]
    if report["run"]:
        rows.append(("run", str(report["run"])))
    if report["rank"]:
        rows.append(("rank", str(report["rank"])))
    return Section(title="Summary", columns=("what", "value"), rows=rows)


def number(value: Any) -> str:
    """Write a number in few characters; what is not known is a dash.

    >>> number(0.000123456), number(None), number("nan"), number(12)
    ('0.0001235', '-', 'nan', '12')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def size(value: Any) -> str:
    """Write bytes as people read them.

    >>> size(2048), size(None)
    ('2.0 KiB', '-')
    """
    if not isinstance(value, int | float):
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return ""


def _shapes(tensors: list[Any]) -> str:
    return ", ".join(f"{'x'.join(map(str, each['shape'])) or 'scalar'} {each['dtype']}" for each in tensors[:3])


def _first(tensors: list[Any], key: str) -> Any:
    return tensors[0].get(key) if tensors else None


def _ends(items: list[Any], most: int) -> list[Any]:
    """Return the items, or if they are too many the first third and the last of them."""
    return items if len(items) <= most else [*items[: most // 3], *items[-(most - most // 3) :]]


def _shown(shown: int, total: int) -> str:
    return f"The first and last {shown} of {total:,}." if 0 < shown < total else ""


def _time(entry: dict[str, Any]) -> str:
    return str(entry["timestamp"])[11:19]


def _as_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | str) else float("nan")
