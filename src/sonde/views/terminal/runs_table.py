"""Several runs in a terminal: a row for each, groups of repeats, and layers that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sonde.analysis.sweep import PATHS, Group, LayerSpread, RunRow, Spread, Trouble, differing, in_words
from sonde.records import Severity, words_of
from sonde.views.terminal.style import ABSENT, BAD, ODD, QUIET, STATUS_STYLES, TITLE, Look, short
from sonde.views.terminal.tables import WIDE, number, plain_table

SEVERITY_STYLES: Final[dict[Severity, str]] = {"critical": BAD, "warning": ODD, "info": ""}
MOST_SETTINGS: Final = 6
_MOST_LAYERS: Final = 12
_LEAST_NAME, _MOST_NAME = 12, 16
_STYLES: Final[dict[str, str]] = {str(status): style for status, style in STATUS_STYLES.items()}


def troubles_text(troubles: Sequence[Trouble], *, judged: bool = True) -> Text:
    """Return the worst trouble of a run in its colour, and how many more there are."""
    if not troubles:
        return Text("none" if judged else "not judged", QUIET)
    worst = troubles[0]
    text = Text(words_of(worst.kind), SEVERITY_STYLES[worst.severity])
    return text.append(f" +{len(troubles) - 1}", QUIET) if len(troubles) > 1 else text


def runs_table(rows: Sequence[RunRow], metrics: Sequence[str], look: Look) -> Table:
    """Return a row for each run: what is wrong, settings that differ as far as there is room, last and best metrics."""
    room = MOST_SETTINGS if look.width >= WIDE else MOST_SETTINGS // 3
    settings = [name for name in differing(rows) if not PATHS.search(name)][:room]
    numbers = [f"{name} {which}" for name in metrics for which in ("last", "best")]
    table = plain_table("run", "status", "findings", *settings, *numbers, right=(*settings, *numbers))
    table.columns[0].min_width, table.columns[1].no_wrap = _LEAST_NAME, True
    for row in rows:
        cells = [Text(in_words(row.settings.get(name))) for name in settings]
        table.add_row(
            Text(row.name),
            Text(row.status, _STYLES.get(row.status, "")),
            troubles_text(row.troubles, judged=row.judged),
            *cells,
            *(cell for name in metrics for cell in _metric(row, name)),
        )
    return table


def _metric(row: RunRow, name: str) -> tuple[Text, Text]:
    known = row.metrics.get(name)
    if known is None:
        return Text(ABSENT, QUIET), Text(ABSENT, QUIET)
    best = Text(ABSENT, QUIET) if known.best is None else Text(short(known.best))
    return number(known.last, broken=True), best


def groups_table(groups: Sequence[Group], metrics: Sequence[str]) -> Table:
    """Return a row for each group: mean and deviation of metrics over its runs, and what is wrong in how many."""
    numbers = [f"{name} {which}" for name in metrics for which in ("last", "best")]
    table = plain_table("group", "runs", *numbers, "findings", right=("runs", *numbers))
    table.columns[0].min_width = _LEAST_NAME
    for group in groups:
        cells = [_spread(each.get(name)) for name in metrics for each in (group.last, group.best)]
        wrong = [f"{words_of(kind)} in {times}" for kind, times in group.troubles.items()]
        table.add_row(
            Text(group.name), str(len(group.rows)), *cells, Text(", ".join(wrong) or "none", ODD if wrong else QUIET)
        )
    return table


def _spread(spread: Spread | None) -> Text:
    if spread is None:
        return Text(ABSENT, QUIET)
    text = number(spread.mean, broken=True)
    return text if spread.deviation is None else text.append(f" ± {short(spread.deviation)}", QUIET)


def layers_table(layers: Sequence[LayerSpread], names: Sequence[str]) -> Table:
    """Return the layers that differ most between runs or groups."""
    cut = [name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}\N{HORIZONTAL ELLIPSIS}" for name in names]
    table = plain_table("layer", *cut, "ratio", "repeats", right=(*cut, "ratio", "repeats"))
    for row in layers[:_MOST_LAYERS]:
        apart = Text(f"x{2**row.doublings:.3g}") if row.doublings == row.doublings else Text(ABSENT, QUIET)
        within = Text(ABSENT, QUIET) if row.scatter is None else Text(f"x{2**row.scatter:.3g}", QUIET)
        table.add_row(Text(row.site), *(number(value) for value in row.values), apart, within)
    return table


def render_comparison(
    rows: Sequence[RunRow], groups: Sequence[Group], layers: Sequence[LayerSpread], metrics: Sequence[str], look: Look
) -> Iterator[RenderableType]:
    """Yield the parts of the page that `sonde compare` prints."""
    yield runs_table(rows, metrics, look)
    names = [row.name for row in rows]
    if groups:
        yield Text()
        yield Text("Groups: mean ± standard deviation over runs", TITLE)
        yield groups_table(groups, metrics)
        names = [group.name for group in groups]
    if layers:
        yield Text()
        yield Text(f"Layers that differ most: recent RMS{' of groups' if groups else ''}", TITLE)
        yield layers_table(layers, names)
