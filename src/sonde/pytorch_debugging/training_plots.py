"""One page with the curves of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sonde.errors import MissingExtra
from sonde.pytorch_debugging.training_logs import load_training_logs

_PANELS: Final = (
    ("Training loss", ("loss",)),
    ("Validation loss", ("val_loss",)),
    ("Scores", ("accuracy", "val_accuracy")),
    ("Learning rate", ("learning_rate",)),
    ("Gradient norm", ("gradient_norm",)),
)
_COLUMNS: Final = 3


def draw_training(log_dir: Path, experiment_name: str) -> Path:
    """Draw what a training logger wrote into `<experiment>_training.html`, which opens without a network.

    Raises:
        MissingExtra: Plotly is not installed.

    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise MissingExtra("plotly", "view", "Drawing a training") from error
    logs = load_training_logs(log_dir, experiment_name)
    titles = [title for title, _ in _PANELS] + ["Seconds per epoch"]
    figure = make_subplots(rows=2, cols=_COLUMNS, subplot_titles=titles)
    for place, (_, names) in enumerate(_PANELS):
        for name in names:
            _add_line(figure, place, name, *_points(logs["metrics"], name))
    ends = [event["data"] for event in logs["events"] if event.get("event_type") == "epoch_end"]
    _add_line(figure, len(_PANELS), "duration", [end["epoch"] for end in ends], [end["duration"] for end in ends])
    figure.update_layout(title=experiment_name, template="plotly_white", showlegend=True, height=720)
    path = log_dir / f"{experiment_name}_training.html"
    figure.write_html(path, include_plotlyjs=True)
    return path


def _points(lines: list[dict[str, Any]], name: str) -> tuple[list[Any], list[Any]]:
    """Return where and how much; beside the epoch there may be no step."""
    chosen = [line for line in lines if name in line.get("metrics", {})]
    steps = [line["epoch"] if line.get("step") is None else line["step"] for line in chosen]
    values = [line["metrics"][name] for line in chosen]
    return steps, [value if isinstance(value, int | float) else None for value in values]


def _add_line(figure: Any, place: int, name: str, x: list[Any], y: list[Any]) -> None:
    if not x:
        return
    row, column = divmod(place, _COLUMNS)
    mode = "lines" if len(x) > 20 else "lines+markers"
    figure.add_scatter(x=x, y=y, mode=mode, name=name, row=row + 1, col=column + 1)
