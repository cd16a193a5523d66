"""Whether a recurrent module begins with the state that it ended with in the step before, told without reading it.

A state that is handed on after `detach()` lies at the same place in memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class CarriedStates:
    """Remembers the last state of each recurrent module, without its graph."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Tensor]] = {}

    def see(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any, step: int) -> bool:
        """Take a call of a module in a step; say whether its first state came from another step."""
        if not isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return False
        given, before = _state(args[1:2]), self._last.get(name)
        carried = given is not None and before is not None and before[0] != step and _same(given, before[1])
        state = _state(output[1:2] if isinstance(output, tuple) and isinstance(module, nn.RNNBase) else (output,))
        if state is not None:
            self._last[name] = (step, state.detach())
        return carried


def _state(given: tuple[Any, ...]) -> Tensor | None:
    """Return the state, or the first of the two that an LSTM has."""
    first = given[0] if given else None
    first = first[0] if isinstance(first, tuple) and first else first
    return first if isinstance(first, Tensor) else None


def _same(one: Tensor, two: Tensor) -> bool:
    return one.data_ptr() == two.data_ptr() and one.shape == two.shape
