"""Run against run: the same curve of several runs in one plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.analysis import find_loss
from sonde.errors import SelectionError
from sonde.store import Run
from sonde.views.figures.curves import Line, as_line, draw_lines, read_line, wants_log
from sonde.views.figures.theme import Figure, Theme, empty, finish, safe

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
        trace.line.dash = _DASHES[index % len(_DASHES)]
    figure.update_layout(showlegend=True)
    note = f"not in: {', '.join(without)}" if without else f"{len(lines)} runs"
    return finish(figure, title, note, theme=theme)


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
