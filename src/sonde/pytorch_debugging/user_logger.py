"""Log to the logger that the user has: one of `logging`, one with `log_info` and the like, or none."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from sonde.pytorch_debugging.events import Level

_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OWN: Final = logging.getLogger("sonde.pytorch_debugging")
# Parameter names by which loggers ask for things.
_MESSAGES: Final = ("message", "msg", "text", "event")
_DATA: Final = ("data", "context", "extra", "details", "metadata", "info", "kwargs")
_ERRORS: Final = ("error", "exception", "exc", "err")
_TYPES: Final = ("event_type", "kind", "type")
_ALWAYS: Final = 5


class UserLogger:
    """Passes messages on to any kind of logger.

    Without a logger, messages go to `logging` as `sonde.pytorch_debugging`. Those, and messages of automatic checks,
    are rationed: an event type that repeats is logged five times and then each time its count has doubled.
    """

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger
        self._counts: Counter[str] = Counter()

    @property
    def is_given(self) -> bool:
        """Whether the user has given a logger."""
        return self._logger is not None

    def log(
        self,
        level: Level,
        event_type: str,
        message: str,
        data: Mapping[str, Any] | None = None,
        *,
        ration: bool = False,
    ) -> None:
        """Log one message."""
        if ration or self._logger is None:
            self._counts[event_type] += 1
            times = self._counts[event_type]
            if times > _ALWAYS:
                if times & (times - 1):
                    return
                message = f"{message} (for the {times}th time)"
        if self._logger is None:
            _OWN.log(_LEVELS[level], "%s", message)
            return
        method = getattr(self._logger, f"log_{level}", None)
        if callable(method):
            _call(method, event_type, message, dict(data or {}))
            return
        plain = getattr(self._logger, level, None)
        if callable(plain):
            # `logging` would treat a per cent sign in the message as a place to fill in.
            plain("%s", message) if isinstance(self._logger, logging.Logger | logging.LoggerAdapter) else plain(message)


def _call(method: Callable[..., Any], event_type: str, message: str, data: dict[str, Any]) -> None:
    """Call a logger's method with the arguments that its signature asks for."""
    try:
        wanted = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # written in C: it has no signature
        method(message)
        return
    args: list[Any] = []
    named: dict[str, Any] = {}
    for position, parameter in enumerate(wanted):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if args and parameter.default is not parameter.empty and parameter.name not in _DATA:
            continue
        value = _value(parameter.name, event_type, message, data, is_first=not args and not named)
        if parameter.kind is parameter.KEYWORD_ONLY or len(args) < position:
            named[parameter.name] = value
        else:
            args.append(value)
    if not args and not named:
        args = [message]
    method(*args, **named)


def _value(name: str, event_type: str, message: str, data: dict[str, Any], *, is_first: bool) -> Any:
    if name in _ERRORS:
        return RuntimeError(message)
    if name in _MESSAGES:
        return message
    if name in _DATA:
        return data
    if name in _TYPES:
        return event_type
    return message if is_first else None
