"""Read, analyze and plot what a training logger wrote."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Final

from sonde.core import files
from sonde.errors import RunNotFound
from sonde.store.lines import LineFile
from sonde.views import figures
from sonde.views.document import figure_page

_LARGER_IS_BETTER: Final = ("acc", "score", "iou", "f1", "auc")
_NOT_FINITE: Final = ("nan", "inf", "-inf")


def load_training_logs(log_dir: str | Path, experiment_name: str) -> dict[str, Any]:
    """Return `metrics` and `events` as lists, and the `report` if the training has ended, else None.

    A last line that was cut short is left out.

    Raises:
        RunNotFound: There are no logs of that name.

    """
    folder = Path(log_dir)
    paths = {name: folder / f"{experiment_name}_{name}.jsonl" for name in ("metrics", "events")}
    report = folder / f"{experiment_name}_report.json"
    if not any(path.is_file() for path in (*paths.values(), report)):
        there = sorted({path.name.rsplit("_", 1)[0] for path in folder.glob("*_events.jsonl")})
        known = f"there are {', '.join(there)}" if there else "there are none"
        raise RunNotFound(f"{folder} has no logs of {experiment_name!r}; {known}.")
    loaded: dict[str, Any] = {name: _read(path) for name, path in paths.items()}
    loaded["report"] = files.read_object(report) if report.is_file() else None
    return loaded


def analyze_training_logs(log_dir: str | Path, experiment_name: str) -> dict[str, Any]:
    """Return a training's logs in numbers: epochs, durations, first, last and best of every metric, errors.

    What the logs do not hold is absent. The best of a metric is its largest value if its name contains `acc`, `score`,
    `iou`, `f1` or `auc`, else its smallest.
    """
    logs = load_training_logs(log_dir, experiment_name)
    ends = _epoch_ends(logs)
    durations = [float(end["duration"]) for end in ends if "duration" in end]
    counts = Counter(event.get("event_type") for event in logs["events"])
    found: dict[str, Any] = {
        "experiment_name": experiment_name,
        "num_epochs": len(ends),
        "num_events": len(logs["events"]),
        "num_errors": counts["error"],
        "num_warnings": counts["warning"],
        "metrics": {name: _summary(name, values) for name, (_, values) in _curves(logs["metrics"]).items()},
    }
    if durations:
        found["mean_epoch_duration"] = sum(durations) / len(durations)
    if logs["report"] is not None and logs["report"].get("duration") is not None:
        found["duration"] = logs["report"]["duration"]
    return found


def plot_training_logs(log_dir: Path, experiment_name: str) -> Path:
    """Plot all metrics and the epoch durations into `<experiment>_training.html`, which opens without a network.

    Raises:
        MissingExtra: Plotly is not installed.

    """
    logs = load_training_logs(log_dir, experiment_name)
    drawn = [figures.training_metrics(_curves(logs["metrics"]))]
    if ends := _epoch_ends(logs):
        seconds = ([end["epoch"] for end in ends], [float(end["duration"]) for end in ends])
        drawn.append(figures.training_metrics({"seconds": seconds}, title="Seconds per epoch", over="epoch"))
    path = log_dir / f"{experiment_name}_training.html"
    path.write_text(figure_page(experiment_name, drawn), encoding="utf-8")
    return path


def _read(path: Path) -> list[dict[str, Any]]:
    lines: LineFile[Any] = LineFile(path, files.loads)
    lines.refresh()
    return [line for line in lines.items if isinstance(line, dict)]


def _epoch_ends(logs: dict[str, Any]) -> list[dict[str, Any]]:
    return [event["data"] for event in logs["events"] if event.get("event_type") == "epoch_end"]


def _curves(lines: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of every metric. One without a step, as of a validation, is at the last step before."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    last = 0
    for line in lines:
        last = line["step"] if line.get("step") is not None else last
        for name, value in line.get("metrics", {}).items():
            if isinstance(value, int | float) or value in _NOT_FINITE:
                steps, values = found.setdefault(name, ([], []))
                steps.append(last)
                values.append(float(value))
    return found


def _summary(name: str, values: list[float]) -> dict[str, float]:
    finite = [value for value in values if math.isfinite(value)]
    summary: dict[str, float] = {"first": values[0], "last": values[-1], "count": len(values)}
    if finite:
        summary["best"] = (max if any(word in name.lower() for word in _LARGER_IS_BETTER) else min)(finite)
    return summary
