"""Figures as files: a self-contained page, JSON, or a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sonde.errors import MissingExtra, OptionError
from sonde.views.figures.theme import Figure, captions

_PICTURES = ("png", "svg", "pdf", "jpeg", "webp")


def to_json(figure: Figure) -> str:
    """Return a figure as the JSON that Plotly reads: `plotly.io.from_json` makes the figure again.

    Arrays are packed as base64 with their dtype, which keeps every bit and stays strict JSON.
    """
    text: str = figure.to_json()
    return text


def to_html(figure: Figure) -> str:
    """Return a page with one figure that opens anywhere, also without a network."""
    from sonde.views.document import figure_page

    return figure_page(captions(figure).title or "figure", [figure])


def write(figure: Figure, path: str | Path, *, width: int = 800, height: int = 600, scale: float = 2) -> Path:
    """Write a figure to a file; its ending says as what: html, json, png, svg, pdf, jpeg or webp.

    Raises:
        OptionError: The ending means no format.
        MissingExtra: A picture was asked for and kaleido, which makes them, is not installed.

    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = target.suffix.lower().lstrip(".").replace("jpg", "jpeg")
    if kind == "html":
        target.write_text(to_html(figure), encoding="utf-8")
    elif kind == "json":
        target.write_text(to_json(figure), encoding="utf-8")
    elif kind in _PICTURES:
        target.write_bytes(_picture(figure, kind, width, height, scale))
    else:
        raise OptionError(f"{target.name} ends in no known format; use one of html, json, {', '.join(_PICTURES)}.")
    return target


def _picture(figure: Figure, kind: str, width: int, height: int, scale: float) -> bytes:
    if find_spec("kaleido") is None:
        raise MissingPictures(kind)
    made: Any = figure.to_image(format=kind, width=width, height=height, scale=scale)
    return bytes(made)


class MissingPictures(MissingExtra):
    """Kaleido, which turns figures into pictures, is not installed."""

    def __init__(self, kind: str) -> None:
        ImportError.__init__(
            self,
            f"Writing {kind} needs kaleido, which is not installed. Run: pip install kaleido. "
            "An .html file needs nothing more, and its toolbar saves a picture.",
        )
