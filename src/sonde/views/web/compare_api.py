"""Several runs beside each other."""

from __future__ import annotations

from starlette.routing import Route

from sonde.views.web.library import Library


def routes(library: Library) -> list[Route]:
    """Return the routes of the page *Compare*."""
    return []
