"""Reading what a training logger wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sonde import strict_json
from sonde.errors import RunNotFound
from sonde.pytorch_debugging.json_lines import read_lines


def load_training_logs(log_dir: str | Path, experiment_name: str) -> dict[str, Any]:
    """Return `metrics` and `events` as lists, and the `report` if the training has ended, else None.

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
    loaded: dict[str, Any] = {name: read_lines(path) for name, path in paths.items()}
    loaded["report"] = strict_json.read_object(report) if report.is_file() else None
    return loaded


def analyze_training_logs(log_dir: str | Path, experiment_name: str) -> dict[str, Any]:
    """Return a training's logs in numbers: epochs, durations, first, last and best of every metric, errors.

    What the logs do not tell is absent. The best of a metric is its largest value if its name speaks of accuracy or a
    score, else its smallest.
    """
    logs = load_training_logs(log_dir, experiment_name)
    ends = [event["data"] for event in logs["events"] if event.get("event_type") == "epoch_end"]
    durations = [float(end["duration"]) for end in ends if "duration" in end]
    counts = Counter(event.get("event_type") for event in logs["events"])
    found: dict[str, Any] = {
        "experiment_name": experiment_name,
        "num_epochs": len(ends),
        "num_events": len(logs["events"]),
        "num_errors": counts["error"],
        "num_warnings": counts["warning"],
        "metrics": {name: _summary(name, values) for name, values in curves(logs["metrics"]).items()},
    }
    if durations:
        found["mean_epoch_duration"] = sum(durations) / len(durations)
    if logs["report"] is not None and logs["report"].get("duration") is not None:
        found["duration"] = logs["report"]["duration"]
    return found


def curves(lines: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the values of every metric in order of time; strict JSON's "nan" and "inf" are numbers again."""
    found: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.get("metrics", {}).items():
            if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
                found.setdefault(name, []).append(float(value))
    return found


def _summary(name: str, values: list[float]) -> dict[str, float]:
    finite = [value for value in values if math.isfinite(value)]
    summary: dict[str, float] = {"first": values[0], "last": values[-1], "count": len(values)}
    if finite:
        more_is_better = any(word in name.lower() for word in ("acc", "score", "iou", "f1", "auc"))
        summary["best"] = max(finite) if more_is_better else min(finite)
    return summary
