"""Answers: strict JSON or raw bytes, and errors as JSON with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sonde.core import files
from sonde.errors import MissingExtra, OptionError, RunDamaged, RunNotFound, SelectionError, SondeError
from sonde.views.web.library import Library, OpenRun

Answer: TypeAlias = Callable[[OpenRun, "Query"], Any]
_STATUS: dict[type[SondeError], int] = {RunNotFound: 404, SelectionError: 404, OptionError: 400, RunDamaged: 422}


class Query:
    """What a request asks for, after the question mark and in its path."""

    def __init__(self, request: Request) -> None:
        self.path: dict[str, str] = {name: str(value) for name, value in request.path_params.items()}
        self._given = request.query_params

    def text(self, name: str, usual: str = "") -> str:
        """Return a text."""
        return self._given.get(name) or usual

    def texts(self, name: str) -> list[str]:
        """Return a text that is given several times, in order and each once."""
        return list(dict.fromkeys(each for each in self._given.getlist(name) if each))

    def flag(self, name: str) -> bool:
        """Return whether something is wanted."""
        return self._given.get(name, "") in ("1", "true", "yes")

    def number(self, name: str, usual: int | None = None, *, least: int = 0, most: int = 2**53) -> int | None:
        """Return a whole number between bounds.

        Raises:
            OptionError: It is not a whole number.

        """
        given = self._given.get(name)
        if not given:
            return usual
        try:
            return min(max(int(given), least), most)
        except ValueError:
            raise OptionError(f"{name}={given!r:.40} is not a whole number.") from None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of a few words; the first is the usual one.

        Raises:
            OptionError: It is none of them.

        """
        given = self._given.get(name) or choices[0]
        if given not in choices:
            raise OptionError(f"{name}={given!r:.40} is not known; use one of {', '.join(choices)}.")
        return given

    @property
    def key(self) -> tuple[Any, ...]:
        """All of it, as the key of an answer that is kept."""
        return (*sorted(self.path.items()), *sorted(self._given.multi_items()))


def as_json(value: Any) -> Response:
    """Return strict JSON; what is not a finite number is null."""
    # A lone surrogate, which UTF-8 cannot hold, becomes its escape in JSON.
    return Response(files.text(value).encode("utf-8", "backslashreplace"), media_type="application/json")


def as_bytes(value: bytes, kind: str = "application/octet-stream") -> Response:
    """Return raw bytes, such as little-endian numbers that are drawn on a canvas."""
    return Response(value, media_type=kind)


def run_route(library: Library, path: str, answer: Answer) -> Route:
    """Return the route of a question about one run: `api/run/{run}/` and the path. It is kept until it changes."""

    def endpoint(request: Request) -> Response:
        opened, query = library.open(request.path_params["run"]), Query(request)
        version = opened.refresh()  # before it is made: an answer may be newer than it says, but never older
        made = opened.keep((path, query.key), lambda: _packed(answer(opened, query)))
        # The page may keep it too, until it hears of another version.
        return Response(made, media_type="application/json", headers={"Sonde-Version": str(version)})

    return Route(f"/api/run/{{run}}{'/' + path if path else ''}", endpoint)


def raw_route(library: Library, path: str, answer: Callable[[OpenRun, Query], Response]) -> Route:
    """Return the route of a question about one run whose answer is a response of its own, and is not kept."""

    def endpoint(request: Request) -> Response:
        return answer(library.open(request.path_params["run"]), Query(request))

    return Route(f"/api/run/{{run}}/{path}", endpoint)


def _packed(value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(as_json(value).body)


def plain_route(path: str, answer: Callable[[Query], Any]) -> Route:
    """Return the route of a question that is not about one run."""

    def endpoint(request: Request) -> Response:
        return as_json(answer(Query(request)))

    return Route(f"/api/{path}", endpoint)


def known_error(request: Request, error: Exception) -> Response:
    """Answer with an error of ours."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
    status = 501 if isinstance(error, MissingExtra) else status
    return JSONResponse({"error": str(error), "kind": type(error).__name__}, status)


def not_found(request: Request, error: Exception) -> Response:
    """Answer with an error of the web's own, such as a path that leads nowhere."""
    code = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path[:200]
    if "text/html" in request.headers.get("accept", "") and "/api/" not in path:
        return HTMLResponse(_nowhere(path), code)
    return JSONResponse({"error": f"There is nothing at {path}."}, code)


def _nowhere(path: str) -> str:
    """Return the page for an address that does not exist. All links are relative."""
    up = "../" * (path.count("/") - 1) or "./"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Nothing here · Sonde</title>'
        f'<link rel="stylesheet" href="{up}assets/theme.css"></head><body><main class="page"><div class="empty">'
        f"<h1>There is nothing here</h1><p>No page of this viewer is at <code>{escape(path)}</code>.</p>"
        f'<p><a href="{up}">All runs</a></p></div></main></body></html>'
    )


def server_error(request: Request, error: Exception) -> Response:
    """Answer where the viewer itself is at fault; its terminal shows the traceback."""
    return JSONResponse(
        {"error": f"The viewer failed: {type(error).__name__}. See its terminal for the traceback."}, 500
    )
