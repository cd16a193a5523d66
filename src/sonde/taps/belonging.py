"""Whose loss it is, where several models are trained in one process.

Loss functions and backward passes are heard wherever they are called. A session takes those that its own models have
part in: the graph of a loss says so where it leads to their parameters, or to those of others only. Where it leads to
no parameter at all, or is too large to be followed, a pass of the session's own models in this step speaks for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from torch import nn

from sonde.records import Phase
from sonde.taps.plain import is_plain

# The way from a loss to the nearest parameter is short; beyond this many nodes nothing is concluded.
MAX_NODES: Final = 1024
_ACCUMULATE: Final = "AccumulateGrad"

_numbers = itertools.count(1)


class Belonging:
    """Tells whether a loss belongs to these models."""

    _last_to_evaluate: ClassVar = 0
    """Whose models ran last without gradients: there is no graph then to tell from."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._number = next(_numbers)
        self._own: set[int] | None = None
        self._is_telling = False
        """Whether parameters found in a graph would be the models' own: those that are sharded are put together."""
        self._has_passed = False

    def saw_pass(self, phase: Phase) -> None:
        """Note that one of the models begins to run."""
        if phase == "eval":
            Belonging._last_to_evaluate = self._number
        else:
            self._has_passed = True

    def end_step(self) -> None:
        """Forget the passes of a step."""
        self._has_passed = False

    def forget(self) -> None:
        """Let go of the models."""
        self._models, self._own = [], None

    def owns_evaluation(self) -> bool:
        """Say whether no other session's model was evaluated since one of these was."""
        return Belonging._last_to_evaluate in (0, self._number)

    def owns(self, loss: Any) -> bool:
        """Say whether a loss with a graph belongs to the models."""
        node = getattr(loss, "grad_fn", None)
        if node is None:
            return self._has_passed
        own = self._parameters() if self._own is None else self._own
        found = self._reaches(node, own)
        if found is False and own != (own := self._parameters()):  # they were replaced meanwhile
            found = self._reaches(node, own)
        return self._has_passed if found is None else found

    def _parameters(self) -> set[int]:
        trained = [each for model in self._models for each in model.parameters() if each.requires_grad]
        self._own = {id(each) for each in trained}
        self._is_telling = bool(trained) and all(map(is_plain, trained))
        return self._own

    def _reaches(self, loss: Any, own: set[int]) -> bool | None:
        """Say whether a graph leads to a parameter of the models; None if it leads to none that tells."""
        waiting, seen = deque([loss]), {loss}
        of_others = False
        while waiting:
            for node, _ in waiting.popleft().next_functions:
                if node is None or node in seen:
                    continue
                seen.add(node)
                if type(node).__name__ != _ACCUMULATE:
                    waiting.append(node)
                elif id(node.variable) in own:
                    return True
                else:
                    of_others |= isinstance(node.variable, nn.Parameter)
            if len(seen) > MAX_NODES:
                return None
        return False if of_others and self._is_telling else None
