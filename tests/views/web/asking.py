"""A client of the viewer's app that sends paths and headers exactly as given."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import unquote, urlencode

from tests.analysis.made_run import Recipe

from sonde.views.web import make_app

TOKEN = "a-token-that-nobody-guesses"
SMALL = Recipe(steps=30, layers=2, dies_at=10, nan_at=20)
CALM = Recipe(steps=30, layers=2, dies_at=None, nan_at=None, seed=1)


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self):
        return self.content.decode()

    def json(self):
        return json.loads(self.content)


class Client:
    """Asks an app. It keeps cookies, as a browser does, and follows no redirect."""

    def __init__(self, app, token):
        self.app, self.token, self.cookie = app, token, None

    def get(self, path, *, params=None, headers=None):
        return self.request("GET", path, params=params, headers=headers)

    def request(self, method, path, *, params=None, headers=None):
        path, _, query = path.partition("?")
        query = urlencode(params, doseq=True) if params else query
        sent = {"host": "127.0.0.1:7860"} | ({"x-sonde-token": self.token} if self.token else {})
        sent |= ({"cookie": self.cookie} if self.cookie else {}) | (headers or {})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
            "method": method, "scheme": "http",
            "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 7860),
        }  # fmt: skip
        with ThreadPoolExecutor(1) as pool:  # a browser that drives other tests may run a loop in this thread
            answer = pool.submit(lambda: asyncio.run(self._ask(scope))).result()
        if "set-cookie" in answer.headers:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer

    async def _ask(self, scope):
        head, body, asked = {}, [], []

        async def receive():
            if asked:
                await asyncio.Event().wait()  # a client that stays and says no more
            asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            head.update(message) if message["type"] == "http.response.start" else body.append(message.get("body", b""))

        await self.app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in head["headers"]}
        return Answer(head["status"], headers, b"".join(body))


def client_of(*roots, token=TOKEN, **more):
    """Return a client of the app over some folders."""
    return Client(make_app(roots, token=TOKEN, **more), token)
