"""Plots of values and of runs, collected by name and combined into one dashboard."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.core import files
from sonde.core.arguments import whole_number
from sonde.debug.config import file_name
from sonde.errors import OptionError, SelectionError
from sonde.store import Run, open_run
from sonde.views import figures
from sonde.views.document import figure_page
from sonde.views.figures.curves import as_values
from sonde.views.figures.theme import THEMES, Theme

if TYPE_CHECKING:
    from sonde.debug.gradient_debugger import GradientDebugger
    from sonde.debug.model_diagnostics import ModelDiagnostics
    from sonde.debug.tensor_inspector import TensorInspector
    from sonde.views.figures.theme import Figure

Columns = dict[str, Sequence[Any]]
_MOST_FIGURES: Final = 200
_MOST_TENSORS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualizationConfig:
    """Where plots are written, and how large."""

    output_directory: str | Path = "./debug_plots"
    width: int = 800
    height: int = 600
    theme: Theme = "light"
    max_plots: int = _MOST_FIGURES
    """How many plots are kept; the oldest goes when one more comes."""

    def __post_init__(self) -> None:
        for name in ("width", "height", "max_plots"):
            whole_number(name, getattr(self, name))
        if self.theme not in THEMES:
            raise OptionError(f"theme takes one of {', '.join(THEMES)}; got {self.theme!r}.")


@dataclass(frozen=True, slots=True, eq=False)
class _Plot:
    figure: Figure
    columns: Columns = field(default_factory=dict)


class DebugVisualizer:
    """Makes plots, keeps them by name, and writes them: each alone, as data, or all of them as one dashboard.

    Every `plot_...` returns the Plotly figure, which notebooks show, and keeps it under a name that
    `get_plot_names` lists. Nothing is written before `create_dashboard`, `save_plot` or `export_plot_data`.
    """

    def __init__(self, config: VisualizationConfig | None = None) -> None:
        self.config = config or VisualizationConfig()
        self._plots: dict[str, _Plot] = {}

    # ------------------------------------------------------------------ plots

    def plot_tensor_distribution(self, name: str, values: Any, bins: int = 50) -> Figure:
        """Draw how the values of a tensor are spread, as `<name>_distribution`."""
        flat = as_values(values).reshape(-1)
        figure = figures.tensor_distribution(flat, bins=bins, name=name, theme=self.config.theme)
        return self._keep(f"{name}_distribution", figure, {"value": flat.tolist()})

    def plot_gradient_flow(self, layer: str, steps: Any, gradients: Any) -> Figure:
        """Draw the gradient of a layer over steps, as `<layer>_gradient_flow`."""
        figure = figures.gradient_flow_over_time({layer: (as_values(steps), gradients)}, theme=self.config.theme)
        columns: Columns = {"step": as_values(steps).tolist(), "gradient": as_values(gradients).tolist()}
        return self._keep(f"{layer}_gradient_flow", figure, columns)

    def plot_training_metrics(self, steps: Any, losses: Any, accuracies: Any = None, **more: Any) -> Figure:
        """Draw loss, accuracy and any further metric by keyword over the same steps, as `training_metrics`."""
        given = {"loss": losses, "accuracy": accuracies, **more}
        metrics = {name: as_values(values) for name, values in given.items() if values is not None}
        at = as_values(steps)
        figure = figures.training_metrics(
            {name: (at, values) for name, values in metrics.items()}, theme=self.config.theme
        )
        columns: Columns = {"step": at.tolist(), **{name: values.tolist() for name, values in metrics.items()}}
        return self._keep("training_metrics", figure, columns)

    def plot_heatmap(
        self, name: str, values: Any, row_names: Sequence[str] | None = None, steps: Sequence[int] | None = None
    ) -> Figure:
        """Draw a matrix as colours, as `<name>_heatmap`."""
        grid = as_values(values)
        figure = figures.layer_heatmap(grid, names=row_names, steps=steps, title=name, theme=self.config.theme)
        rows = row_names if row_names is not None else range(len(grid))
        at = steps if steps is not None else range(grid.shape[1])
        columns: Columns = {
            "row": [row for row in rows for _ in at],
            "column": [column for _ in rows for column in at],
            "value": grid.reshape(-1).tolist(),
        }
        return self._keep(f"{name}_heatmap", figure, columns)

    def plot_activation_patterns(self, layer: str, values: Any, outputs: Any = None) -> Figure:
        """Draw activations [rows, units] as colours; or, with `outputs`, outputs over inputs.

        Kept as `<layer>_activations`.
        """
        grid = as_values(values)
        if outputs is not None:
            return self._input_against_output(layer, grid.reshape(-1), as_values(outputs).reshape(-1))
        figure = figures.activation_patterns(grid, name=layer, theme=self.config.theme)
        flat = grid.reshape(1, -1) if grid.ndim == 1 else grid.reshape(len(grid), -1)
        row, unit = np.indices(flat.shape)
        columns: Columns = {
            "row": row.reshape(-1).tolist(),
            "unit": unit.reshape(-1).tolist(),
            "value": flat.reshape(-1).tolist(),
        }
        return self._keep(f"{layer}_activations", figure, columns)

    def _input_against_output(self, layer: str, inputs: Any, outputs: Any) -> Figure:
        figure = figures.input_output(inputs, outputs, name=layer, theme=self.config.theme)
        return self._keep(f"{layer}_activations", figure, {"input": inputs.tolist(), "output": outputs.tolist()})

    def plot_run(self, run: Run | str | Path) -> list[str]:
        """Draw all figures of a run that have something to show; return the names they are kept under."""
        run = run if isinstance(run, Run) else open_run(run)
        theme, name = self.config.theme, run.path.name
        drawn = {
            "training_metrics": figures.training_metrics(run, theme=theme),
            "gradient_flow": figures.gradient_flow(run, theme=theme),
            "gradients_over_time": figures.gradient_flow_over_time(run, theme=theme),
            "update_ratio": figures.update_ratio(run, theme=theme),
            "activations": figures.activation_patterns(run, theme=theme),
            "model_tree": figures.model_tree(run, theme=theme),
            "step_phases": figures.step_phases(run, theme=theme),
            "memory": figures.memory_timeline(run, theme=theme),
            "events": figures.event_timeline(run, theme=theme),
        }
        if any(site.quantity == "gradient" for site in run.sites):
            drawn["gradient_heatmap"] = figures.layer_heatmap(run, "*:gradient", theme=theme)
        kept = {f"{name}_{kind}": figure for kind, figure in drawn.items() if figure.data}
        for plot, figure in kept.items():
            self._keep(plot, figure, {})
        return list(kept)

    def plot_parts(
        self, gradients: GradientDebugger, inspector: TensorInspector, diagnostics: ModelDiagnostics
    ) -> list[str]:
        """Draw what was passed in to the parts of a session: losses and metrics, tensors, gradients.

        Of the tensors the last inspection of each of the last names is drawn. Returns the names of the plots.
        """
        before = set(self._plots)
        metrics = diagnostics.get_metrics()
        if metrics:
            names = ("accuracy", "validation_loss", "validation_accuracy", "learning_rate")
            more = {name: [getattr(each, name) for each in metrics] for name in names}
            known = {name: _gaps(values) for name, values in more.items() if any(v is not None for v in values)}
            accuracy = known.pop("accuracy", None)
            self.plot_training_metrics(range(1, len(metrics) + 1), [each.loss for each in metrics], accuracy, **known)
        last = {info.name: info for info in inspector.get_all_tensors()}
        for name in list(last)[-_MOST_TENSORS:]:
            values = inspector.get_values(last[name].id)
            if values is not None and values.size:
                self.plot_tensor_distribution(name, values)
        if gradients.has_history:
            self.add_plot("gradient_history", gradients.generate_gradient_flow_visualization())
        return [name for name in self._plots if name not in before]

    def add_plot(self, name: str, figure: Figure, columns: Mapping[str, Sequence[Any]] | None = None) -> Figure:
        """Keep a figure of your own, with the numbers behind it if they are to be exported."""
        return self._keep(name, figure, dict(columns or {}))

    def _keep(self, name: str, figure: Figure, columns: Columns) -> Figure:
        self._plots.pop(name, None)
        self._plots[name] = _Plot(figure, columns)
        while len(self._plots) > self.config.max_plots:
            del self._plots[next(iter(self._plots))]
        return figure

    # ------------------------------------------------------------------ what was made

    def get_plot_names(self) -> list[str]:
        """Return the names of the plots made so far, in order."""
        return list(self._plots)

    def get_plot(self, name: str) -> Figure:
        """Return a plot that was made before."""
        return self._plot(name).figure

    def _plot(self, name: str) -> _Plot:
        if name not in self._plots:
            close = difflib.get_close_matches(name, self._plots, 3) or list(self._plots)[-3:]
            known = f"{len(self._plots)} were made, such as {', '.join(close)}" if close else "none was made yet"
            raise SelectionError(f"There is no plot {name!r}; {known}. get_plot_names() lists them.")
        return self._plots[name]

    # ------------------------------------------------------------------ files

    def create_dashboard(self, plot_names: Sequence[str] | str | None = None, path: str | Path | None = None) -> Path:
        """Write one page with plots, all of them by default; return its path.

        The file holds everything it needs: it opens from disk and without a network.
        """
        names = [plot_names] if isinstance(plot_names, str) else self._plots if plot_names is None else plot_names
        chosen = [self._plot(name) for name in names]
        target = self._target(path, "dashboard.html")
        page = figure_page("Debug dashboard", [plot.figure for plot in chosen], columns=2)
        target.write_text(page, encoding="utf-8")
        return target

    def save_plot(self, name: str, path: str | Path | None = None) -> Path:
        """Write one plot; the suffix sets the format (html, json, png, svg), the config the size of pictures."""
        target = self._target(path, f"{file_name(name)}.html")
        return figures.write(self.get_plot(name), target, width=self.config.width, height=self.config.height)

    def export_plot_data(self, name: str, path: str | Path | None = None) -> Path:
        """Write the numbers behind a plot, as CSV or as JSON by the ending of the file; return its path.

        Numbers that are not finite are `nan`, `inf` and `-inf`: as text in JSON, which has no such numbers.
        """
        columns = self._plot(name).columns
        if not columns:
            raise OptionError(f"The plot {name!r} was made from a run; export that: sonde export RUN --to csv.")
        target = self._target(path, f"{file_name(name)}.csv")
        if target.suffix.lower() == ".json":
            target.write_bytes(files.dumps({"plot": name, **columns}))
        elif target.suffix.lower() == ".csv":
            with target.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(zip(*columns.values(), strict=True))
        else:
            raise OptionError(f"{target.name} ends in no known format; use .csv or .json.")
        return target

    def _target(self, path: str | Path | None, name: str) -> Path:
        """Return the file that was asked for, else one in the folder of all plots, whose folder is there."""
        target = Path(self.config.output_directory) / name if path is None else Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
