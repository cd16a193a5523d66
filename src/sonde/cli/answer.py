"""Write `--json` answers: strict JSON on standard output, and nothing else there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from sonde.core import files, statistics

if TYPE_CHECKING:
    from sonde.analysis import LayerSummary, Mark, SiteSummary
    from sonde.records import Event, Reading, Site
    from sonde.store import Run
    from sonde.views.terminal import Page


# --------------------------------------------------------------------------------
# Answers for programs: strict JSON on standard output, and nothing else there.


def print_json(value: Any) -> None:
    """Print one JSON document, on one line; what is not a finite number is null."""
    utf8_output().write(files.text(value) + "\n")


def utf8_output() -> IO[str]:
    """Return standard output, which writes UTF-8 from now on whatever the locale says: programs expect nothing else."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        # A file name that is not valid UTF-8 is written as its original bytes.
        reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdout


# --------------------------------------------------------------------------------
# What a run, a site and a reading look like as JSON: the answers to `--json`.


_LAYER_NAMES = {"parameter": "weight", "update": "update_ratio"}


def describe_page(page: Page) -> dict[str, Any]:
    """Describe the summary page: the run, its loss, its layers worst first, the gradient flow, and the events."""
    return {
        "run": page.facts,
        "loss": describe_loss(page),
        "layers": [describe_layer(layer) for layer in page.layers],
        "gradient_flow": page.flow,
        "events": [describe_event(event) for event in page.events],
    }


def describe_loss(page: Page) -> dict[str, Any] | None:
    """Describe the loss curve, or None where none was logged."""
    from sonde.analysis import describe

    if page.loss is None:
        return None
    return {"site": page.loss.site.key, "trend": describe(page.loss.steps, page.loss.values)}


def describe_layer(layer: LayerSummary) -> dict[str, Any]:
    """Describe a layer: the recent value of each quantity by the name of what it is."""
    values = {_LAYER_NAMES.get(quantity, quantity): row.now for quantity, row in layer.sites.items()}
    return {"layer": layer.name, "kind": layer.kind, **values, **describe_mark(layer.mark)}


def describe_mark(mark: Mark) -> dict[str, Any]:
    """Describe why something stands out."""
    return {"level": mark.level, "reason": mark.reason, "since_step": mark.step}


def describe_event(event: Event) -> dict[str, Any]:
    """Describe an event."""
    return {
        "event_type": event.event_type,
        "message": event.message,
        "step": event.step,
        "timestamp": event.timestamp,
        "data": event.data,
    }


def describe_sites(run: Run, rows: Sequence[SiteSummary]) -> dict[str, Any]:
    """Describe sites with the whole series that was looked at."""
    return {"run": str(run.path), "status": run.status, "sites": [_describe_site(row) for row in rows]}


def _describe_site(row: SiteSummary) -> dict[str, Any]:
    return {
        "site": row.site.key,
        "name": row.site.name,
        "quantity": row.site.quantity,
        "kind": row.site.kind,
        "shape": list(row.site.shape),
        "stat": row.stat,
        "last": row.last,
        "min": row.low,
        "max": row.high,
        **describe_mark(row.mark),
        "steps": row.steps,
        "values": row.values,
    }


def describe_readings(run: Run, step: int, readings: Sequence[tuple[Site, Reading]]) -> dict[str, Any]:
    """Describe what sites read at one step: every statistic that is known."""
    described = [
        {
            "site": site.key,
            "step": reading.step,
            "span": reading.span,
            **{name: reading.get(name) for name in statistics.names()},
        }
        for site, reading in readings
    ]
    return {"run": str(run.path), "step": step, "readings": described}
