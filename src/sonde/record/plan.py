"""The plan of a session: which quantities to record, where, when, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from sonde.hooks.guard import OnError
from sonde.record.describe import describe_helper
from sonde.schedule import Schedule
from sonde.select import Selector

What = Literal["parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state"]
DEFAULT_WHAT: Final[tuple[What, ...]] = ("parameters", "gradients", "updates", "outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """Objects of the training loop that are observed only."""

    loss_fn: Any = None
    loader: Any = None
    scheduler: Any = None
    scaler: Any = None

    def describe(self) -> dict[str, Any]:
        """Return the descriptions of the helpers."""
        return {name: describe_helper(helper) for name in self.__slots__ if (helper := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a session records, where, when and within which bounds."""

    what: frozenset[str]
    where: Selector
    when: Schedule
    histogram: bool
    on_error: OnError
    max_memory_bytes: int
    max_calls: int
    budget: float | None = None
    """The share of a step's own time that recording may add; None records all tensors in every step."""
    steps_by_hand: bool = False
    """Whether iterations end only at `session.step()`."""
    diagnose: bool = False
    """Whether to record the vital signs and facts that a diagnosis needs."""

    @property
    def ring_bytes(self) -> int:
        """Bytes for steps on their way to the store; the rest of the memory is for shadows of parameters."""
        return min(self.max_memory_bytes // 4, 64 << 20)
