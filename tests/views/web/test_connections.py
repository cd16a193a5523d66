"""How many connections a client may hold, and for how long."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from sonde.views.web import connections
from sonde.views.web.connections import BoundedProtocol

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Viewer:
    """An app behind the protocol, that answers once it is allowed to."""

    def __init__(self):
        self.may_answer, self.asked = asyncio.Event(), asyncio.Event()
        self.clients = []

    async def __call__(self, scope, receive, send):
        self.asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def start(self):
        config = uvicorn.Config(self, http=BoundedProtocol, lifespan="off", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()
        self.server = await loop.create_server(
            lambda: BoundedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        self.port = self.server.sockets[0].getsockname()[1]

    async def connect(self, sent=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(sent)
        return reader, writer


async def is_closed(reader):
    try:
        return await asyncio.wait_for(reader.read(), 30) == b""
    except ConnectionResetError:
        return True


def run(test):
    async def whole():
        viewer = Viewer()
        await viewer.start()
        try:
            await asyncio.wait_for(test(viewer), 60)
        finally:
            viewer.server.close()
            for each in viewer.clients:
                each.transport.abort()
            await viewer.server.wait_closed()
            await asyncio.sleep(0)  # closed transports say so in the next round of the loop

    asyncio.run(whole())


@pytest.mark.parametrize("sent", [b"", REQUEST[:20]])
def test_a_connection_that_sends_no_whole_request_is_closed(monkeypatch, sent):
    monkeypatch.setattr(connections, "REQUEST_S", 0.05)

    async def test(viewer):
        reader, _ = await viewer.connect(sent)
        assert await is_closed(reader)

    run(test)


def test_a_request_that_takes_long_to_answer_is_answered(monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 0.05)

    async def test(viewer):
        reader, _ = await viewer.connect(REQUEST)
        await viewer.asked.wait()
        idle, _ = await viewer.connect()
        assert await is_closed(idle)  # the bound of time has passed
        viewer.may_answer.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    run(test)


def test_beyond_the_bound_the_oldest_that_waits_makes_room_and_not_one_that_is_answered(monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)

    async def test(viewer):
        answered, _ = await viewer.connect(REQUEST)
        await viewer.asked.wait()
        waiting = [await viewer.connect() for _ in range(4)]
        assert [await is_closed(reader) for reader, _ in waiting[:2]] == [True, True]
        viewer.may_answer.set()
        assert (await answered.readline()).startswith(b"HTTP/1.1 200")
        reader, writer = waiting[-1]
        writer.write(REQUEST)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    run(test)
