"""The session: what the user holds while a run is recorded.

It has few verbs: log, record, event, epoch, step, subscribe, flush, close. What they start is in `record.pipeline`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from torch import Tensor

from sonde.core import schema
from sonde.core.arguments import mapping, whole_number, with_methods
from sonde.core.outcome import message_of, outcome_of
from sonde.errors import ClosedError, OptionError
from sonde.record.governor import Cost
from sonde.record.pipeline import Pipeline
from sonde.records import QUANTITIES, Finding, Quantity, Reading, Sink, summarise

logger = logging.getLogger("sonde")
T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 30.0

_live: set[Session] = set()
"""The sessions that are open, held here so that a run is recorded even if the result of `watch` is not kept."""


class Session:
    """A recording in progress. Made by `sonde.watch`; a context manager that closes itself."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.path = pipeline.path
        self._pipeline = pipeline
        self._closed = False
        self._error_before = id(getattr(sys, "last_value", None))
        _live.add(self)
        try:
            pipeline.attach()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ verbs

    @property
    def current_step(self) -> int:
        """The step that is being recorded, or that has just ended; steps count from 1."""
        return self._pipeline.packer.step

    @property
    def is_closed(self) -> bool:
        """Whether it records no more."""
        return self._closed

    @property
    def dropped_steps(self) -> int:
        """How many steps could not be recorded because the writer lagged behind."""
        return self._pipeline.packer.dropped

    @property
    def held_bytes(self) -> int:
        """How much memory the recorder holds for steps that wait to be written, and for its diagnosis."""
        return self._pipeline.held_bytes()

    @property
    def cost(self) -> Cost | None:
        """What recording costs, as a share of a step's own time, and what was thinned to keep within the budget."""
        return self._pipeline.governor.cost()

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the run as far as is known, most severe first; complete once the session is closed."""
        return [] if self._pipeline.judge is None else self._pipeline.judge.findings

    def log(self, **scalars: float | Tensor) -> None:
        """Record single numbers of this step: a loss, an accuracy. A tensor is not waited for.

        Example:
            session.log(loss=loss, accuracy=0.93)

        """
        self._check_open("log")
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise OptionError(
                        f"log({name}=...) takes single numbers; this tensor has shape {tuple(value.shape)}. "
                        f"Use session.record({name!r}, tensor) for its statistics."
                    )
                site = self._pipeline.scalar_site(name)
                if value.is_cpu and not value.is_meta:
                    self._pipeline.packer.put(site, float(value.detach()))  # there is no device to wait for
                else:
                    self._pipeline.packer.see(site, value.detach())
            else:
                self._pipeline.packer.put(self._pipeline.scalar_site(name), _number(name, value))

    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Record the statistics of a tensor, array or list of numbers under a name of your own.

        A `Reading` that was made elsewhere is taken as it is. `quantity` is what the numbers are, if they are not
        just values: a gradient that you hand in is shown beside those that Sonde saw itself.
        """
        self._check_open("record")
        _check_site(site, quantity)
        if isinstance(values, Tensor):
            self._pipeline.packer.see(self._pipeline.packer.site(site, quantity, tensor=values), values.detach())
        elif isinstance(values, Reading):
            bins = np.zeros(schema.NUM_BINS, np.uint64) if values.bins is None else values.bins
            self._pipeline.packer.put_reading(self._pipeline.packer.site(site, quantity), values.row, bins)
        else:
            row, bins = summarise(_numbers(site, values))
            self._pipeline.packer.put_reading(self._pipeline.packer.site(site, quantity), row, bins)

    def loading(self, loader: Iterable[T]) -> Iterable[T]:
        """Return `loader` to iterate over, with the time of its `next` recorded as waiting for data.

        Torch's own DataLoader is timed without it; this is for every other way of making batches.

        Example:
            for batch in session.loading(my_generator()):
                train(batch)

        """
        return loader if self._pipeline.step_vitals is None else self._pipeline.step_vitals.loading(loader)

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened on the run's timeline."""
        self._check_open("event")
        _check_word("event", "what happened, such as 'note'", event_type)
        self._pipeline.packer.put_event(event_type, str(message), mapping("event(data=...)", data))

    def epoch(self, number: int) -> None:
        """Set the epoch that the following steps belong to."""
        self._check_open("epoch")
        number = whole_number("epoch(...)", number, least=0)
        self._pipeline.packer.begin()
        self._pipeline.packer.epoch = number
        self._pipeline.packer.put_event("epoch", f"epoch {number}", {"epoch": number})

    def step(self) -> None:
        """End a step by hand, in a loop without a torch optimizer. With one, steps are found from it."""
        self._check_open("step")
        if self._pipeline.optimizers.stepped:
            raise OptionError("step() is for loops without a torch optimizer; here every optimizer.step() ends a step.")
        self._pipeline.packer.begin()
        if self._pipeline.is_due(self._pipeline.packer.step):
            self._pipeline.optimizers.see_orphans()
        self._pipeline.end_step()

    def save_bundle(self, reason: str = "by hand") -> Path:
        """Save what is needed to repeat the present step in the run; call it after the forward, before the step."""
        self._check_open("save_bundle")
        return self._pipeline.save_bundle(reason)

    def subscribe(self, sink: Sink) -> None:
        """Hand everything recorded from now on to `sink` too, in the worker thread."""
        self._check_open("subscribe")
        verbs = ("take_sites", "take_block", "take_event", "take_finding", "flush", "close")
        with_methods("subscribe(...)", sink, "a sink, an object with " + ", ".join(verbs), verbs)
        self._pipeline.worker.subscribe(sink)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything seen so far can be read from the run; False if that took longer than the timeout."""
        self._check_open("flush")
        self._pipeline.packer.ship()
        return self._pipeline.worker.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Detach from the model and finish the run. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self._pipeline.guard.wrap("the cost", self._pipeline.note_final_cost)()
            self._pipeline.detach()
            self._pipeline.guard.wrap("the last step", self._pipeline.packer.ship_rest)()
            # If a device refused its rows, this has been noted meanwhile; what is left needs no device.
            self._pipeline.guard.wrap("the last events", self._pipeline.packer.ship)()
        finally:
            self._finish(timeout_s)

    def _finish(self, timeout_s: float) -> None:
        if not self._pipeline.worker.close(timeout_s):
            logger.warning(
                "the run %s could not be finished within %g s; its end may be missing.", self.path, timeout_s
            )
        self._pipeline.pool.clear()
        _live.discard(self)
        self._log_findings()

    def _log_findings(self) -> None:
        """Log in one line what was found, once, when the run ends."""
        found = [f"{finding.kind} ({finding.severity})" for finding in self.findings if finding.severity != "info"]
        if found and self._pipeline.writer.rank == 0:
            logger.warning("found in %s: %s. Run: sonde diagnose %s", self.path, ", ".join(found), self.path)

    def __enter__(self) -> Self:
        if self._closed:
            raise ClosedError(f"The session of {self.path} is closed. Call sonde.watch again to record more.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed:
            self._note_exception(error)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self.current_step}"
        return f"<Session {self.path} ({state})>"

    # ------------------------------------------------------------------ ends

    def _note_exception(self, error: BaseException) -> None:
        self._pipeline.writer.final_state = outcome = outcome_of(error)
        if outcome == "finished":
            return  # it ended by sys.exit(0), which is not an error
        text = "".join(traceback.format_exception(error))
        kind = "exception" if outcome == "failed" else "interrupted"
        self._pipeline.packer.put_event(kind, message_of(error), {"traceback": text[-8000:]})

    def _abandon(self) -> None:
        """Let go in a forked child: the run, its threads and its files belong to the parent."""
        self._closed = True
        self._pipeline.detach()

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        # In a notebook an error of an earlier cell is not what ends this run.
        if isinstance(error, BaseException) and id(error) != self._error_before and not self._closed:
            self._note_exception(error)
        self.close()

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(f"{verb}() on a closed session ({self.path}). Call sonde.watch again to record more.")


class IdleSession(Session):
    """What `watch(..., enabled=False)` returns: nothing is attached, no file is made, every method does nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = False

    current_step = 0
    dropped_steps = 0
    held_bytes = 0
    cost = None

    @property
    def findings(self) -> list[Finding]:
        """Empty: nothing is measured."""
        return []

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    log = record = event = epoch = step = subscribe = _note_exception = _ignore

    def loading(self, loader: Iterable[T]) -> Iterable[T]:
        """Return the loader."""
        return loader

    def save_bundle(self, reason: str = "by hand") -> Path:
        """Save nothing; return the path the session was given."""
        return self.path

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Return at once."""
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Mark the session as closed."""
        self._closed = True


