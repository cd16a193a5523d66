"""Events of a debugger: bounded lists of them, values small enough for JSON, and any kind of logger to log them to."""

from __future__ import annotations

import heapq
import inspect
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar, overload

import numpy as np
from torch import Tensor

from sonde.core import files
from sonde.probes.readings import readings_of
from sonde.records import Reading, Severity

T = TypeVar("T")
Entry = dict[str, Any]
Level = Literal["info", "warning", "error"]

MAX_KEPT: Final = 1000
MAX_TEXT: Final = 8000
MAX_ITEMS: Final = 1000
MAX_DEPTH: Final = 8
ROUTINE: Final = frozenset({"forward_pass_debug", "backward_pass_debug", "parameter_check_completed"})
"""Events of every healthy step."""
LEVELS: Final[dict[Severity, Level]] = {"info": "info", "warning": "warning", "critical": "error"}
"""By severity of a finding: the level at which it is logged."""
_ERRORS: Final = ("anomaly_detected", "_error", "nan_", "inf_")
_WARNINGS: Final = ("_explosion", "_vanishing", "memory_", "out_of_range", "recovery", "_interrupted", "no_gradients")
_INFOS: Final = ("memory_tracking",)
_STATISTICS: Final = ("mean", "std", "min", "max", "norm")
_LOGGING_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OWN_LOGGER: Final = logging.getLogger("sonde.pytorch_debugging")
# Parameter names by which loggers ask for things.
_MESSAGE_NAMES: Final = ("message", "msg", "text", "event")
_DATA_NAMES: Final = ("data", "context", "extra", "details", "metadata", "info", "kwargs")
_ERROR_NAMES: Final = ("error", "exception", "exc", "err")
_TYPE_NAMES: Final = ("event_type", "kind", "type")
_ALWAYS_LOGGED: Final = 5


def level_of(event_type: str) -> Level:
    """Return the level at which an event is logged.

    >>> level_of("gradient_explosion"), level_of("nan_parameter_detected"), level_of("profiling_start")
    ('warning', 'error', 'info')
    """
    for words, level in ((_ERRORS, "error"), (_INFOS, "info"), (_WARNINGS, "warning")):
        if any(word in event_type for word in words):
            return level  # type: ignore[return-value] # the table holds levels only
    return "info"


def is_trouble(event: Entry) -> bool:
    """Return whether an event reports something wrong."""
    return level_of(event["event_type"]) != "info" or event["data"].get("severity") in ("warning", "critical")


class Kept(Sequence[T], Generic[T]):
    """A bounded list: the first and the last items of what was appended. `total` counts all of it.

    A fifth of the room is for the first items, because the first trouble explains the later ones.

    >>> some = Kept(5)
    >>> for number in range(100): some.append(number)
    >>> list(some), some.total
    ([0, 96, 97, 98, 99], 100)
    """

    def __init__(self, most: int = MAX_KEPT) -> None:
        self.total = 0
        self._num_first = max(1, most // 5)
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=max(1, most - self._num_first))

    @property
    def left_out(self) -> int:
        """How many items were dropped; they lie between the first and the last ones."""
        return self.total - len(self)

    def append(self, item: T) -> None:
        """Add an item; when there is no room, the oldest one after the first ones is dropped."""
        self.total += 1
        if len(self._first) < self._num_first:
            self._first.append(item)
        else:
            self._last.append(item)

    def clear(self) -> None:
        """Drop all items and set the count to 0."""
        self.total = 0
        self._first.clear()
        self._last.clear()

    def __len__(self) -> int:
        return len(self._first) + len(self._last)

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        yield from self._last

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    __hash__ = None  # type: ignore[assignment] # as a list

    def __repr__(self) -> str:
        return f"<{self.total} items, {len(self)} kept>"


class EventList(Kept[Entry]):
    """Events in the order they came: routine ones have a fifth of the room, so that they do not push out the others."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._routine: Kept[tuple[int, Entry]] = Kept(max(2, most // 5))
        self._others: Kept[tuple[int, Entry]] = Kept(max(2, most - most // 5))

    @property
    def total(self) -> int:  # type: ignore[override] # counted by both parts
        """How many events there were."""
        return self._routine.total + self._others.total

    def append(self, item: Entry) -> None:
        """Add an event."""
        kept = self._routine if item["event_type"] in ROUTINE else self._others
        kept.append((self.total, item))

    def clear(self) -> None:
        """Drop all events and set the count to 0."""
        self._routine.clear()
        self._others.clear()

    def __len__(self) -> int:
        return len(self._routine) + len(self._others)

    def __iter__(self) -> Iterator[Entry]:
        for _, entry in heapq.merge(self._routine, self._others, key=lambda item: item[0]):
            yield entry


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return `value` as JSON-ready data; a tensor becomes its shape, type and statistics, long values are cut.

    Numbers that are not finite become "nan", "inf" or "-inf".

    >>> plain({"loss": float("nan"), "shape": (2, 3)})
    {'loss': 'nan', 'shape': [2, 3]}
    """
    if value is None or isinstance(value, bool | int | float):
        return files.plain(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT // 2]} ... {value[-MAX_TEXT // 2 :]}"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return _array(np.asarray(value))
    return _nested(value, depth)


def statistics(reading: Reading | None) -> dict[str, Any]:
    """Return the usual statistics of a reading; unknown ones are None.

    Counts of elements that are not finite are included only where there are some.
    """
    if reading is None:
        return {}
    found: dict[str, Any] = {name: reading.get(name) for name in _STATISTICS}
    if reading.nonfinite:
        found |= {"nan": int(reading.get("nan") or 0), "inf": int(reading.get("inf") or 0)}
    return found


def _nested(value: Any, depth: int) -> Any:
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return plain(f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value))
    if not depth:
        return f"<{type(value).__name__} of {len(value)}>"
    more = len(value) - MAX_ITEMS
    if isinstance(value, Mapping):
        kept = {str(key): plain(item, depth - 1) for key, item in list(value.items())[:MAX_ITEMS]}
        return kept | ({"...": f"and {more} more"} if more > 0 else {})
    items = [plain(item, depth - 1) for item in list(value)[:MAX_ITEMS]]
    return items + ([f"... and {more} more"] if more > 0 else [])


def _tensor(tensor: Tensor) -> Any:
    if tensor.numel() == 1 and not tensor.is_complex() and tensor.device.type != "meta":
        return plain(tensor.detach().item())
    about = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    return about | plain(statistics(readings_of({"": tensor.detach()}, histogram=False).get("")))


def _array(array: np.ndarray[Any, Any]) -> Any:
    if array.size <= 64 and array.dtype.kind in "biufU":
        return plain(array.tolist())
    about: dict[str, Any] = {"shape": list(array.shape), "dtype": str(array.dtype)}
    return about | (plain(statistics(Reading.of(array))) if array.dtype.kind in "biuf" else {})


# ------------------------------------------------------------------ loggers


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
            if times > _ALWAYS_LOGGED:
                if times & (times - 1):
                    return
                message = f"{message} (for the {times}th time)"
        if self._logger is None:
            _OWN_LOGGER.log(_LOGGING_LEVELS[level], "%s", message)
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
        if args and parameter.default is not parameter.empty and parameter.name not in _DATA_NAMES:
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
    if name in _ERROR_NAMES:
        return RuntimeError(message)
    if name in _MESSAGE_NAMES:
        return message
    if name in _DATA_NAMES:
        return data
    if name in _TYPE_NAMES:
        return event_type
    return message if is_first else None
