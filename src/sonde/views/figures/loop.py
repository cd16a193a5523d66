"""Draw the training loop: step time, memory, events and findings over the steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sonde.analysis import column_edges, events_of
from sonde.analysis.loop import phase_shares
from sonde.core import signals
from sonde.records import Event, Finding, Site
from sonde.store import Run
from sonde.views.figures.curves import MOST_COLUMNS, Line, add_line, as_lines, read_lines, refuse_names, step_axis
from sonde.views.figures.theme import (
    AMBER,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    SEVERITY_COLOURS,
    SKY,
    Figure,
    Theme,
    empty,
    finish,
    graph_objects,
    safe,
)
from sonde.views.terminal.style import plural

# --------------------------------------------------------------------------------
# The training loop itself: where the time of a step goes, and how much memory it takes.


MEMORY: Final = re.compile(r"memory|allocated|reserved|\brss\b", re.IGNORECASE)
_PHASE_COLOURS: Final = {
    "data wait": AMBER,
    "to device": PURPLE,
    "forward": BLUE,
    "backward": PINK,
    "optimizer": GREEN,
    "evaluation": SKY,
    "watching": ORANGE,
    "other": GREY,
}


def step_phases(source: Run | Mapping[str, Any], *, theme: Theme = "light") -> Figure:
    """Draw where the time of each step goes: waiting for data, forward, backward, optimizer, the rest.

    Args:
        source: A run; or by phase the seconds of each step, or `(steps, seconds)`.
        theme: `light` or `dark`.

    """
    title = "Where the time of a step goes"
    lines = _read_phases(source) if isinstance(source, Run) else as_lines(source)
    lines = [line for line in lines if line.known]
    if not lines:
        return empty(title, "The run has no times of the phases of a step.", theme=theme)
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    edges = column_edges(int(steps[0]), int(steps[-1]), MOST_COLUMNS)
    # Means, not extremes: phases are stacked, and only means add up to the mean of the whole. A phase that did not
    # occur in a step took no time in it. Columns without a recorded step are left out: Plotly would draw them at zero.
    is_recorded = np.bincount(_places(steps, edges), minlength=len(edges) - 1) > 0
    heights = {line.name: _means(line, steps, edges)[is_recorded] * 1e3 for line in lines}
    shares, mean_s = _shares(source, lines, steps)
    figure = graph_objects().Figure()
    for index, (name, height) in enumerate(heights.items()):
        colour = _PHASE_COLOURS.get(name, COLOURS[index % len(COLOURS)])
        figure.add_trace(
            graph_objects().Scatter(
                x=np.ceil(edges[:-1])[is_recorded],
                y=height,
                name=f"{safe(name)} {shares[name]:.0%}" if name in shares else safe(name),
                stackgroup="phases",
                mode="lines",
                line={"width": 0.5, "color": colour},
                hovertemplate=f"{safe(name)}<br>step %{{x:,}}: %{{y:.3g}} ms<extra></extra>",
            )
        )
    top, beyond = _top(np.nansum(list(heights.values()), axis=0))
    note = f"mean {f'{mean_s:.3g} s' if mean_s >= 1 else f'{mean_s * 1e3:.3g} ms'}{beyond}"
    y_axis = {"title": {"text": "milliseconds per step"}, "range": [0, top]}
    return finish(figure, title, note, theme=theme, xaxis=step_axis(lines), yaxis=y_axis)


def _shares(source: Any, lines: list[Line], steps: Any) -> tuple[dict[str, float], float]:
    """Return the share of each phase and the mean step; of a run as `phase_shares` does, without its first steps."""
    if isinstance(source, Run) and (known := phase_shares(source)) is not None:
        return {phase.replace("_", " "): share for phase, share in known.shares.items()}, known.mean_s
    means = {line.name: float(np.nansum(line.values)) / len(steps) for line in lines}
    whole = sum(means.values())
    return {name: mean / whole for name, mean in means.items()} if whole > 0 else {}, whole


def _top(totals: Any) -> tuple[float, str]:
    """Return where the axis ends: a few steps that are far slower than the others, as the first often is, are cut."""
    usual, highest = float(np.quantile(totals, 0.9)), float(totals.max())
    if highest <= 2 * usual:
        return 1.08 * highest or 1.0, ""
    return 1.6 * usual, f"; cut off: up to {highest:,.0f} ms"


def _means(line: Line, steps: Any, edges: Any) -> Any:
    finite = np.isfinite(line.values)
    total = np.bincount(_places(line.steps[finite], edges), weights=line.values[finite], minlength=len(edges) - 1)
    count = np.bincount(_places(steps, edges), minlength=len(edges) - 1)
    return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)


def _places(steps: Any, edges: Any) -> Any:
    return np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)


def _read_phases(run: Run) -> list[Line]:
    wanted = {signals.DATA_WAIT: "data wait"} | {
        signals.time_of(phase): phase.replace("_", " ") for phase in signals.PHASE_TIMES
    }
    lines = []
    for part, name in wanted.items():
        site = _vital(run, part)
        if site is not None:
            lines += [_untaped(name, line, run.tapes()) for line in read_lines(run, [site], "mean")]
    return lines


def _untaped(name: str, line: Line, taped: list[int]) -> Line:
    """Leave out steps that were taped, which takes many times as long."""
    kept = ~np.isin(line.steps, taped)
    return Line(name, line.steps[kept], line.values[kept], line.bad[kept])


def _vital(run: Run, name: str) -> Site | None:
    part = signals.part_of(name)
    found = (site for site in run.sites if (site.name, site.quantity, site.part) == (signals.LOOP, "vital", part))
    return next(found, None)


def memory_timeline(source: Run | Mapping[str, Any], *, theme: Theme = "light") -> Figure:
    """Draw how much memory the training takes.

    Args:
        source: A run that recorded memory; or by name the bytes at each step, or `(steps, bytes)`.
        theme: `light` or `dark`.

    """
    title = "Memory"
    lines = _read_memory(source) if isinstance(source, Run) else as_lines(source, "memory")
    lines = [line for line in lines if line.known]
    if not lines:
        return empty(
            title, "The run has recorded no memory; session.log(memory_allocated=...) adds a curve.", theme=theme
        )
    peak = max(float(np.nanmax(line.values[np.isfinite(line.values)])) for line in lines)
    factor, unit = _unit(peak)
    figure = graph_objects().Figure()
    for index, line in enumerate(lines):
        scaled = Line(line.name, line.steps, line.values / factor, line.bad)
        add_line(figure, scaled, COLOURS[index % len(COLOURS)], fill="tozeroy" if len(lines) == 1 else None)
    axes = {"xaxis": step_axis(lines), "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
    return finish(figure, title, f"peak {peak / factor:.3g} {unit}", theme=theme, showlegend=len(lines) > 1, **axes)


def _read_memory(run: Run) -> list[Line]:
    sites: Sequence[Site] = [
        site for site in run.sites if site.quantity in ("scalar", "vital") and MEMORY.search(site.name + site.part)
    ]
    lines = read_lines(run, sites, "mean")
    return [
        Line(line.name.replace(":scalar", "").replace(":vital", ""), line.steps, line.values, line.bad)
        for line in lines
    ]


def _unit(nbytes: float) -> tuple[float, str]:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return factor, unit
    return 1.0, "bytes"


# --------------------------------------------------------------------------------
# What happened when: events, and findings over the steps they were seen at.


_MOST_LANES: Final = 30
_MOST_PER_LANE: Final = 1000


def event_timeline(
    source: Run | Sequence[Event], *, findings: Sequence[Finding] | None = None, theme: Theme = "light"
) -> Figure:
    """Draw events along the steps, one lane a type, and each finding from where it was first to where it was last seen.

    Args:
        source: A run; or events.
        findings: Findings to draw too; by default those of the run.
        theme: `light` or `dark`.

    """
    refuse_names(source, "a run, or events")
    if isinstance(source, Run):
        events = events_of(source)
        findings = [*source.findings, *source.closed_findings] if findings is None else findings
    else:
        events, findings = list(source), findings or ()
    # Facts are what a diagnosis reads about the program; nothing happened.
    placed = [event for event in events if event.step is not None and event.event_type not in ("facts", "program")]
    title = "Events and findings"
    if not placed and not findings:
        return empty(title, "Nothing happened that has a step.", theme=theme)
    figure = graph_objects().Figure()
    lanes = [_add_finding(figure, finding) for finding in findings]
    lanes += _add_events(figure, placed)
    lanes = list(dict.fromkeys(lanes))
    axis = {"type": "category", "categoryarray": lanes, "categoryorder": "array", "autorange": "reversed"}
    note = plural(len(placed), "event") + (f", {plural(len(findings), 'finding')}" if findings else "")
    layout = {"height": 150 + 34 * len(lanes), "showlegend": False, "xaxis": {"title": {"text": "step"}}, "yaxis": axis}
    return finish(figure, title, note, theme=theme, **layout)


def _add_finding(figure: Figure, finding: Finding) -> str:
    lane = safe(finding.kind.replace("_", " "))
    colour = SEVERITY_COLOURS[finding.severity]
    where = f"<br>{safe(', '.join(finding.sites[:4]))}" if finding.sites else ""
    held = ", closed" if finding.withdrawn else ""
    words = f"<b>{lane}</b> ({finding.severity}{held}){where}<br>steps {finding.step:,} to {finding.last_step:,}"
    figure.add_trace(
        graph_objects().Scatter(
            x=[finding.step, finding.last_step],
            y=[lane, lane],
            mode="lines+markers",
            opacity=0.4 if finding.withdrawn else 1.0,
            line={"color": colour, "width": 7},
            marker={"color": colour, "size": 11, "symbol": "square"},
            hovertemplate=f"{words}<extra></extra>",
        )
    )
    return lane


def _add_events(figure: Figure, events: Sequence[Event]) -> list[str]:
    by_type: dict[str, list[Event]] = {}
    for event in events:
        by_type.setdefault(event.event_type, []).append(event)
    lanes = []
    for kind, members in list(by_type.items())[:_MOST_LANES]:
        stride = -(-len(members) // _MOST_PER_LANE)
        shown = members[::stride]
        lane = safe(kind)
        figure.add_trace(
            graph_objects().Scatter(
                x=[event.step for event in shown],
                y=[lane] * len(shown),
                mode="markers",
                marker={"color": _colour(kind), "size": 9, "opacity": 0.85},
                text=[safe(event.message[:200]) for event in shown],
                hovertemplate=f"{lane}<br>step %{{x:,}}: %{{text}}<extra></extra>",
            )
        )
        lanes.append(lane)
    return lanes


def _colour(kind: str) -> Any:
    from sonde.views.terminal.events import event_level

    level = event_level(Event(event_type=kind, message="", timestamp=0.0))
    return {"bad": SEVERITY_COLOURS["critical"], "odd": SEVERITY_COLOURS["warning"]}.get(level, BLUE)