class HandFedSession(Session):
    """A session without a model: it records what it is handed, and steps end by `step()`.

    Values can be read at once, since no forward pass comes along to send them to the writer.
    """

    def log(self, **scalars: float | Tensor) -> None:
        """Record single numbers of this step."""
        self._pipeline.packer.begin()
        super().log(**scalars)

    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Record the statistics of a tensor, array or list of numbers, or a reading, under a name of your own."""
        self._pipeline.packer.begin()
        super().record(site, values, quantity=quantity)

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened on the run's timeline."""
        super().event(event_type, message, data)
        self._pipeline.packer.ship()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"log({name}=...) takes a number or a tensor with one element; got {value!r:.80}.") from error


def _check_word(verb: str, purpose: str, word: Any) -> None:
    if not isinstance(word, str) or not word:
        raise OptionError(f"{verb}(...) takes a word for {purpose}; got {word!r:.80}.")


def _check_site(site: Any, quantity: Any) -> None:
    _check_word("record", "where the values are from, such as 'scores'", site)
    if quantity not in QUANTITIES:
        raise OptionError(f"record({site!r}, ...) has no quantity {quantity!r}: choose from {', '.join(QUANTITIES)}.")


def _numbers(site: str, values: Any) -> schema.Rows:
    try:
        if values is None:
            raise TypeError  # numpy would make a NaN of it
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"record({site!r}, ...) takes a tensor, array or list of numbers; got {type(values).__name__}."
        ) from error


def _abandon_in_child() -> None:
    for session in list(_live):
        session._abandon()
    _live.clear()


def _close_at_exit() -> None:
    for session in list(_live):
        session._close_at_exit()


# A forked child (a DataLoader worker) inherits hooks and files but no threads: it must let go of them at once.
os.register_at_fork(after_in_child=_abandon_in_child)
atexit.register(_close_at_exit)
