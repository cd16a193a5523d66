"""Say events to whatever logger the user has: one of `logging`, one with `log_info` and its like, or none."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

Level = Literal["info", "warning", "error"]
_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OWN: Final = logging.getLogger("sonde.pytorch_debugging")
# What loggers call the things they want besides the message.
_MESSAGES: Final = ("message", "msg", "text", "event")
_DATA: Final = ("data", "context", "extra", "details", "metadata", "info", "kwargs")
_ERRORS: Final = ("error", "exception", "exc", "err")
_ALWAYS: Final = 5


class Speaker:
    """Says messages to a logger, whichever kind it is.

    Without a logger, warnings and errors go to `logging` as `sonde.pytorch_debugging`; an event that keeps coming is
    said five times and then at each doubling, since nobody asked for every one of them.
    """

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger
        self._said: Counter[str] = Counter()

    def say(self, level: Level, event_type: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Say one message."""
        if self._logger is None:
            self._say_unasked(level, event_type, message)
            return
        method = getattr(self._logger, f"log_{level}", None)
        if callable(method):
            _call(method, event_type, message, dict(data or {}))
            return
        plain = getattr(self._logger, level, None)
        if callable(plain):
            # A message may hold a per cent sign, which `logging` would take for a place to fill in.
            plain("%s", message) if isinstance(self._logger, logging.Logger | logging.LoggerAdapter) else plain(message)

    def _say_unasked(self, level: Level, event_type: str, message: str) -> None:
        self._said[event_type] += 1
        times = self._said[event_type]
        if times <= _ALWAYS or times & (times - 1) == 0:
            more = f" (for the {times}th time)" if times > _ALWAYS else ""
            _OWN.log(_LEVELS[level], "%s%s", message, more)


def _call(method: Callable[..., Any], event_type: str, message: str, data: dict[str, Any]) -> None:
    """Call a logger's method with what its signature asks for."""
    try:
        wanted = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # written in C: it has no signature to look at
        method(message)
        return
    args: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in wanted:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if args and parameter.default is not parameter.empty and parameter.name not in _DATA:
            continue
        value = _value(parameter.name, event_type, message, data, is_first=not args and not named)
        if parameter.kind is parameter.KEYWORD_ONLY or len(args) < _position(wanted, parameter):
            named[parameter.name] = value
        else:
            args.append(value)
    if not args and not named:
        args = [message]
    method(*args, **named)


def _position(wanted: list[inspect.Parameter], parameter: inspect.Parameter) -> int:
    return wanted.index(parameter)


def _value(name: str, event_type: str, message: str, data: dict[str, Any], *, is_first: bool) -> Any:
    if name in _ERRORS:
        return RuntimeError(message)
    if name in _MESSAGES:
        return message
    if name in _DATA:
        return data
    if name in ("event_type", "kind", "type"):
        return event_type
    return message if is_first else None
