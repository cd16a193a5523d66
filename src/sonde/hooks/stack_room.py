"""Raise Python's recursion limit by the frames that hooks need, so that a watched program has as many as before.

Torch calls a module that has hooks through one function more, so a model that calls itself deeply needs four frames a
call where it needed three, and Sonde's own code needs some below the deepest. While anything is watched the recursion
limit is that much higher; a recursion without end still ends with the same error.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

from sonde.hooks.guard import Guard

_OWN_FRAMES: Final = 200
"""What Sonde's own code needs at most, from a hook down."""


class _Limit:
    """The recursion limit of the process, while anyone needs room."""

    def __init__(self) -> None:
        self._users: set[StackRoom] = set()
        self._before = self._ours = 0

    def add(self, user: StackRoom) -> None:
        if not self._users:
            self._before = sys.getrecursionlimit()
            self._ours = self._before + self._before // 3 + _OWN_FRAMES
            sys.setrecursionlimit(self._ours)
        self._users.add(user)

    def drop(self, user: StackRoom) -> None:
        self._users.discard(user)
        # A limit that the program has set meanwhile is its own.
        if not self._users and sys.getrecursionlimit() == self._ours:
            with contextlib.suppress(RecursionError):  # the session is closed where the stack is deeper than that
                sys.setrecursionlimit(self._before)


_limit: Final = _Limit()


class StackRoom:
    """Room on the stack for one session, from `attach` to `remove`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def attach(self) -> None:
        """Raise the recursion limit, unless another session has done so."""
        self._guard.attached.add(self)
        _limit.add(self)

    def remove(self) -> None:
        """Restore the limit once no one needs the room; calling it twice is fine."""
        _limit.drop(self)
        self._guard.attached.discard(self)
