"""One look for all figures: light and dark, safe for colour-blind readers, and plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import unescape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from sonde.core import schema, statistics
from sonde.core.short_names import short_keys
from sonde.errors import MissingExtra, OptionError
from sonde.views.terminal.style import printable

if TYPE_CHECKING:
    import plotly.graph_objects


# --------------------------------------------------------------------------------
# Plotly, asked for at the moment something is drawn and not before.


Figure: TypeAlias = "plotly.graph_objects.Figure"


def graph_objects() -> Any:
    """Return the module that figures are made of.

    Raises:
        MissingExtra: Plotly is not installed.

    """
    return _plotly("graph_objects")


def subplots() -> Any:
    """Return the module that puts several plots into one figure."""
    return _plotly("subplots")


def plotly_js() -> str:
    """Return the script that draws figures in a browser, as the installed package carries it."""
    script: str = _plotly("offline").get_plotlyjs()
    return script


def _plotly(module: str) -> Any:
    try:
        return import_module(f"plotly.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("plotly"):
            raise
        raise MissingExtra("plotly", "view", "Drawing figures") from None


# --------------------------------------------------------------------------------
# Names and numbers inside figures. Names come from runs that strangers may have written.


_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MAX_CHARACTERS: Final = 2000


def safe(text: object) -> str:
    """Return a text that Plotly shows as it is: no tags, no entities, no control characters.

    >>> safe("<b>layer</b>")
    '&lt;b&gt;layer&lt;/b&gt;'
    """
    shown = printable(str(text)[:_MAX_CHARACTERS])
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut(name: str, most: int = 28) -> str:
    """Cut a dotted name from the left, because its end says more than its beginning; the block stays.

    >>> cut("transformer.blocks.11.attention.projection", 20), cut("11 · attention.projection", 20)
    ('…ttention.projection', '11 · …ion.projection')
    """
    block, dot, role = name.rpartition(" · ")
    room = most - len(block) - len(dot)
    return name if len(name) <= most else f"{block}{dot}…{role[max(len(role) - room + 1, 0) :]}"


def labels(names: Sequence[str], most: int = 34) -> list[str]:
    """Return short, safe names for the ticks of an axis: block and role, without what all of them share."""
    return [safe(cut(name, most)) for name in short_keys(names)]


def power(base: int, exponent: int) -> str:
    """Write a power.

    >>> power(2, -12)
    '2⁻¹²'
    """
    return f"{base}{str(exponent).translate(_SUPERSCRIPTS)}"


def bin_label(index: int) -> str:
    """Return which magnitudes a histogram bin holds; the two at the ends are open.

    >>> bin_label(47), bin_label(63)
    ('2⁰ ≤ |x| < 2¹', '|x| ≥ 2¹⁶')
    """
    exponent = index + schema.FIRST_EXPONENT
    if index == 0:
        return f"0 < |x| < {power(2, exponent + 1)}"
    if index == schema.NUM_BINS - 1:
        return f"|x| ≥ {power(2, exponent)}"
    return f"{power(2, exponent)} ≤ |x| < {power(2, exponent + 1)}"


def stat_title(stat: str, quantity: str = "") -> str:
    """Return the name of a statistic on an axis, with the quantity it is of."""
    row = statistics.find(stat)
    return row.title + (f" of the {quantity.replace('_', ' ')}" if quantity and row.quantity is None else "")


def as_title(text: str) -> str:
    """Return words as a title begins.

    >>> as_title("share of zeros")
    'Share of zeros'
    """
    return f"{text[:1].upper()}{text[1:]}"


# --------------------------------------------------------------------------------


Theme = Literal["light", "dark"]
THEMES: Final[tuple[Theme, ...]] = ("light", "dark")

# After Okabe and Ito: distinct with any common kind of colour blindness, and readable on white and on near-black.
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = "#2f81c7", "#d55e00", "#009e73", "#cc79a7", "#c98a00", "#56b4e9"
GREY, PURPLE = "#8b8f98", "#8c6bb1"
COLOURS: Final = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY, PURPLE, GREY)
BAD: Final = "#d1293d"
SEVERITY_COLOURS: Final = {"critical": BAD, "warning": AMBER, "info": BLUE}
# Perceptually even, from dark to bright; the second runs through the background at zero.
SEQUENTIAL: Final = "Viridis"
DIVERGING: Final = "RdBu_r"

_HEIGHT: Final = 400
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_PAPER: Final = {"light": "#ffffff", "dark": "#14171c"}
_INK: Final = {"light": "#24292f", "dark": "#dfe3e8"}
_QUIET: Final = {"light": "#6a7178", "dark": "#98a0a9"}
_GRID: Final = {"light": "#e9ebee", "dark": "#2a2f36"}
_LINE: Final = {"light": "#c3c8ce", "dark": "#464d56"}


def template(theme: Theme = "light") -> Any:
    """Return the Plotly template of a theme.

    Raises:
        OptionError: There is no such theme.

    """
    if theme not in THEMES:
        raise OptionError(f"There is no theme {theme!r}. There are: {', '.join(THEMES)}.")
    return graph_objects().layout.Template(layout=_layout(theme))


def _layout(theme: Theme) -> dict[str, Any]:
    axis = {
        "gridcolor": _GRID[theme],
        "linecolor": _LINE[theme],
        "zerolinecolor": _LINE[theme],
        "tickcolor": _LINE[theme],
        "tickfont": {"size": 11, "color": _QUIET[theme]},
        "title": {"font": {"size": 12, "color": _QUIET[theme]}, "standoff": 8},
        "automargin": True,
        "zeroline": False,
        "exponentformat": "power",
    }
    return {
        "font": {"family": _FONT, "size": 12, "color": _INK[theme]},
        "title": {"font": {"size": 16, "color": _INK[theme]}, "x": 0, "xref": "container", "pad": {"l": 10}},
        "paper_bgcolor": _PAPER[theme],
        "plot_bgcolor": _PAPER[theme],
        "colorway": list(COLOURS),
        "xaxis": axis,
        "yaxis": axis,
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "font": {"size": 11}},
        "hoverlabel": {"font": {"family": _FONT, "size": 12}, "namelength": -1, "align": "left"},
        "margin": {"l": 60, "r": 24, "t": 72, "b": 56},
        "coloraxis": {"colorbar": {"thickness": 12, "outlinewidth": 0, "tickfont": {"size": 11}}},
        "annotationdefaults": {"font": {"size": 12, "color": _QUIET[theme]}, "showarrow": False},
        "shapedefaults": {"line": {"color": _LINE[theme], "width": 1}},
    }


@dataclass(frozen=True, slots=True)
class Captions:
    """The texts around a figure, as plain text."""

    title: str = ""
    note: str = ""
    missing: str = ""
    """What is missing, if there is nothing to draw."""


def captions(figure: Figure) -> Captions:
    """Return the texts that `finish` or `empty` gave a figure; a figure from elsewhere has its title only."""
    kept = figure.layout.meta
    if isinstance(kept, dict) and isinstance(kept.get("captions"), dict):
        return Captions(**{name: unescape(text) for name, text in kept["captions"].items()})
    return Captions(title=unescape(str(figure.layout.title.text or "")))


def finish(figure: Figure, title: str, note: str = "", *, theme: Theme = "light", **layout: Any) -> Figure:
    """Give a figure its title, a quiet line under it, and its theme. Title and note are shown as they are written.

    Both also travel as data in the figure's `layout.meta`, for pages that show them outside of the plot.
    """
    return _finish(figure, Captions(title, note), theme, layout)


def _finish(figure: Figure, texts: Captions, theme: Theme, layout: dict[str, Any]) -> Figure:
    # Like every text in a figure, they are kept in a form that is never taken for markup.
    kept = {name: safe(text) for name, text in asdict(texts).items()}
    under = f"<br><span style='font-size:12px;opacity:0.7'>{kept['note']}</span>" if texts.note else ""
    height = int(layout.pop("height", None) or figure.layout.height or _HEIGHT)
    # The title keeps its distance from the top however high the figure is.
    place = {"text": f"{kept['title']}{under}", "y": 1 - 24 / height, "yref": "container", "yanchor": "top"}
    figure.update_layout(template=template(theme), title=place, height=height, meta={"captions": kept})
    figure.update_layout(**layout)
    if _has_legend(figure) and figure.layout.margin.b is None:
        figure.update_layout(margin={"b": 92})
    if figure.layout.annotations and figure.layout.margin.t is None and _has_panels(figure):
        figure.update_layout(margin={"t": 104})
        figure.update_annotations(font={"size": 12})
    return figure


def _has_legend(figure: Figure) -> bool:
    shown = [trace for trace in figure.data if getattr(trace, "showlegend", False) is not False and trace.name]
    return bool(figure.layout.showlegend is not False and shown)


def _has_panels(figure: Figure) -> bool:
    return "xaxis2" in figure.layout


def log_axis(values: Any) -> dict[str, Any]:
    """Return a logarithmic axis: a label at each power of ten, and faint lines between, where there are several."""
    known = np.asarray(values, dtype=np.float64).reshape(-1)
    known = known[np.isfinite(known) & (known > 0)]
    decades = float(np.log10(known.max()) - np.log10(known.min())) if len(known) else 0.0
    if decades < 0.5:
        return {"type": "log", "tickformat": "~g", "nticks": 6}
    if decades < 2:
        return {"type": "log", "tickformat": "~g", "dtick": "D2"}  # at 1, 2 and 5 of each decade
    return {"type": "log", "dtick": max(1, int(decades // 7))}


def linear_axis(values: Any) -> dict[str, Any]:
    """Return a linear axis; around a constant it is so narrow that its ticks say which number that is."""
    known = np.asarray(values, dtype=np.float64).reshape(-1)
    known = known[np.isfinite(known)]
    if not len(known) or known.min() < known.max() or not known[0]:
        return {"type": "linear"}
    reach = abs(float(known[0])) / 2
    return {"type": "linear", "range": [float(known[0]) - reach, float(known[0]) + reach]}


def apply_theme(figure: Figure, theme: Theme) -> Figure:
    """Change the theme of a figure in place, and return it."""
    figure.update_layout(template=template(theme))
    return figure


def empty(title: str, missing: str, *, theme: Theme = "light") -> Figure:
    """Return a figure that has nothing to draw and says what is missing."""
    figure = graph_objects().Figure()
    figure.add_annotation(text=safe(missing), x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    hidden = {"visible": False}
    texts = Captions(title, missing=missing)
    return _finish(figure, texts, theme, {"xaxis": hidden, "yaxis": hidden, "height": 260})


def colour_scale(count: int) -> list[str]:
    """Return `count` colours that run evenly from dark to bright, for curves that have an order."""
    from sonde.views.terminal.style import ramp

    # The ends of the ramp are too pale on white, and too dark on black.
    shares = [0.2 + 0.65 * index / max(count - 1, 1) for index in range(count)]
    return [ramp(share).get_truecolor().hex for share in shares]
