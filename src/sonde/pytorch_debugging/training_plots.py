"""One page with the curves of a training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sonde.pytorch_debugging.training_logs import load_training_logs
from sonde.views import figures
from sonde.views.document import figure_page

Curve = tuple[list[Any], list[float]]


def draw_training(log_dir: Path, experiment_name: str) -> Path:
    """Draw what a training logger wrote into `<experiment>_training.html`, which opens without a network.

    Raises:
        MissingExtra: Plotly is not installed.

    """
    logs = load_training_logs(log_dir, experiment_name)
    curves = _curves(logs["metrics"])
    ends = [event["data"] for event in logs["events"] if event.get("event_type") == "epoch_end"]
    drawn = [figures.training_metrics(curves)]
    if ends:
        seconds = ([end["epoch"] for end in ends], [float(end["duration"]) for end in ends])
        drawn.append(figures.training_metrics({"seconds": seconds}, title="Seconds per epoch", over="epoch"))
    path = log_dir / f"{experiment_name}_training.html"
    path.write_text(figure_page(experiment_name, drawn), encoding="utf-8")
    return path


def _curves(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return every metric over its steps; those of a validation, which belong to no step, over the last step before."""
    found: dict[str, Curve] = {}
    last = 0
    for line in lines:
        last = line["step"] if line.get("step") is not None else last
        for name, value in line.get("metrics", {}).items():
            steps, values = found.setdefault(name, ([], []))
            steps.append(last)
            values.append(float(value) if isinstance(value, int | float) else math.nan)
    return found
