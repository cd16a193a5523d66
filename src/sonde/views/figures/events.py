"""What happened when: events, and findings over the steps they were seen at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sonde.records import Event, Finding
from sonde.store import Run
from sonde.views.figures.curves import refuse_names
from sonde.views.figures.library import Figure, graph_objects
from sonde.views.figures.theme import BLUE, SEVERITY_COLOURS, Theme, empty, finish
from sonde.views.figures.words import safe
from sonde.views.terminal.numbers import plural

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
        events = source.events
        findings = source.findings if findings is None else findings
    else:
        events, findings = list(source), findings or ()
    # Facts are what a diagnosis reads about the program; nothing happened.
    placed = [event for event in events if event.step is not None and event.event_type != "facts"]
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
    words = f"<b>{lane}</b> ({finding.severity}){where}<br>steps {finding.step:,} to {finding.last_step:,}"
    figure.add_trace(
        graph_objects().Scatter(
            x=[finding.step, finding.last_step],
            y=[lane, lane],
            mode="lines+markers",
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
