"""Line plots: curves over steps with round ticks, gaps where there is nothing to draw, and marks at steps of note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Group
from rich.text import Text

from sonde.analysis import Steps, Values, thin
from sonde.views.terminal.axis import Axis, tick_labels
from sonde.views.terminal.canvas import Canvas
from sonde.views.terminal.look import Look
from sonde.views.terminal.palette import BAD, CURVE, QUIET


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One curve of a plot. A later curve is drawn over an earlier one."""

    steps: Steps
    values: Values
    label: str = ""
    style: str = CURVE


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """How to draw a plot: its height in lines, its scale, and steps to mark under the axis."""

    height: int = 8
    log: bool = False
    marks: Sequence[int] = field(default=())


def line_plot(curves: Sequence[Curve], look: Look, options: PlotOptions | None = None) -> Group:
    """Draw curves over steps, as wide as the look says."""
    options = options or PlotOptions()
    everything = np.concatenate([curve.values for curve in curves]) if curves else np.empty(0)
    steps = np.concatenate([curve.steps for curve in curves]) if curves else np.empty(0, dtype=np.int64)
    y_axis = Axis.around(everything, log=options.log)
    x_axis = Axis.around(steps.astype(np.float64))
    y_labels = _y_labels(y_axis, options.height)
    gutter = max((len(label) for label in y_labels.values()), default=0)
    canvas = Canvas(max(look.width - gutter - 2, 8), options.height)
    for curve in curves:
        # More points than dots cannot be seen; extremes are kept.
        at, of = thin(curve.steps, curve.values, canvas.width * 10)
        canvas.draw(x_axis.place(at.astype(np.float64)), y_axis.place(of), curve.style)
    lines = [
        Text.assemble((f"{y_labels.get(row, ''):>{gutter}} ", QUIET), (_wall(look, row in y_labels), QUIET), text)
        for row, text in enumerate(canvas.lines(unicode=look.unicode, blocks=look.blocks))
    ]
    lines += _x_lines(x_axis, canvas.width, gutter + 1, options.marks, look, whole=steps.dtype.kind in "iu")
    legend = [curve for curve in curves if curve.label]
    if len(legend) > 1:
        lines.append(_legend(legend, gutter + 2, look))
    return Group(*lines)


def _wall(look: Look, tick: bool) -> str:
    return look.pick("┤" if tick else "│", "+" if tick else "|")


def _y_labels(axis: Axis, height: int) -> dict[int, str]:
    ticks = axis.ticks(max(2, height // 2 + 1))
    rows = np.round((1 - axis.place(np.array(ticks))) * (height * 4 - 1)) // 4
    return dict(zip((int(row) for row in rows), tick_labels(ticks), strict=True))


def _x_lines(axis: Axis, width: int, indent: int, marks: Sequence[int], look: Look, *, whole: bool) -> list[Text]:
    # There is no half a step.
    ticks = [tick for tick in axis.ticks(max(2, width // 12)) if not whole or tick == int(tick)]
    labels = tick_labels(ticks)
    floor = [look.pick("─", "-")] * width
    under = [" "] * (width + 8)
    for tick, label in zip(ticks, labels, strict=True):
        column = _column(axis, tick, width)
        floor[column] = look.pick("┴", "+")
        start = max(0, min(column - len(label) // 2, width - len(label)))
        if "".join(under[max(start - 1, 0) : start + len(label) + 1]).strip() == "":
            under[start : start + len(label)] = label
    ground = Text(" " * indent + look.pick("└", "+"), QUIET)
    marked = {_column(axis, step, width) for step in marks if axis.low <= step <= axis.high}
    for column, sign in enumerate(floor):
        ground.append(*(look.pick("▲", "^"), BAD) if column in marked else (sign, QUIET))
    return [ground, Text(" " * (indent + 1) + "".join(under).rstrip(), QUIET)]


def _column(axis: Axis, step: float, width: int) -> int:
    return int(np.clip(round(float(axis.place(np.array([step]))[0]) * (width * 2 - 1)) // 2, 0, width - 1))


def _legend(curves: Sequence[Curve], indent: int, look: Look) -> Text:
    text = Text(" " * indent)
    for curve in curves:
        text.append(look.pick("──", "--") + " ", curve.style)
        text.append(curve.label + "   ", QUIET)
    return text
