"""The report of a debugger: everything it kept, as strict JSON, Markdown or one HTML page."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sonde.core.files import claim, replacing
from sonde.errors import OptionError
from sonde.parallel.ranks import suffix, this_rank
from sonde.pytorch_debugging.events import ROUTINE, is_trouble, plain, statistics
from sonde.records import Finding, Reading
from sonde.views.document import Block, Curves, Document, Findings, Section, Table, Text, Values
from sonde.views.terminal.style import plural, short, size

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger

FORMATS: Final = ("json", "md", "html")
_SUFFIXES: Final = {".json": "json", ".md": "md", ".markdown": "md", ".html": "html", ".htm": "html"}
_BOUNDED: Final = ("debug_events", "memory_snapshots", "gradient_violations")
_MAX_ROWS: Final = 60
_SNAPSHOTS: Final = 20
_MEMORY: Final = ("rss", "cpu_memory_available", "cuda_allocated", "cuda_reserved", "cuda_max_allocated")
_COUNTERS: Final = ("nan_detections", "inf_detections", "gradient_explosions", "gradient_vanishing")


def save(debugger: PyTorchDebugger, filename: str | Path | None, format: str | None) -> Path:
    """Write the report; see `PyTorchDebugger.save_debug_report`."""
    if format is not None and format not in FORMATS:
        raise OptionError(f"format={format!r}: choose from {', '.join(FORMATS)}.")
    path = None if filename is None else Path(filename)
    format = format or _format_of(path)
    if path is None:
        name = f"debug_report_{datetime.now():%Y%m%d_%H%M%S}{suffix(this_rank())}.{format}"
        path = _claim(debugger.log_dir / name)
    debugger._notes.flush()
    content = build(debugger)
    if format == "json":
        text = json.dumps(content, indent=2, allow_nan=False)
    else:
        document = report_document(content, debugger.findings)
        text = document.to_markdown() if format == "md" else document.to_html()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=False) as file:  # in one step: a reader never sees half a report
        file.write(text.encode())
    return path


def _format_of(path: Path | None) -> str:
    if path is None or not path.suffix:
        return "json"
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(
            f"{path.name} ends in no known format: use {', '.join(_SUFFIXES)}, or say format='json', 'md' or 'html'."
        )
    return _SUFFIXES[path.suffix.lower()]


def _claim(path: Path) -> Path:
    """Create and return a path that does not exist yet: no report may replace another of the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    more = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    return claim(itertools.chain([path], more), lambda each: each.touch(exist_ok=False))


def build(debugger: PyTorchDebugger) -> dict[str, Any]:
    """Return the report as plain data. Its size is bounded: lists keep their first and last items, counts count all."""
    report = {
        "debug_summary": debugger.get_debug_summary(),
        "findings": [finding.to_json() for finding in debugger.findings],
        **{name: list(getattr(debugger, name)) for name in _BOUNDED},
        "performance": _performance(debugger),
        "profile": debugger.last_profile,
        "gradients": _gradients(debugger),
        "parameters": debugger.last_parameters,
        "layer_calls": debugger.last_forward,
        "left_out": {name: left for name in _BOUNDED if (left := getattr(debugger, name).left_out)},
        "run": None if debugger.run is None else str(debugger.run),
        "rank": this_rank(),
        "timestamp": datetime.now().isoformat(),
    }
    plain_report: dict[str, Any] = plain(report)
    return plain_report


def _performance(debugger: PyTorchDebugger) -> dict[str, Any]:
    series = {
        "forward_seconds": debugger.forward_times,
        "backward_seconds": debugger.backward_times,
        "gradient_norm": debugger.gradient_norms,
        "loss": debugger.losses,
    }
    return {
        name: {"count": kept.total, "last": kept[-1]} | statistics(Reading.of(list(kept))) | {"values": list(kept)}
        for name, kept in series.items()
        if len(kept)
    }


def _gradients(debugger: PyTorchDebugger) -> dict[str, Any]:
    found = debugger.last_gradients
    if found is None:
        return {}
    by_name: dict[str, dict[str, Any]] = {name: {"norm": norm} for name, norm in found.norms.items()}
    for kind, counts in (("nan", found.nan), ("inf", found.inf)):
        for name, number in counts.items():
            by_name[name][kind] = number
    return found.data() | {"zero": list(found.zero), "by_name": by_name}


# ------------------------------------------------------------------ for people


def report_document(report: dict[str, Any], findings: Sequence[Finding] = ()) -> Document:
    """Arrange a report for reading: what is wrong first."""
    sections: dict[str, list[Block]] = {
        "Findings": [Findings(findings)] if findings else [],
        "Gradient violations": _violations(report),
        "Gradients at the last check": _gradient_table(report),
        "Curves and times": _curves(report),
        "Profile": [Values(report["profile"])] if report["profile"] else [],
        "Parameters at the last check": _parameters(report),
        "Layers in the last forward pass": _layers(report),
        "Memory": _memory(report),
        "Timeline": _timeline(report),
        "Summary": [Values(report["debug_summary"] | {"run": report["run"], "rank": report["rank"]})],
    }
    lead = [Text(str(report["timestamp"])[:19], "quiet"), _verdict(report)]
    return Document("Debug report", [Section(title, blocks) for title, blocks in sections.items()], lead)


