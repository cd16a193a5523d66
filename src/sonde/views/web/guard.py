"""Access control: a request needs the token, one of our host names, and no foreign origin.

Any web page can make a browser send requests to a local server. So every request needs the token; the `Host` must be
ours, which prevents DNS rebinding; and the `Origin`, if there is one, must be ours too.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS: Final = "*"
"""Matches every numeric address, which cannot be rebound as a name can."""

# Plotly gives its elements style attributes and a style sheet; nothing but our own files ever runs as script.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
_MISSING: Final = (
    "This viewer answers only to its token. Open the address that `sonde view` printed, which ends in ?token=..."
)


class Guard:
    """Lets a request through to the app, or answers it with what is wrong with it.

    Args:
        app: What is guarded.
        token: What a request must know.
        hosts: Names and addresses that this server goes by; `*` matches any numeric address.
        frames: Pages that may show the viewer inside them, as a content security policy lists them.

    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Iterable[str], frames: str = "'self'") -> None:
        self._app, self._token, self._hosts = app, token, frozenset(name.lower() for name in hosts)
        # Not the token: a cookie that leaks opens this server only, and only until it ends.
        self._session = secrets.token_urlsafe(24)
        self._policy = _POLICY.format(frames=frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._reject(scope)
            await (answer or self._app)(scope, receive, self._sealed(send))

    def _reject(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This viewer only reads: GET and HEAD.", 405, {"Allow": "GET, HEAD"})
        if not self._is_ours(headers.get("host", "")):
            return _refusal(scope, 421, f"This viewer does not go by the name {headers.get('host', '')!r:.80}.")
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(urlsplit(origin).netloc):
            return _refusal(scope, 403, "Cross-origin requests are not allowed.")
        query = QueryParams(scope["query_string"])
        given = query.get("token")
        if given is not None and self._knows(given):
            return self._set_cookie(scope, query)
        if self._knows(given or _bearer(headers)) or self._is_session(scope, headers):
            return None
        return _refusal(scope, 401, _MISSING)

    def _is_ours(self, netloc: str) -> bool:
        try:
            name = (urlsplit(f"//{netloc}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._hosts or (ANY_ADDRESS in self._hosts and _is_address(name))

    def _knows(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())

    def _is_session(self, scope: Scope, headers: Headers) -> bool:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(scope))
        except CookieError:
            return False
        return morsel is not None and secrets.compare_digest(morsel.value.encode(), self._session.encode())

    def _set_cookie(self, scope: Scope, query: QueryParams) -> Response | None:
        """Set the cookie of this server and take the token out of the address, where it would be copied and logged."""
        if scope["path"].rpartition("/")[2]:
            return None  # not the page itself but something of it, asked for by a program
        rest = urlencode([pair for pair in query.multi_items() if pair[0] != "token"])
        answer = RedirectResponse(f"./{'?' + rest if rest else ''}", 303)
        answer.set_cookie(_cookie_name(scope), self._session, httponly=True, samesite="lax", path="/")
        return answer

    def _sealed(self, send: Send) -> Send:
        async def seal(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = self._policy
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        return seal


def _cookie_name(scope: Scope) -> str:
    """Return the name of the cookie. Cookies do not know ports: two viewers on one machine must not share a name."""
    server = scope.get("server")
    return f"sonde-{server[1] if server else 0}"


def _refusal(scope: Scope, status: int, why: str) -> Response:
    # The connection ends with it: a client without the token holds none open.
    headers = {"Connection": "close"}
    wants_json = "/api/" in scope["path"]
    return JSONResponse({"error": why}, status, headers) if wants_json else PlainTextResponse(why, status, headers)


def _bearer(headers: Headers) -> str | None:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else headers.get("x-sonde-token")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
