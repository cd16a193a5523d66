"""Write `--json` answers: strict JSON on standard output, and nothing else there."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sonde.analysis import LayerSummary, Mark, SiteSummary, Verdict
    from sonde.records import Event, Reading, Site
    from sonde.store import Run
    from sonde.views.terminal import Page


# What a terminal obeys or reorders: C0 but for tabs and line ends, C1, marks of direction, separators of lines.
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069"
    r"\ud800-\udc7f\udd00-\udfff\ufeff]"  # and halves of characters, except those that encode bytes of file names
)

# --------------------------------------------------------------------------------
# Answers for programs: strict JSON on standard output, and nothing else there.


def print_json(value: Any) -> None:
    """Print one JSON document, on one line; what is not a finite number is null."""
    from sonde.core import files  # it needs numpy, which `sonde --help` can do without

    print_text(files.text(value) + "\n")


def print_text(text: str) -> None:
    r"""Print JSON, XML or Markdown. Control characters, which a terminal would obey, are written as `\uNNNN`.

    In JSON that is the same text; elsewhere no such character has a meaning.
    """
    utf8_output().write(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


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
        "verdict": describe_verdict(page.verdict),
        "loss": describe_loss(page),
        "layers": [describe_layer(layer) for layer in page.layers],
        "gradient_flow": page.flow,
        "events": [describe_event(event) for event in page.events],
    }


def describe_verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    """Describe the verdict on a run: the line that all views show, and its losses and metrics."""
    if verdict is None:
        return None
    return {"tone": verdict.tone, "headline": verdict.headline, "text": verdict.text, "metrics": verdict.metrics}


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
    return {"run": run.address, "status": run.status, "sites": [_describe_site(row) for row in rows]}


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
    from sonde.core import statistics

    described = [
        {
            "site": site.key,
            "step": reading.step,
            "span": reading.span,
            **{name: reading.get(name) for name in statistics.names()},
        }
        for site, reading in readings
    ]
    return {"run": run.address, "step": step, "readings": described}
