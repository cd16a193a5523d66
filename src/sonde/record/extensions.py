"""What takes part in a recording beside the taps: sensors, forensics, the tape and the judge, known by protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from sonde.hooks.guard import Guard, Guarded
from sonde.hooks.on_backward import Reach
from sonde.record.modules import PassObserver, WatchedModule
from sonde.record.optimizers import StepObserver
from sonde.record.packer import Packer
from sonde.record.parameters import ParameterTable
from sonde.record.plan import Helpers
from sonde.record.rank_watch import RankOptions
from sonde.records import Finding, Judge, Phase, Sink


class Observer(PassObserver, StepObserver, Protocol):
    """Looks at passes and steps beyond the tensors that taps record."""

    def see_initial(self) -> None:
        """Record what belongs to the state before the first step."""

    def continue_step(self) -> None:
        """Handle an optimizer step that does not end the iteration: another optimizer is expected to step."""

    def attach(self) -> None:
        """Start listening."""

    def end_step(self) -> None:
        """Handle the end of a step."""

    def end_dozed_step(self) -> None:
        """Handle the end of a step that is only counted."""

    def forget_passes(self) -> None:
        """Forget the passes of the present step: nothing came of them."""

    def pause(self, paused: bool) -> None:
        """Stop looking at steps until it is called with False."""

    def remove(self) -> None:
        """Stop listening and forget the models."""


class Incidents(Protocol):
    """Looks for what is not finite, and holds the optimizer back if asked to."""

    @property
    def is_holding(self) -> bool:
        """Whether the present optimizer step is held back."""

    @property
    def sink(self) -> Sink | None:
        """What takes the run's readings, if it needs them."""

    def attach(self) -> None:
        """Start listening, after the optimizers' own tap."""

    def after_skip(self) -> None:
        """Handle a step that a gradient scaler has skipped."""

    def forget_passes(self) -> None:
        """Forget the passes of the present step: nothing came of them."""

    def save_bundle(self, reason: str) -> Path:
        """Save what is needed to repeat the present step."""

    def remove(self) -> None:
        """Stop listening and forget the models."""


class StepRecorder(Sink, Protocol):
    """Records some rounds of the loop operation by operation."""

    end_round: Guarded
    """Takes the number of a round of the loop that has ended, and its last step."""
    seconds: float
    """What it has taken so far."""

    @property
    def is_taping(self) -> bool:
        """Whether the present round is recorded."""

    def attach(self) -> None:
        """Start listening, before the optimizers' own tap."""

    def request(self) -> None:
        """Record the next round."""

    def remove(self) -> None:
        """Stop listening and forget the models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a session watches, and what extensions may use."""

    path: Path
    models: dict[str, nn.Module]
    modules: list[WatchedModule]
    table: ParameterTable
    optimizers: list[tuple[str, Optimizer]]
    """Those passed in, with their names."""
    helpers: Helpers
    packer: Packer
    guard: Guard
    reach: Reach
    is_due: Callable[[Phase], bool]
    """Returns whether the present step is recorded in full, in a phase."""
    is_skipped: Callable[[], bool]
    """Returns whether the present step is to cost nothing; see `Governor.skips`."""
    affords: Callable[[float, float], bool]
    """See `Governor.affords`."""
    scaler: Callable[[], Any]
    """Returns the gradient scaler that was given, or else the one that has stepped an optimizer; None without one."""
    raise_alarm: Callable[[], None]
    """Makes the present step be recorded in full, though it was to be skipped."""
    measured: Callable[[Optimizer], list[int] | None]
    """Returns the sites of all gradients of an optimizer that is about to step; None if not all were recorded."""
    publish: Callable[[Finding], None]
    later: Callable[[str, Callable[[], object]], None]
    """Runs a function in the worker's thread; the text names it in case it fails."""
    records_loss: bool
    """Whether the output of the loss function is recorded as that of a module."""
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """What takes part in a recording beside the taps."""

    sensors: Callable[[Watched], Observer] | None = None
    forensics: Callable[[Watched], Incidents] | None = None
    judge: Callable[[Callable[[Finding], None]], Judge] | None = None
    ranks: RankOptions | None = None
    """Given if several ranks train together."""
    tape: Callable[[Watched], StepRecorder] | None = None
