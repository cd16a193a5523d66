"""Observe the training loop at named moments.

An observer is any callable that takes a `Glimpse`. It cannot change the training: its return value is ignored, random
numbers it draws are put back, gradients are off, and after an error it is logged once and removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from sonde.errors import OptionError
from sonde.hooks.guard import Guard, OnError
from sonde.training.checkpoints import kept_random_state

logger = logging.getLogger("sonde")

Split = Literal["train", "val", "test", "eval"]


class Moment(StrEnum):
    """The moments of a run, in pairs, in the order of the loop.

        before_run
          for each epoch:
            before_epoch
              before_train_loop
                for each step (one optimizer step, over one batch or several):
                  before_train_step
                    for each batch:
                      before_forward        the batch is on the device
                      after_forward         outputs and loss are known
                      before_backward
                      after_backward
                    before_update           gradients are complete
                    after_update            parameters have moved
                  after_train_step
              after_train_loop
              before_checkpoint
              after_checkpoint              the epoch's checkpoint is on disk
              before_val_loop
                for each batch:
                  before_eval_step
                  after_eval_step           outputs and scores are known
              after_val_loop                captures and scores are on disk
            after_epoch
          before_test_loop, eval steps, after_test_loop       (with a test dataset)
        after_run

    An evaluator has one loop: before_run, before_eval_loop, eval steps, after_eval_loop, after_run.
    """

    before_run = "before_run"
    after_run = "after_run"
    before_epoch = "before_epoch"
    after_epoch = "after_epoch"
    before_train_loop = "before_train_loop"
    after_train_loop = "after_train_loop"
    before_train_step = "before_train_step"
    after_train_step = "after_train_step"
    before_forward = "before_forward"
    after_forward = "after_forward"
    before_backward = "before_backward"
    after_backward = "after_backward"
    before_update = "before_update"
    after_update = "after_update"
    before_checkpoint = "before_checkpoint"
    after_checkpoint = "after_checkpoint"
    before_val_loop = "before_val_loop"
    after_val_loop = "after_val_loop"
    before_test_loop = "before_test_loop"
    after_test_loop = "after_test_loop"
    before_eval_loop = "before_eval_loop"
    after_eval_loop = "after_eval_loop"
    before_eval_step = "before_eval_step"
    after_eval_step = "after_eval_step"

    @property
    def pair(self) -> Moment:
        """The matching `before_` or `after_` moment."""
        when, _, part = self.value.partition("_")
        return Moment(f"{'after' if when == 'before' else 'before'}_{part}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """What an observer gets at a moment. The tensors in it are live: copy what you keep, and change nothing."""

    moment: Moment
    epoch: int
    step: int
    """Optimizer steps that are complete, over all epochs."""
    split: Split = "train"
    batch: int = 0
    """Batches of this loop so far."""
    num_batches: int | None = None
    """Batches of the whole loop; None if its loader has no length."""
    datapoint: Mapping[str, Any] = field(default_factory=dict)
    loss: Tensor | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    """After an evaluation: its aggregated scores."""


Observer = Callable[[Glimpse], Any]


class Observation:
    """A registered observer. `remove()` removes it; so does leaving it as a context manager."""

    def __init__(self, places: list[Callable[[Glimpse], None]], call: Callable[[Glimpse], None]) -> None:
        self._places, self._call = places, call

    def remove(self) -> None:
        """Stop observing. Removing twice is fine."""
        if self._call in self._places:
            self._places.remove(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Moments:
    """The observers of each moment."""

    def __init__(self) -> None:
        self._observers: dict[Moment, list[Callable[[Glimpse], None]]] = {}

    def on(self, moment: Moment | str, observer: Observer, on_error: OnError = "isolate") -> Observation:
        """Call `observer` at a moment from now on.

        Raises:
            OptionError: There is no such moment.

        """
        places = self._observers.setdefault(_find(moment), [])
        name = getattr(observer, "__qualname__", type(observer).__name__)

        def look(glimpse: Glimpse) -> None:
            observer(glimpse)

        call = Guard(on_error, _report).wrap(f"the observer {name} of {moment}", look)
        places.append(call)
        return Observation(places, call)

    def wants(self, moment: Moment) -> bool:
        """Return whether a moment has an observer."""
        return bool(self._observers.get(moment))

    def fire(self, glimpse: Glimpse) -> None:
        """Call the observers of a moment."""
        observers = self._observers.get(glimpse.moment)
        if not observers:
            return
        with kept_random_state(), torch.no_grad():
            for observer in tuple(observers):
                observer(glimpse)


def _find(moment: Moment | str) -> Moment:
    try:
        return Moment(moment)
    except ValueError:
        raise OptionError(f"There is no moment {moment!r}; choose from {', '.join(Moment)}.") from None


def _report(part: str, trace: str) -> None:
    logger.warning("%s failed and is removed; training continues.\n%s", part, trace.rstrip())
