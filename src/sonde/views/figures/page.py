"""One page with any number of figures, in one file: it opens from disk and asks the network for nothing.

The script of Plotly is written into the page once. A content security policy names the hashes of the page's own two
scripts, so nothing else in it can run, whatever the names in a run contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from sonde.views.figures.library import Figure, plotly_js
from sonde.views.figures.theme import THEMES, template


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a page: a title, ready-made HTML, and figures below it."""

    title: str
    figures: Sequence[Figure] = ()
    html: str = ""
    anchor: str = ""
    columns: int = field(default=1)


def page(title: str, parts: Sequence[Part], *, lead: str = "") -> str:
    """Return a whole page. `title` and the titles of parts are plain text; `lead` and the HTML of parts are not."""
    figures = [figure for part in parts for figure in part.figures]
    drawing = _asset("page.js")
    library = plotly_js() if figures else ""
    scripts = [script for script in (library, drawing) if script]
    body = [f"<h1>{escape(title)}</h1>", lead, _contents(parts)]
    number = 0
    for part in parts:
        body.append(_section(part, number))
        number += len(part.figures)
    data = {
        "figures": [json.loads(figure.to_json()) for figure in figures],
        "templates": _templates() if figures else {},
    }
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_asset('page.css')}</style></head><body>",
            '<button id="theme" type="button" aria-label="Switch between light and dark">light / dark</button>',
            "<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="figures">{_inert(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _section(part: Part, first: int) -> str:
    heading = f"<h2>{escape(part.title)}</h2>" if part.title else ""
    anchor = f' id="{escape(part.anchor)}"' if part.anchor else ""
    plots = "".join(
        f'<div class="plot" data-figure="{first + index}" role="img" aria-label="{_label(figure)}"></div>'
        for index, figure in enumerate(part.figures)
    )
    grid = f'<div class="plots columns-{part.columns}">{plots}</div>' if plots else ""
    return f"<section{anchor}>{heading}{part.html}{grid}</section>"


def _label(figure: Figure) -> str:
    text = str(figure.layout.title.text or "figure").partition("<br>")[0]
    # The title is escaped for Plotly already.
    return text.replace('"', "&quot;").replace("'", "&#39;")


def _contents(parts: Sequence[Part]) -> str:
    named = [part for part in parts if part.anchor and part.title]
    links = "".join(f'<a href="#{escape(part.anchor)}">{escape(part.title)}</a>' for part in named)
    return f'<nav aria-label="Contents">{links}</nav>' if len(named) > 1 else ""


def _templates() -> dict[str, Any]:
    return {theme: template(theme).to_plotly_json() for theme in THEMES}


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    rules = ("default-src 'none'", f"script-src {hashes}", "style-src 'unsafe-inline'", "img-src data: blob:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _inert(data: Any) -> str:
    """Return JSON that no HTML parser takes for markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("sonde.views.figures").joinpath("assets", name).read_text(encoding="utf-8")
