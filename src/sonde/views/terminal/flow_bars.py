"""Gradient flow as bars: one per layer, from the input to the output of the model, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sonde.analysis import FlowRow
from sonde.views.terminal.axis import power_of_ten
from sonde.views.terminal.look import Look
from sonde.views.terminal.numbers import short
from sonde.views.terminal.palette import BAR, LEVEL_STYLES, QUIET
from sonde.views.terminal.spark import bar
from sonde.views.terminal.tables import number, plain_table, ratio

MOST_ROWS = 24
_MOST_BAR = 56
_MOST_DECADES_BELOW = 2.0


def flow_bars(flow: Sequence[FlowRow], look: Look, *, most: int = MOST_ROWS) -> Group:
    """Draw the gradient of each layer as a bar, with its update ratio; a long model is thinned evenly."""
    shown = _thinned(flow, most)
    low, high = _scale([row.gradient for row in flow])
    names = max((len(row.name) for row in shown), default=0)
    names = max(len("layer"), min(names, look.width // 3))
    width = min(max(8, look.width - names - 2 - 10 - 10 - 2), _MOST_BAR)
    table: Table = plain_table("layer", "", "gradient", "update/w", right=("gradient", "update/w"))
    table.columns[0].max_width, table.columns[0].overflow = names, "ellipsis"
    table.columns[0].no_wrap = True
    for row in shown:
        style = LEVEL_STYLES[row.mark.level] or BAR
        share = _share(row.gradient, low, high)
        table.add_row(
            Text(look.fit(row.name or "(model)", names), LEVEL_STYLES[row.mark.level]),
            bar(share, width, look, style=style),
            number(row.gradient),
            ratio(row.ratio),
        )
    return Group(table, Text(_note(flow, shown, low, high), QUIET))


def _scale(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms of where bars begin and of where they are full."""
    known = np.array([value for value in values if np.isfinite(value) and value > 0])
    if not len(known):
        return -1.0, 0.0
    logs = np.log10(known)
    # One layer that is far below the others must not flatten their differences: it gets no bar, which says enough.
    low = max(float(logs.min()) - 0.3, float(np.median(logs)) - _MOST_DECADES_BELOW)
    high = min(float(logs.max()), float(np.median(logs)) + _MOST_DECADES_BELOW)
    return min(low, high - 1.0), high


def _share(value: float, low: float, high: float) -> float:
    if not np.isfinite(value) or value <= 0:
        return 0.0
    return float((np.log10(value) - low) / (high - low))


def _thinned(flow: Sequence[FlowRow], most: int) -> list[FlowRow]:
    if len(flow) <= most:
        return list(flow)
    even = set(np.linspace(0, len(flow) - 1, most).round().astype(int).tolist())
    return [row for index, row in enumerate(flow) if index in even or row.mark.level != "fine"]


def _note(flow: Sequence[FlowRow], shown: Sequence[FlowRow], low: float, high: float) -> str:
    thinned = f"{len(shown)} of {len(flow)} layers; " if len(shown) < len(flow) else ""
    ends = f"from {short(power_of_ten(low))} to {short(power_of_ten(high))}"
    return f"{thinned}rms of the gradient of the weight, bars {ends}, logarithmic"
