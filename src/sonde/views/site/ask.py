"""Ask the viewer's server within this process, without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlencode

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import BaseRoute
    from starlette.types import Message

Words: TypeAlias = Mapping[str, str | int | Iterable[str] | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says to a question."""

    status: int
    kind: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    """Those that describe the bytes: `x-sonde-...`."""

    def json(self) -> Any:
        """Return what it says, if it is JSON, else None."""
        return json.loads(self.body) if self.kind.startswith("application/json") and self.status == 200 else None


def pairs_of(words: Words) -> list[tuple[str, str]]:
    """Return a query as pairs, sorted by name; what is empty is left out, as the front end does.

    >>> pairs_of({"stat": "rms", "site": ["b", "a"], "step": None})
    [('site', 'b'), ('site', 'a'), ('stat', 'rms')]
    """
    pairs: list[tuple[str, str]] = []
    for name, value in sorted(words.items()):
        each = [value] if isinstance(value, str | int) or value is None else list(value)
        pairs += [(name, str(one)) for one in each if one is not None and one != ""]
    return pairs


def spell(path: str, words: Words) -> str:
    """Return the spelling of a question under which a copy files its answer; `copy.js` spells it the same way."""
    return json.dumps(
        [f"api/{path}", [list(pair) for pair in pairs_of(words)]], ensure_ascii=False, separators=(",", ":")
    )


class Asker:
    """Asks an app. Use as a context manager: it keeps an event loop meanwhile, in a thread of its own."""

    def __init__(self, app: Starlette, token: str) -> None:
        from anyio.from_thread import start_blocking_portal

        self._app, self._token = app, token
        # Not in this thread: a notebook has a loop running here already.
        self._opening = start_blocking_portal()

    def __enter__(self) -> Asker:
        self._portal = self._opening.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opening.__exit__(*error)

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes of the app."""
        return self._app.routes

    def ask(self, path: str, words: Words) -> Answer:
        """Ask one question and wait for the whole answer."""
        return self._portal.call(self._ask, path, words)

    async def _ask(self, path: str, words: Words) -> Answer:
        import anyio

        status, headers, parts, is_sent = 500, dict[str, str](), list[bytes](), False

        async def receive() -> Message:
            nonlocal is_sent
            if is_sent:  # what sends a file waits for the client to leave
                await anyio.sleep_forever()
            is_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(_scope(f"/api/{path}", urlencode(pairs_of(words)), self._token), receive, send)
        own = {name: value for name, value in headers.items() if name.startswith("x-sonde-")}
        return Answer(status, headers.get("content-type", ""), b"".join(parts), own)


def _scope(path: str, query: str, token: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost"), (b"x-sonde-token", token.encode())],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
    }
