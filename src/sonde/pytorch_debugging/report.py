"""The report of a debugger: everything it kept, as strict JSON, Markdown or one HTML page."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sonde.errors import OptionError
from sonde.parallel.ranks import suffix, this_rank
from sonde.pytorch_debugging.events import Kept, plain, statistics
from sonde.pytorch_debugging.report_pages import compose
from sonde.pytorch_debugging.report_writers import to_html, to_markdown
from sonde.records import Reading
from sonde.replacing import replacing

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger

FORMATS: Final = ("json", "md", "html")
_SUFFIXES: Final = {".json": "json", ".md": "md", ".markdown": "md", ".html": "html", ".htm": "html"}


def save(debugger: PyTorchDebugger, filename: str | Path | None, format: str | None) -> Path:
    """Write the report; see `PyTorchDebugger.save_debug_report`."""
    if format is not None and format not in FORMATS:
        raise OptionError(f"format={format!r}: choose from {', '.join(FORMATS)}.")
    path = None if filename is None else Path(filename)
    format = format or _format_of(path)
    if path is None:
        name = f"debug_report_{datetime.now():%Y%m%d_%H%M%S}{suffix(this_rank())}.{format}"
        path = _free(debugger.log_dir / name)
    debugger._notes.flush()
    content = build(debugger)
    if format == "json":
        text = json.dumps(content, indent=2, allow_nan=False)
    else:
        page = compose(content)
        text = to_markdown(page) if format == "md" else to_html(page)
    _write(path, text)
    return path


def _format_of(path: Path | None) -> str:
    if path is None or not path.suffix:
        return "json"
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(
            f"{path.name} ends in no known format: use {', '.join(_SUFFIXES)}, or say format='json', 'md' or 'html'."
        )
    return _SUFFIXES[path.suffix.lower()]


def build(debugger: PyTorchDebugger) -> dict[str, Any]:
    """Return the report as plain data. Its size is bounded: lists keep their first and last items, counts count all."""
    report = {
        "debug_summary": debugger.get_debug_summary(),
        "findings": [finding.to_json() for finding in debugger.findings],
        "debug_events": list(debugger.debug_events),
        "memory_snapshots": list(debugger.memory_snapshots),
        "gradient_violations": list(debugger.gradient_violations),
        "performance": _performance(debugger),
        "gradients": _gradients(debugger),
        "parameters": debugger.last_parameters,
        "layer_calls": debugger.last_forward,
        "profile": debugger.last_profile,
        "left_out": {
            name: kept.left_out
            for name in ("debug_events", "memory_snapshots", "gradient_violations")
            if (kept := getattr(debugger, name)).left_out
        },
        "run": None if debugger.run is None else str(debugger.run),
        "rank": this_rank(),
        "timestamp": datetime.now().isoformat(),
    }
    plain_report: dict[str, Any] = plain(report)
    return plain_report


def _performance(debugger: PyTorchDebugger) -> dict[str, Any]:
    series: dict[str, Kept[float]] = {
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
    by_name = {name: {"norm": norm} for name, norm in found.norms.items()}
    for name, count in found.nan.items():
        by_name[name]["nan"] = count
    for name, count in found.inf.items():
        by_name[name]["inf"] = count
    return found.data() | {"zero": list(found.zero), "by_name": by_name}


def _free(path: Path) -> Path:
    """Take a path that nobody has: reports of the same second, or of two processes, must not replace each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, wanted = 1, path
    while True:
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
            path = wanted.with_stem(f"{wanted.stem}_{number}")
            continue
        return path


def _write(path: Path, text: str) -> None:
    """Put the text at `path` in one step, so that nobody reads half a report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=False) as file:
        file.write(text.encode())
