"""Documents as one HTML file: it opens from disk and asks the network for nothing.

A content security policy names the hashes of the page's own scripts (Plotly's, where there are figures, and the one
that draws), so nothing else can run, whatever the names in a run contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from sonde.errors import MissingExtra
from sonde.records import words_of
from sonde.views.document.finding_text import rows_of, when
from sonde.views.document.model import Curves, Document, Figures
from sonde.views.terminal.style import short

if TYPE_CHECKING:
    import jinja2

_CURVE_WIDTH: Final = 300
_CURVE_HEIGHT: Final = 60


def to_html(document: Document) -> str:
    """Write a document.

    Raises:
        MissingExtra: jinja2 is not installed, or the document has figures and plotly is not.

    """
    page = _Page()
    return _template().render(
        title=document.title,
        lead=document.lead,
        sections=document.shown,
        style=_asset("page.css"),
        place=page.place,
        scripts_of=page.scripts,
        policy=_policy,
        data=page.data,
    )


@cache
def _template() -> jinja2.Template:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise MissingExtra("jinja2", "view", "Writing HTML") from None
    world = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    world.filters |= {"words_of": words_of, "when": when, "rows_of": rows_of, "curve_lines": curve_lines}
    return world.from_string(_asset("page.html"))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the figures of a block go, and sentences for those that have nothing to draw."""

    places: list[tuple[int, str]]
    missing: list[str]


class _Page:
    """Collects the figures of a page while it is written."""

    def __init__(self) -> None:
        self._figures: list[Any] = []

    def place(self, block: Figures) -> _Places:
        """Draw the figures of a block and number them."""
        from sonde.views.figures.theme import captions

        places, missing = list[tuple[int, str]](), list[str]()
        for figure in block.draw():
            about = captions(figure)
            if about.missing:
                missing.append(about.missing)
                continue
            places.append((len(self._figures), about.title or "figure"))
            self._figures.append(figure)
        return _Places(places, missing)

    def scripts(self) -> list[str]:
        """Return the page's scripts: with figures, Plotly's too."""
        from sonde.views.figures.theme import plotly_js

        return [*([plotly_js()] if self._figures else []), _asset("page.js")]

    def data(self) -> str:
        """Return the figures as JSON that no HTML parser takes for markup."""
        from sonde.views.figures.theme import THEMES, template

        themes = {theme: template(theme).to_plotly_json() for theme in THEMES} if self._figures else {}
        values = {"figures": [json.loads(figure.to_json()) for figure in self._figures], "templates": themes}
        text = json.dumps(values, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def curve_lines(block: Curves) -> Iterator[dict[str, Any]]:
    """Yield each curve that has something to draw: its name, its range, and the points of its unbroken pieces."""
    for name, values in block.curves.items():
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) > 1:
            low, high = min(finite), max(finite)
            yield {"name": name, "range": f"{short(low)} to {short(high)}", "lines": _pieces(values, low, high)}


def _pieces(values: Sequence[float], low: float, high: float) -> list[str]:
    span, steps = (high - low) or 1.0, max(len(values) - 1, 1)
    pieces: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if math.isfinite(value):
            x, y = index / steps * _CURVE_WIDTH, _CURVE_HEIGHT - (value - low) / span * (_CURVE_HEIGHT - 4) - 2
            pieces[-1].append(f"{x:.1f},{y:.1f}")
        elif pieces[-1]:
            pieces.append([])
    return [" ".join(points) for points in pieces if points]


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    rules = ("default-src 'none'", f"script-src {hashes}", "style-src 'unsafe-inline'", "img-src data: blob:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("sonde.views.document").joinpath("assets", name).read_text(encoding="utf-8")
