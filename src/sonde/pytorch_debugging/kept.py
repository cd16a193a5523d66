"""A list that does not grow for ever: it keeps how things began and how they are now, and counts the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar, overload

T = TypeVar("T")

MAX_KEPT: Final = 1000


class Kept(Sequence[T], Generic[T]):
    """The first and the last items of what was appended; `total` counts all of it.

    The first fifth of the room is for the first items, since the first trouble explains the later ones.

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
        """How many items are no longer here; they lie between the first and the last ones."""
        return self.total - len(self)

    def append(self, item: T) -> None:
        """Add an item; when there is no room, the oldest one after the first ones goes."""
        self.total += 1
        if len(self._first) < self._num_first:
            self._first.append(item)
        else:
            self._last.append(item)

    def clear(self) -> None:
        """Forget everything, and the count."""
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
        return [*self._first, *self._last][index]

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else self is other

    __hash__ = None  # type: ignore[assignment] # as a list

    def __repr__(self) -> str:
        return f"<{self.total} items, {len(self)} kept>"
