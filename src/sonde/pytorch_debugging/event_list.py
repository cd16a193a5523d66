"""The events of a debugger in memory: bounded, and so that everyday ones do not push out the ones that matter."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, Final, overload

from sonde.pytorch_debugging.kept import MAX_KEPT, Kept

ROUTINE: Final = frozenset({"forward_pass_debug", "backward_pass_debug", "parameter_check_completed"})
"""What happens in every healthy step."""

Entry = dict[str, Any]


class EventList(Sequence[Entry]):
    """Events in the order they came: of the everyday ones a fifth of the room, of all others the rest."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._routine: Kept[tuple[int, Entry]] = Kept(max(2, most // 5))
        self._others: Kept[tuple[int, Entry]] = Kept(max(2, most - most // 5))

    @property
    def total(self) -> int:
        """How many events there were."""
        return self._routine.total + self._others.total

    @property
    def left_out(self) -> int:
        """How many of them are no longer here."""
        return self.total - len(self)

    def append(self, entry: Entry) -> None:
        """Add an event."""
        kept = self._routine if entry["event_type"] in ROUTINE else self._others
        kept.append((self.total, entry))

    def clear(self) -> None:
        """Forget all events, and their number."""
        self._routine.clear()
        self._others.clear()

    def __len__(self) -> int:
        return len(self._routine) + len(self._others)

    def __iter__(self) -> Iterator[Entry]:
        for _, entry in heapq.merge(self._routine, self._others, key=lambda item: item[0]):
            yield entry

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        return list(self)[index]

    def __repr__(self) -> str:
        return f"<{self.total} events, {len(self)} kept>"
