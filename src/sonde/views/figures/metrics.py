"""Draw what training logged: losses, metrics and learning rates over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.analysis import smooth
from sonde.records import Site
from sonde.store import Run
from sonde.views.figures.curves import Line, add_crosses, add_line, as_lines, read_lines, step_axis, wants_log
from sonde.views.figures.loop import MEMORY
from sonde.views.figures.theme import COLOURS, Figure, Theme, cut, empty, finish, linear_axis, log_axis, safe, subplots

_MOST_PANELS: Final = 8
# Settings of the optimizer are constants, mostly; only the learning rate is a curve that people look for.
_SETTINGS: Final = ("betas", "momentum", "weight_decay", "eps", "dampening", "alpha", "rho")


def training_metrics(
    source: Run | Mapping[str, Any] | Any,
    *,
    names: Sequence[str] | None = None,
    smoothing: bool = True,
    title: str = "Training metrics",
    over: str = "step",
    theme: Theme = "light",
) -> Figure:
    """Draw losses, metrics and learning rates, each kind in a panel of its own.

    Args:
        source: A run; or by name the values, or `(steps, values)`, of each metric.
        names: Only these scalars; by default all but the settings of the optimizer that never change.
        smoothing: Draw a smoothed curve over a faint raw one where there are many points. It averages what came
            before, never what comes after.
        title: The figure's title.
        over: What plain values were measured over, if not at steps: `epoch`.
        theme: `light` or `dark`.

    """
    lines = _read(source, names) if isinstance(source, Run) else as_lines(source, "loss")
    lines = [line for line in lines if len(line.steps)]
    if not lines:
        return empty(title, "Nothing was logged; session.log(loss=loss) adds a curve.", theme=theme)
    panels = _panels(lines)
    shown = list(panels.items())[:_MOST_PANELS]
    figure = subplots().make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.08 / len(shown))
    colour = 0
    for row, (kind, members) in enumerate(shown, 1):
        log = _panel_log(members)
        for line in members:
            style = {"log": log, "where": row, "over": over}
            _add(figure, line, COLOURS[colour % len(COLOURS)], smoothing and kind != "learning rate", style)
            colour += 1
        add_crosses(figure, members, where=row)
        everything = np.concatenate([line.values for line in members])
        axis = {"title": {"text": safe(kind)}, **(log_axis if log else linear_axis)(everything)}
        figure.update_yaxes(**axis, row=row, col=1)
    figure.update_xaxes(**step_axis(lines, over), row=len(shown), col=1)
    hidden = len(panels) - len(shown)
    note = f"{hidden} more metrics are left out; name those you want" if hidden else ""
    return finish(figure, title, note, theme=theme, height=170 + 165 * len(shown), showlegend=len(lines) > 1)


def _read(run: Run, names: Sequence[str] | None) -> list[Line]:
    sites = [site for site in run.sites if site.quantity == "scalar"]
    if names is not None:
        sites = [run.site(name) for name in names]
    else:
        sites = [site for site in sites if not _is_setting(site)]
    return [Line(_plain(line.name), line.steps, line.values, line.bad) for line in read_lines(run, sites, "value")]


def _is_setting(site: Site) -> bool:
    leaf = site.name.rpartition(".")[2].rstrip("0123456789")
    if site.name.startswith(("scheduler", "process.", "system.")) or MEMORY.search(site.name):
        return True  # these have figures of their own, or none
    return site.name.startswith("optimizer") and leaf in _SETTINGS


def _plain(key: str) -> str:
    return key.replace(":scalar", "")


def _panels(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Sort curves into panels: losses together, learning rates together, each other metric with its own kind."""
    panels: dict[str, list[Line]] = {}
    for line in lines:
        panels.setdefault(_kind(line.name), []).append(line)
    first = {"loss": 0, "learning rate": 2}
    return dict(sorted(panels.items(), key=lambda item: first.get(item[0], 1)))


def _kind(name: str) -> str:
    lowered = name.lower().removesuffix("@eval")
    words = lowered.replace("/", ".").replace("_", ".").split(".")
    if "loss" in lowered:
        return "loss"
    if words[-1] == "lr" or lowered.endswith("learning_rate"):
        return "learning rate"
    return cut(
        " ".join(word for word in words if word not in ("train", "val", "valid", "validation", "test", "eval"))
        or lowered,
        24,
    )


def _panel_log(members: Sequence[Line]) -> bool:
    return wants_log(np.concatenate([line.values for line in members]))


def _add(figure: Figure, line: Line, colour: str, smoothing: bool, style: dict[str, Any]) -> None:
    window = len(line.values) // 25
    if not smoothing or window < 2 or not line.known:
        add_line(figure, line, colour, **style)
        return
    add_line(figure, line, colour, opacity=0.45, width=1.0, **style)
    # In decades a straight line is an exponential decay, so smoothing is done there too.
    log = style["log"]
    values = np.where(np.isfinite(line.values), line.values, np.nan)
    shaped = np.log10(values, out=np.full(len(values), np.nan), where=values > 0) if log else values
    smoothed = smooth(shaped, window)
    add_line(figure, Line.of(f"{line.name}, smoothed", line.steps, 10**smoothed if log else smoothed), colour, **style)
