"""Find where a training iteration ends, from the order in which optimizers step.

An iteration ends when an optimizer that has stepped in it is about to step again. So one optimizer ends an iteration
with every step, and several optimizers (Muon with AdamW, a GAN, one optimizer per parameter) share iterations.

A forward pass that follows a step belongs to this iteration or to the next, which only the next step decides. Until
then the order of past steps predicts it; `Rhythm.is_late` corrects the number if the prediction was wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

MAX_PAST: Final = 64
"""How many steps are remembered."""
MAX_CONTEXT: Final = 16
"""How many of the last steps are compared with earlier ones; enough for fifteen critic steps per generator step."""


class Rhythm:
    """Decides after every optimizer step whether the iteration is over. `key` identifies an optimizer.

    >>> rhythm = Rhythm(["critic", "generator"])
    >>> rhythm.note("critic"), rhythm.note("generator")
    (False, True)
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.by_hand = False
        """Whether iterations end only where the program says so."""
        self._known = set(known)
        self._now: set[str] = set()
        self._last: set[str] = set()
        self._past = ""
        self._letters: dict[str, str] = {}

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped in the present iteration."""
        return bool(self._now)

    def repeats(self, key: str) -> bool:
        """Return whether an optimizer that is about to step has stepped in the present iteration: it is over then."""
        return key in self._now and not self.by_hand

    def is_late(self, key: str) -> bool:
        """Return whether an optimizer that is about to step belongs to the iteration that was wrongly ended."""
        return bool(self._last) and not self._now and key not in self._last and not self.by_hand

    def rejoin(self) -> None:
        """Return to the iteration that was wrongly ended."""
        self._now, self._last = self._last, set()

    def note(self, key: str) -> bool:
        """Note a step; return whether the iteration is over, as far as is known now."""
        self._now.add(key)
        if self.by_hand:
            return False
        self._known.add(key)
        if len(self._known) == 1:
            return True
        letter = self._letters.setdefault(key, chr(len(self._letters)))
        self._past = self._past[1 - MAX_PAST :] + letter
        expected = self._predict()
        if expected is None:
            return not (self._last or self._known) - self._now
        return expected in {self._letters[each] for each in self._now if each in self._letters}

    def end(self) -> None:
        """Begin the next iteration."""
        if self._now:
            self._last, self._now = self._now, set()

    def forget(self, key: str) -> None:
        """Forget an optimizer that another has replaced."""
        self._known.discard(key)
        self._now.discard(key)
        self._last.discard(key)

    def _predict(self) -> str | None:
        """Return the letter of what stepped next most often after the same steps as now; None if they are new."""
        past = self._past
        for length in range(min(MAX_CONTEXT, len(past) - 1), 0, -1):
            context = past[-length:]
            next_steps = []
            at = past.find(context, 0, -1)
            while at >= 0:
                next_steps.append(past[at + length])
                at = past.find(context, at + 1, -1)
            if next_steps:
                return Counter(reversed(next_steps)).most_common(1)[0][0]
        return None
