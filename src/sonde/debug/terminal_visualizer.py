"""Plots, tables and heat maps as text, for terminals and logs."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, cast

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from sonde.analysis import column_edges, columns
from sonde.core.arguments import whole_number
from sonde.errors import OptionError
from sonde.records import Reading
from sonde.views.figures.curves import as_values, check_bins, count_in_bins
from sonde.views.terminal.bars import sparkline
from sonde.views.terminal.heatmap import HeatMap, heat_map
from sonde.views.terminal.plot import Curve, PlotOptions, line_plot
from sonde.views.terminal.style import BAD, BAR, QUIET, TITLE, Look, make_console, short
from sonde.views.terminal.tables import plain_table

Mode = Literal["auto", "braille", "blocks", "ascii"]
Colours = Literal["auto", "none", "256", "truecolor"]
MODES: Final = ("auto", "braille", "blocks", "ascii")
COLOURS: Final = ("auto", "none", "256", "truecolor")
_PARTS: Final = " ▏▎▍▌▋▊▉█"
_STATISTICS: Final = ("count", "mean", "std", "min", "max", "norm", "abs_max", "zero_share", "nan", "inf")
_LEAST_WIDTH: Final = 20
_LEAST_HEIGHT: Final = 4
_MOST_EXACT: Final = 2.0**53
"""Below it every whole number is a float, and the other way round."""


class TerminalVisualizer:
    """Draws with characters. Every method returns a string to print.

    Args:
        width: How many columns a drawing takes.
        height: How many lines.
        mode: `braille` (finest), `blocks` (for fonts without braille), `ascii` (nothing beyond ASCII), or `auto`:
            braille where standard output can encode it.
        colours: `none`, `256`, `truecolor`, or `auto`: as standard output has them; none where it is not a terminal or
            where NO_COLOR is set.

    >>> print(TerminalVisualizer(40, 8, mode="ascii", colours="none").ascii_histogram([1, 2, 2, 3, 3, 3], bins=3))
    1.00 to 1.67 |########  1
    1.67 to 2.33 |###############  2
    2.33 to 3.00 |#######################  3

    """

    def __init__(self, width: int = 80, height: int = 24, *, mode: Mode = "auto", colours: Colours = "auto") -> None:
        _check_size(width, height)
        if mode not in MODES or colours not in COLOURS:
            raise OptionError(f"mode is one of {', '.join(MODES)} and colours one of {', '.join(COLOURS)}.")
        self.width, self.height = width, height
        output = make_console(file=sys.stdout)
        unicode = mode in ("braille", "blocks") or (mode == "auto" and not output.options.ascii_only)
        system = output.color_system if colours == "auto" and not output.no_color else None
        self._system = None if colours == "none" else (colours if colours != "auto" else system)
        self._look = Look(width, unicode, self._system is not None, blocks=mode == "blocks")

    def ascii_histogram(self, values: Any, bins: int = 10, title: str = "") -> str:
        """Draw how values are spread: one line a bin, with how many values it holds."""
        check_bins(bins)
        flat = as_values(values).reshape(-1)
        good = flat[np.isfinite(flat)]
        if not len(good):
            return self._drawn(*self._titled(title), Text(f"no finite value among {len(flat):,}", QUIET))
        counts, edges = count_in_bins(good, bins)
        ranges = [f"{low} to {high}" for low, high in pairwise(_edge_labels(edges))]
        label_width, count_width = max(map(len, ranges)), len(f"{counts.max():,}")
        room = max(self.width - label_width - count_width - 4, 4)
        lines = [
            Text.assemble(
                (f"{label:>{label_width}} ", QUIET), (self._look.pick("│", "|"), QUIET),
                (self._filled(count / counts.max(), room), BAR), f"  {count:,}",
            )
            for label, count in zip(ranges, counts.tolist(), strict=True)
        ]  # fmt: skip
        if len(good) < len(flat):
            lines.append(Text(f"{len(flat) - len(good):,} NaN or infinite left out", BAD))
        return self._drawn(*self._titled(title), *lines)

    def _filled(self, share: float, room: int) -> str:
        if not self._look.unicode:
            return ("#" * round(share * room)).ljust(1)
        eighths = round(share * room * 8)
        # A count above zero is always visible.
        eighths = max(eighths, 1) if share > 0 else 0
        full, rest = divmod(eighths, 8)
        return "█" * full + (_PARTS[rest] if rest else "")

    def ascii_line_plot(self, x: Any, y: Any = None, title: str = "", *, log: bool = False) -> str:
        """Draw a curve; with one sequence only, its values over their index. `y` may be several curves by name."""
        given = x if y is None else y
        curves = given if isinstance(given, Mapping) else {"": given}
        drawn = [
            self._curve(None if y is None else x, values, str(name), i)
            for i, (name, values) in enumerate(curves.items())
        ]
        if not any(np.isfinite(curve.values).any() for curve in drawn):
            number = sum(len(curve.values) for curve in drawn)
            return self._drawn(*self._titled(title), Text(f"no finite value among {number:,}", QUIET))
        height = max(self.height - (2 if title else 1) - 2, _LEAST_HEIGHT)
        return self._drawn(*self._titled(title), line_plot(drawn, self._look, PlotOptions(height=height, log=log)))

    def _curve(self, x: Any, y: Any, name: str, index: int) -> Curve:
        values = as_values(y).reshape(-1)
        places = np.arange(len(values)) if x is None else as_values(x).reshape(-1)
        if len(places) != len(values):
            raise OptionError(f"There are {len(places)} places and {len(values)} values to draw; they must be as many.")
        order = np.argsort(places, kind="stable")
        places = places[order]
        if np.array_equal(places, np.round(places)) and (np.abs(places) < _MOST_EXACT).all():
            places = places.astype(np.int64)
        styles = ("bold cyan", "yellow", "magenta", "green", "blue")
        return Curve(cast(Any, places), values[order], name, styles[index % len(styles)])

    def display_statistics(self, name: str, values: Any) -> str:
        """Return a table of statistics: of values, or of a mapping of names to numbers as it is."""
        if isinstance(values, Mapping):
            known = {str(key): value for key, value in values.items()}
        else:
            reading = Reading.of(as_values(values))
            known = {stat: reading.get(stat) for stat in _STATISTICS}
            known |= {stat: int(known[stat] or 0) for stat in ("count", "nan", "inf")}
        rows = list(known.items())
        return self.table(("statistic", "value"), rows, title=name)

    def heat_map(self, values: Any, names: Sequence[str] | None = None, title: str = "", *, log: bool = False) -> str:
        """Draw rows by columns of numbers as colours or shades; more columns than fit are merged by their medians."""
        grid = np.atleast_2d(as_values(values))
        if grid.ndim != 2:
            raise OptionError(f"A heat map needs a matrix of rows by columns; got an array of shape {grid.shape}.")
        rows = [str(i) for i in range(len(grid))] if names is None else [str(name) for name in names]
        if len(rows) != len(grid):
            raise OptionError(f"{len(rows)} names were given for {len(grid)} rows.")
        if not grid.size:
            return self._drawn(*self._titled(title), Text("no values to draw", QUIET))
        room = max(self.width - min(max(map(len, rows), default=0), max(8, self.width // 3)) - 1, 4)
        shown, bad = self._narrowed(grid, room)
        data = HeatMap(shown, rows, left="0", right=f"{grid.shape[1] - 1:,}", bad=bad, log=log)
        return self._drawn(*self._titled(title), heat_map(data, self._look))

    def _narrowed(self, grid: Any, room: int) -> tuple[Any, Any]:
        bad = np.isinf(grid) | np.isnan(grid)
        if grid.shape[1] <= room:
            return grid, bad
        at, edges = np.arange(grid.shape[1]), column_edges(0, grid.shape[1] - 1, room)
        cuts = np.searchsorted(at, edges[:-1])
        shown = np.stack([columns(at, row, edges) for row in grid]) if len(grid) else grid[:, :room]
        return shown, np.logical_or.reduceat(bad, cuts, axis=1)

    def sparkline(self, values: Any, width: int | None = None) -> str:
        """Draw a curve in one line; more values than fit are merged by their medians."""
        flat, room = as_values(values).reshape(-1), self.width if width is None else whole_number("width", width)
        bad = None
        if len(flat) > room:
            at, edges = np.arange(len(flat)), column_edges(0, len(flat) - 1, room)
            bad = np.logical_or.reduceat(~np.isfinite(flat), np.searchsorted(at, edges[:-1]))
            flat = columns(at, flat, edges)
        else:
            bad = ~np.isfinite(flat)
        return self._drawn(sparkline(flat, self._look, bad=bad))

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> str:
        """Draw a table; numbers are set flush right."""
        numeric = [heading for i, heading in enumerate(headings) if _all_numbers(rows, i)]
        drawn = plain_table(*headings, right=numeric)
        for row in rows:
            drawn.add_row(*(Text(_cell(value)) for value in row))
        return self._drawn(*self._titled(title), drawn)

    def _titled(self, title: str) -> list[Text]:
        return [Text("".join(char if char.isprintable() else " " for char in title), TITLE)] if title else []

    def _drawn(self, *parts: RenderableType) -> str:
        target = io.StringIO()
        console = Console(
            file=target,
            width=self.width,
            color_system=cast(Any, self._system),
            force_terminal=self._system is not None,
            no_color=False,
            highlight=False,
            legacy_windows=False,
        )
        for part in parts:
            console.print(part)
        lines = [line.rstrip() for line in target.getvalue().splitlines()]
        text = "\n".join(lines)
        return text if self._look.unicode else text.encode("ascii", "replace").decode()


def _check_size(width: Any, height: Any) -> None:
    whole = isinstance(width, int) and isinstance(height, int)
    if not whole or width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        raise OptionError(
            f"A drawing takes a whole number of columns and lines, at least {_LEAST_WIDTH} by {_LEAST_HEIGHT}; "
            f"got {width!r} by {height!r}."
        )


def _edge_labels(edges: Any) -> list[str]:
    """Write the edges of bins with two digits of a bin's width, so that neighbours differ."""
    large = np.abs(edges).max() >= 1e6
    digits = 0 if large else 1 - int(np.floor(np.log10(edges[1] - edges[0])))
    if large or digits > 6:
        return [short(float(edge)) for edge in edges]
    return [f"{edge:.{max(digits, 0)}f}" for edge in edges]


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not isinstance(value, bool)):
        return short(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "".join(char if char.isprintable() else " " for char in str(value))


def _all_numbers(rows: Sequence[Sequence[Any]], index: int) -> bool:
    cells = [row[index] for row in rows if index < len(row)]
    return bool(cells) and all(cell is None or isinstance(cell, int | float) for cell in cells)
