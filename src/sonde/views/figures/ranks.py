"""Draw the ranks of a run: their times over the steps, the phases of each, and the spread of a statistic over them."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.analysis import usual_stat
from sonde.analysis.downsample import spaced
from sonde.analysis.ranks import Spread, spread_over_ranks
from sonde.analysis.summary import keys_of
from sonde.core.step_times import PHASES, RankTimes
from sonde.errors import OptionError
from sonde.records import Site
from sonde.store import Run
from sonde.store.ranks import rank_times
from sonde.views.figures.curves import Grid
from sonde.views.figures.heatmaps import heat_trace, row_axis, row_height
from sonde.views.figures.theme import (
    AMBER,
    BAD,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    SKY,
    Figure,
    Theme,
    empty,
    finish,
    graph_objects,
    safe,
    stat_title,
)

_COLUMNS: Final = 512
_MOST_ROWS: Final = 256
_MOST_BARS: Final = 64
_MOST_CURVES: Final = 64
_NOTHING: Final = "The run has no step times of several ranks."
SHOWN: Final = ("own", "waiting", "step", *PHASES)
"""What `rank_heatmap` can show."""
_COLOURS: Final = {
    "data_wait": AMBER,
    "to_device": PURPLE,
    "forward": BLUE,
    "other": "#b9a06a",
    "watching": ORANGE,
    "backward": PINK,
    "communication": SKY,
    "optimizer": GREEN,
    "evaluation": "#5f6b7a",
    "waiting": GREY,
}


def rank_heatmap(run: Run, what: str = "own", *, theme: Theme = "light") -> Figure:
    """Draw ranks by steps, the colour being the time of a step in milliseconds.

    Args:
        run: A run of several ranks.
        what: `own` is the time without waiting for others, `waiting` that of waiting, `step` both, or one phase.
        theme: `light` or `dark`.

    """
    if what not in SHOWN:
        raise OptionError(f"what={what!r:.40} is not known; use one of {', '.join(SHOWN)}.")
    title = f"{_TITLES.get(what, what.replace('_', ' ').capitalize())} by rank and step"
    times = rank_times(run.path, most=_COLUMNS)
    if times is None:
        return empty(title, _NOTHING, theme=theme)
    names, values = _rows(times, _chosen(times, what))
    grid = Grid(names, times.steps.astype(np.float64), values * 1e3, np.zeros(values.shape, np.bool_), False)
    figure = graph_objects().Figure(heat_trace(grid, False, colorbar={"title": {"text": "ms"}}))
    notes = [f"each column is the mean of {times.stride} steps" if times.stride > 1 else ""]
    notes.append(
        f"each row the slowest of {len(times.ranks) // len(names) or 1} ranks" if len(names) < len(values) else ""
    )
    axis = row_axis(names) | {"title": {"text": "rank"}}
    return finish(
        figure,
        title,
        ", ".join(note for note in notes if note),
        theme=theme,
        xaxis={"title": {"text": "step"}},
        yaxis=axis,
        height=row_height(len(names)),
    )


_TITLES: Final = {"own": "Own time", "waiting": "Waiting for others", "step": "Step time"}


def _chosen(times: RankTimes, what: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if what == "step":
        return times.step_time
    if what == "own":
        return times.own()
    if what == "waiting":
        return np.asarray(times.waits().sum(2))
    phase = PHASES.index(what)
    return np.asarray(times.spent[:, :, phase] - times.waits()[:, :, phase])


def _rows(
    times: RankTimes, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> tuple[list[str], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Return names and values of rows; of very many ranks each row is the slowest of some neighbours."""
    together = -(-len(values) // _MOST_ROWS)
    if together == 1:
        return [str(rank) for rank in times.ranks], values
    starts = list(range(0, len(values), together))
    names = [f"{times.ranks[at]} to {times.ranks[min(at + together, len(values)) - 1]}" for at in starts]
    return names, np.fmax.reduceat(values, starts, axis=0)


def rank_phases(run: Run, *, theme: Theme = "light") -> Figure:
    """Draw how each rank spends a step: its own phases stacked, and waiting for the others on top."""
    title = "A step of each rank"
    times = rank_times(run.path, most=_COLUMNS)
    if times is None:
        return empty(title, _NOTHING, theme=theme)
    waits = times.waits()
    own = 1e3 * np.nanmean(times.spent - waits, axis=1)
    waited = 1e3 * np.nanmean(waits.sum(2), axis=1)
    shown = np.sort(np.argsort(-own.sum(1), kind="stable")[:_MOST_BARS])
    figure = graph_objects().Figure()
    heights = {phase: own[:, at] for at, phase in enumerate(PHASES)} | {"waiting": waited}
    for phase, height in heights.items():
        if height.max() <= 0:
            continue
        name = phase.replace("_", " ")
        figure.add_trace(
            graph_objects().Bar(
                x=[str(rank) for rank in times.ranks[shown]],
                y=height[shown],
                name=name,
                marker={"color": _COLOURS[phase], **({"pattern": {"shape": "/"}} if phase == "waiting" else {})},
                hovertemplate=f"rank %{{x}}<br>{name}: %{{y:.3g}} ms<extra></extra>",
            )
        )
    note = f"means over {len(times.steps) * times.stride:,} steps"
    note += f"; the {_MOST_BARS} slowest of {len(own):,} ranks" if len(shown) < len(own) else ""
    figure.update_layout(barmode="stack", bargap=0.15)
    axes = {"xaxis": {"title": {"text": "rank"}, "type": "category"}, "yaxis": {"title": {"text": "ms per step"}}}
    return finish(figure, title, note, theme=theme, **axes)


def rank_spread(run: Run, site: str = "", stat: str = "", *, theme: Theme = "light") -> Figure:
    """Draw how far ranks lie apart in a statistic, and mark the first step at which one leaves the others.

    Args:
        run: A run of several ranks.
        site: Which site; by default the loss, else the first gradient.
        stat: Which statistic; by default the usual one of the site.
        theme: `light` or `dark`.

    """
    title = "Spread over ranks"
    chosen = run.site(site) if site else next(iter(compared_sites(run)), None)
    if chosen is None or len(run.ranks_of(chosen)) < 2:
        return empty(title, "No site was recorded by more than one rank.", theme=theme)
    stat = stat or usual_stat(chosen, keys_of(run))
    ranks = spaced(run.ranks_of(chosen), _MOST_CURVES)
    found = spread_over_ranks(run, chosen, stat, ranks)
    if not len(found.steps):
        return empty(f"{title}: {chosen.key}", "No reading has this statistic on several ranks.", theme=theme)
    figure = _band(found)
    note = f"{stat_title(stat)}, {len(found.ranks)} of {len(run.ranks_of(chosen))} ranks"
    if found.parted is None:
        note += "; no rank leaves the others"
    else:
        step, rank = found.parted
        note += f"; from step {step:,} on rank {rank} leaves the others"
        figure.add_vline(x=step, line={"color": BAD, "width": 2, "dash": "dot"})
    axes = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": safe(stat_title(stat))}}}
    return finish(figure, f"{title}: {chosen.key}", note, theme=theme, **axes)


def _band(found: Spread) -> Figure:
    figure = graph_objects().Figure()
    edge = {"width": 0.5, "color": BLUE}
    hover = "step %{x:,}: %{y:.4g}"
    for name, values, more in (
        ("smallest", found.low, {"line": edge}),
        ("largest", found.high, {"line": edge, "fill": "tonexty", "fillcolor": "rgba(47,129,199,0.25)"}),
        ("median rank", found.middle, {"line": {"width": 2, "color": BLUE}}),
    ):
        trace = graph_objects().Scatter(
            x=found.steps, y=values, name=name, mode="lines", hovertemplate=f"{name}<br>{hover}<extra></extra>", **more
        )
        figure.add_trace(trace)
    return figure


def compared_sites(run: Run) -> list[Site]:
    """Return the sites that several ranks recorded: a loss first, then gradients, then all others."""
    several = [site for site in run.sites if site.same_as is None and len(run.ranks_of(site)) > 1]

    def key(site: Site) -> tuple[bool, bool]:
        is_loss = site.name in ("loss", "loss_fn") and site.quantity in ("scalar", "output")
        return not is_loss, site.quantity != "gradient"

    return sorted(several, key=key)
