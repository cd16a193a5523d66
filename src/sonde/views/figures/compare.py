"""Draw the same curve of several runs in one plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.analysis import find_loss
from sonde.errors import SelectionError
from sonde.store import Run
from sonde.views.figures.curves import Line, as_line, draw_lines, read_line, wants_log
from sonde.views.figures.theme import COLOURS, Figure, Theme, empty, finish, graph_objects, safe

_DASHES: Final = ("solid", "dash", "dot", "dashdot")


def compare_runs(
    runs: Sequence[Run] | Mapping[str, Run | Any],
    site: str | None = None,
    *,
    stat: str | None = None,
    log: bool | None = None,
    theme: Theme = "light",
) -> Figure:
    """Draw one curve of several runs over each other.

    Args:
        runs: Runs; or by name runs, values, or `(steps, values)`.
        site: Which site; by default the loss of each run.
        stat: Which statistic; by default the value of a scalar and the rms of a tensor.
        log: Draw decades; by default where the values span many.
        theme: `light` or `dark`.

    """
    what = site or "loss"
    title = f"Compared: {what}{f', {stat}' if stat else ''}"
    lines, without = [], []
    for name, source in _named(runs).items():
        line = _line(name, source, site, stat) if isinstance(source, Run) else as_line(name, source)
        if line is None or not len(line.steps):
            without.append(name)
        else:
            lines.append(line)
    if not lines:
        return empty(title, f"None of {len(without)} runs has {what}.", theme=theme)
    log = wants_log(np.concatenate([line.values for line in lines])) if log is None else log
    figure = draw_lines(lines, safe(f"{what.removesuffix(':scalar')} {stat or ''}".strip()), log=log)
    for index, trace in enumerate(figure.data[: len(lines)]):
        # Dashes too: colours alone do not reach everybody, and not at all on paper.
        trace.line.dash = _DASHES[(index + index // len(COLOURS)) % len(_DASHES)]
    figure.update_layout(showlegend=True)
    note = f"not in: {', '.join(without)}" if without else f"{len(lines)} runs"
    return finish(figure, title, note, theme=theme)


def compare_groups(
    groups: Mapping[str, Sequence[str]],
    runs: Mapping[str, Run],
    site: str | None = None,
    *,
    stat: str | None = None,
    theme: Theme = "light",
) -> Figure:
    """Draw the mean of one curve over the runs of each group, with a band from the least to the greatest run.

    Args:
        groups: By name of a group, the names of its runs.
        runs: Runs by name.
        site: Which site; by default the loss of each run.
        stat: Which statistic; by default the value of a scalar and the rms of a tensor.
        theme: `light` or `dark`.

    """
    what = site or "loss"
    title = f"Compared: {what}{f', {stat}' if stat else ''}"
    figure = graph_objects().Figure()
    values: list[Any] = []
    for index, (name, members) in enumerate(groups.items()):
        read = [_line(each, runs[each], site, stat) for each in members]
        lines = [line for line in read if line is not None and len(line.steps)]
        if lines:
            values.append(_add_group(figure, name, lines, COLOURS[index % len(COLOURS)]))
    if not values:
        return empty(title, f"No run has {what}.", theme=theme)
    if wants_log(np.concatenate(values)):
        figure.update_yaxes(type="log")
    figure.update_xaxes(title="step")
    note = "line: mean of a group at the steps that all its runs have; band: least to greatest run"
    return finish(figure, title, note, theme=theme, showlegend=True)


def _add_group(figure: Figure, name: str, lines: Sequence[Line], colour: str) -> Any:
    steps = lines[0].steps
    for line in lines[1:]:
        steps = np.intersect1d(steps, line.steps)
    table = np.stack([line.values[np.searchsorted(line.steps, steps)] for line in lines])
    low, high, mean = table.min(0), table.max(0), table.mean(0)
    quiet = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "legendgroup": name}
    figure.add_scatter(x=steps, y=high, **quiet)
    figure.add_scatter(x=steps, y=low, fill="tonexty", fillcolor=_faint(colour), **quiet)
    figure.add_scatter(
        x=steps,
        y=mean,
        customdata=np.stack([low, high], 1),
        mode="lines",
        line={"color": colour},
        legendgroup=name,
        name=safe(f"{name} ({len(lines)} run{'' if len(lines) == 1 else 's'})"),
        hovertemplate="step %{x}: mean %{y:.4g}, %{customdata[0]:.4g} to %{customdata[1]:.4g}"
        "<extra>%{fullData.name}</extra>",
    )
    return mean


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.18)"


def _named(runs: Sequence[Run] | Mapping[str, Run | Any]) -> dict[str, Run | Any]:
    if isinstance(runs, Mapping):
        return {str(name): run for name, run in runs.items()}
    short = [run.path.name for run in runs]
    # Runs of the same name are distinguished by their folders.
    return {name if short.count(name) == 1 else str(run.path): run for name, run in zip(short, runs, strict=True)}


def _line(name: str, run: Run, site: str | None, stat: str | None) -> Line | None:
    if site is None:
        found = find_loss(run.sites)
    else:
        try:
            found = run.site(site)
        except SelectionError:
            found = None
    if found is None:
        return None
    line = read_line(run, found, stat or ("value" if found.quantity == "scalar" else "rms"))
    return Line(name, line.steps, line.values, line.bad)