def _verdict(report: dict[str, Any]) -> Text:
    summary = report["debug_summary"]
    found = [f"{summary[name]:,} {name.replace('_', ' ')}" for name in _COUNTERS if summary[name]]
    found += [each["kind"].replace("_", " ") for each in report["findings"] if each["severity"] != "info"][:3]
    trouble = [event for event in report["debug_events"] if is_trouble(event)]
    if not found and not trouble:
        return Text(f"Nothing wrong was found in {summary['debug_events_count']:,} events.", "good")
    words = f"Found: {', '.join(found)}." if found else f"{plural(len(trouble), 'event')} reported trouble."
    return Text(words + (f" First: {trouble[0]['message']}" if trouble else ""), "bad")


def _violations(report: dict[str, Any]) -> list[Block]:
    entries = _ends(report["gradient_violations"], _MAX_ROWS)
    rows = [(_time(entry), entry["event_type"].replace("_", " "), entry["message"]) for entry in entries]
    return _table(("time", "kind", "message"), rows, report["debug_summary"]["gradient_violations_count"])


def _gradient_table(report: dict[str, Any]) -> list[Block]:
    by_name = report["gradients"].get("by_name", {})
    ordered = sorted(_rows(by_name), key=lambda item: -float(item[1].get("norm") or 0.0))
    rows = [(name, _short(each["norm"]), str(each.get("nan", "")), str(each.get("inf", ""))) for name, each in ordered]
    norm = Text(f"Total norm {_short(report['gradients'].get('gradient_norm'))}.", "quiet")
    return [norm, *_table(("parameter", "norm", "NaN", "Inf"), rows[:_MAX_ROWS], len(by_name))] if rows else []


def _curves(report: dict[str, Any]) -> list[Block]:
    rows, curves = [], {}
    for key, each in report["performance"].items():
        name = key.replace("_", " ")
        rows.append((name, f"{each['count']:,}", *(_short(each.get(key)) for key in ("last", "mean", "min", "max"))))
        curves[name] = [float(value) for value in each["values"]]
    return [Curves(curves), Table(("name", "count", "last", "mean", "min", "max"), rows)] if rows else []


def _parameters(report: dict[str, Any]) -> list[Block]:
    ranges = report["parameters"].get("parameter_ranges", {})
    measures = ("min", "max", "mean", "std")
    rows = [(name, *(_short(each.get(measure)) for measure in measures)) for name, each in _rows(ranges)]
    counts = {name: value for name, value in report["parameters"].items() if isinstance(value, int)}
    elements = ", ".join(f"{value:,} {name.partition('_')[0]}" for name, value in counts.items())
    table = _table(("parameter", *measures), rows[:_MAX_ROWS], len(ranges))
    return [Text(f"Elements: {elements}.", "quiet"), *table] if rows else []


def _layers(report: dict[str, Any]) -> list[Block]:
    rows = []
    for name, call in _rows(report["layer_calls"])[:_MAX_ROWS]:
        outputs = call["outputs"]
        first = outputs[0] if outputs else {}
        bad = sum(each.get("nan", 0) + each.get("inf", 0) for each in outputs)
        shapes = (_shapes(call["inputs"]), _shapes(outputs))
        numbers = (_short(first.get("mean")), _short(first.get("std")), str(bad or ""), _short(call["time_ms"]))
        rows.append((name, str(call["class"]), *shapes, *numbers, size(call["output_bytes"])))
    columns = ("layer", "class", "inputs", "outputs", "mean", "std", "not finite", "ms", "memory")
    return _table(columns, rows, len(report["layer_calls"]))


def _memory(report: dict[str, Any]) -> list[Block]:
    snapshots = [each for each in _ends(report["memory_snapshots"], _SNAPSHOTS) if isinstance(each, dict)]
    names = [name for name in _MEMORY if any(name in each for each in snapshots)]
    rows = [tuple(size(each[name]) if name in each else "-" for name in names) for each in snapshots]
    columns = tuple(name.replace("_", " ") for name in names)
    return _table(columns, rows, report["debug_summary"]["memory_snapshots_count"]) if names else []


def _timeline(report: dict[str, Any]) -> list[Block]:
    events = report["debug_events"]
    special = [each for each in events if each["event_type"] not in ROUTINE] or events
    rows = [(_time(each), each["event_type"], each["message"]) for each in _ends(special, _MAX_ROWS)]
    if not rows:
        return []
    kinds = Counter(each["event_type"] for each in events).most_common(6)
    note = f"{len(rows)} of {plural(report['debug_summary']['debug_events_count'], 'event')}, without routine ones. "
    note += "Most frequent: " + ", ".join(f"{kind} ({number:,})" for kind, number in kinds) + "."
    return [Text(note, "quiet"), Table(("time", "event", "message"), rows)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], total: int) -> list[Block]:
    """Return a table, with a note if it does not show everything; nothing without rows."""
    note = [Text(f"The first and last {len(rows)} of {total:,}.", "quiet")] if len(rows) < total else []
    return [*note, Table(columns, rows)] if rows else []


def _rows(table: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a table; a last entry that only says how many were left out is not one."""
    return [(name, each) for name, each in table.items() if isinstance(each, dict)]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else short(value)


def _shapes(tensors: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{'x'.join(map(str, each['shape'])) or 'scalar'} {each['dtype']}" for each in tensors[:3])


def _ends(items: list[Any], most: int) -> list[Any]:
    """Return the items; of too many, the first third and the last ones."""
    return items if len(items) <= most else [*items[: most // 3], *items[-(most - most // 3) :]]


def _time(entry: Mapping[str, Any]) -> str:
    return str(entry["timestamp"])[11:19]
