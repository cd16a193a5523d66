"""The viewer as an ASGI app: its routes behind the guard."""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from sonde.errors import SondeError
from sonde.views import web
from sonde.views.web.answers import known_error, not_found, server_error
from sonde.views.web.bundle import bundle_viewer, read_page
from sonde.views.web.guard import LOOPBACK, Guard
from sonde.views.web.library import Library

ASSETS: Final = Path(__file__).with_name("assets")


def make_app(
    roots: Sequence[str | Path], *, token: str, hosts: Iterable[str] = LOOPBACK, frames: str = "'self'"
) -> Starlette:
    """Return the app that shows the runs below some folders.

    Args:
        roots: Runs, or folders with runs below them. Nothing outside is ever read.
        token: What a request must know: as `?token=` once, then as a cookie; or as a header.
        hosts: Names and addresses that the server goes by.
        frames: Pages that may show the viewer inside them, as a content security policy lists them.

    """
    library = Library(roots)
    routes: list[BaseRoute] = [
        Route("/", _page),
        Route("/viewer.js", _script),
        Route("/plotly.js", _plotly),
        Mount("/assets", StaticFiles(directory=ASSETS)),
    ]
    routes += _api_routes(library)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, token=token, hosts=tuple(hosts), frames=frames),
            Middleware(GZipMiddleware, minimum_size=4096, compresslevel=4),
        ],
        exception_handlers={
            SondeError: known_error,
            HTTPException: not_found,
            Exception: server_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.library = library
    return app


def _api_routes(library: Library) -> Iterator[BaseRoute]:
    """Yield the routes of every module `*_api` that has a function `routes(library)`."""
    for info in pkgutil.iter_modules(web.__path__, f"{web.__name__}."):
        if info.name.endswith("_api") and hasattr(topic := import_module(info.name), "routes"):
            yield from topic.routes(library)


# The page asks for scripts by version, so one that a browser kept is never the wrong one.
_KEPT: Final = {"Cache-Control": "private, max-age=31536000, immutable"}


@cache
def _viewer() -> tuple[str, str]:
    """Return the script of the viewer and the page that loads it."""
    script = bundle_viewer()
    digest = hashlib.sha256(script.encode()).hexdigest()[:12]
    loading = f'<script defer src="viewer.js?v={digest}" data-plotly="{version("plotly")}"></script>'
    return script, read_page(loading)


def _page(request: Request) -> Response:
    return HTMLResponse(_viewer()[1])


def _script(request: Request) -> Response:
    return Response(_viewer()[0], media_type="text/javascript", headers=_KEPT)


def _plotly(request: Request) -> Response:
    """Send the script that draws figures, as the installed package carries it; browsers may keep it."""
    script = files("plotly") / "package_data" / "plotly.min.js"
    return FileResponse(str(script), media_type="text/javascript", headers=_KEPT)
