"""Serve the viewer: its address, its name, and when it stops."""

from __future__ import annotations

import ctypes
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.errors import MissingExtra, OptionError
from sonde.views.web.guard import ANY_ADDRESS, LOOPBACK

# --------------------------------------------------------------------------------
# Keeping the server's memory low, where the C library allows it.


_TRIM_THRESHOLD: Final = -1
_ARENA_MAX: Final = -8
_GIVE_BACK_ABOVE: Final = 1 << 20


def keep_memory_low() -> bool:
    """Let all threads share two arenas, and give freed memory back to the system; return whether that is possible here.

    Answers are made by a pool of threads. By default each gets an arena of its own that keeps what was freed in it:
    beside a training of 11,000 steps the server grew from 134 to 356 MB; so it stays between 82 and 117 MB.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_ARENA_MAX, 2)) and bool(set_option(_TRIM_THRESHOLD, _GIVE_BACK_ABOVE))


# --------------------------------------------------------------------------------


USUAL_PORT: Final = 7860
_NEXT_PORTS: Final = 20
_SHORTEST_TOKEN: Final = 16


@dataclass(frozen=True, slots=True)
class Place:
    """An address that the viewer listens at, and the token that opens it."""

    host: str
    port: int
    token: str
    socket: socket.socket

    @property
    def url(self) -> str:
        """The address to open, with its token."""
        shown = "127.0.0.1" if is_wildcard(self.host) else self.host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/?token={self.token}"


def take_place(host: str = "127.0.0.1", port: int | None = None, *, token: str | None = None) -> Place:
    """Begin to listen.

    Args:
        host: A name or an address of this machine.
        port: The port; 0 takes any that is free. None takes the usual one, or one of the next if it is taken.
        token: What a request must know; by default one that was never used before.

    Raises:
        OptionError: The port is taken, the host is not this machine's, or the token can be guessed.

    """
    if token is not None and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise OptionError(
            f"The token can be guessed: it must have at least {_SHORTEST_TOKEN} ASCII characters. Omit it to get one."
        )
    ports = [port] if port is not None else [*range(USUAL_PORT, USUAL_PORT + _NEXT_PORTS), 0]
    problem: OSError | None = None
    for each in ports:
        try:
            listening = _listen(host, each)
        except OSError as error:
            problem = error
            continue
        return Place(host, listening.getsockname()[1], token or secrets.token_urlsafe(24), listening)
    raise OptionError(f"Cannot listen at {host}, port {ports[0]}: {problem}. Choose another with --port.") from problem


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    # asyncio sends at once only where a socket names its protocol; else the end of each answer waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    if host.lower() in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether a host means all addresses of this machine."""
    return host in ("", "0.0.0.0", "::")


def names_of(host: str, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names that a server at this host may be called by."""
    own = (socket.gethostname(), ANY_ADDRESS) if is_wildcard(host) else (host,)
    return (*LOOPBACK, *own, *more)


def serve(
    roots: Sequence[str | Path],
    place: Place,
    *,
    names: Sequence[str] = (),
    frames: str = "'self'",
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve the viewer until it is interrupted.

    Raises:
        MissingExtra: The packages that serve it are not installed.

    """
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("uvicorn", "view", "The viewer") from None
    from sonde.views.web.app import make_app
    from sonde.views.web.connections import BoundedProtocol

    keep_memory_low()
    app = make_app(roots, token=place.token, hosts=names_of(place.host, names), frames=frames)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, ws="none",
        http=BoundedProtocol,
    )  # fmt: skip

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            on_ready()

    Server(config).run(sockets=[place.socket])
