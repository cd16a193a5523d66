"""The session: what the user holds while a run is recorded.

It has few verbs: log, record, event, epoch, step, show, subscribe, flush, close. They start what is in
`record.pipeline`. A wrong argument raises; a fault of Sonde's is reported once and costs what was asked for, not the
program (unless the session has `on_error="raise"`).
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from torch import Tensor

from sonde.core import examination, files, schema, tape
from sonde.core.arguments import mapping, shown, whole_number, with_methods
from sonde.core.examination import Examination
from sonde.core.forks import after_fork_in_child
from sonde.core.metric_names import is_loss_name
from sonde.core.outcome import message_of, outcome_of
from sonde.errors import ClosedError, OptionError, RunNotFound
from sonde.hooks.guard import Guard, isolated, unobserved
from sonde.record.governor import Cost
from sonde.record.pipeline import Pipeline
from sonde.record.printed import PrintedOutput, save_code
from sonde.records import QUANTITIES, Finding, Quantity, Reading, Sink, summarise
from sonde.store import open_run
from sonde.store.remote.spool import CarrierProcess

logger = logging.getLogger("sonde")
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

CLOSE_TIMEOUT_S: Final = 30.0
_ARGUMENT_ERRORS: Final = (OptionError, ClosedError, RunNotFound)

_live: set[Session] = set()
"""The sessions that are open, held here so that a run is recorded even if the result of `watch` is not kept."""


def _otherwise(instead: Callable[..., Any]) -> Callable[[Method], Method]:
    """Decorate a method that the program calls: after a fault of Sonde's it returns `instead(session, ...)`."""
    return isolated(lambda session: session._pipeline.guard, instead, _ARGUMENT_ERRORS)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Return nothing."""


class Session:
    """A recording in progress. Made by `sonde.watch`; a context manager that closes itself."""

    is_automatic = False
    """Whether `sonde run` started it: that prints what was found, and a session of the program's own replaces it."""

    def __init__(self, pipeline: Pipeline, carrier: CarrierProcess | None = None) -> None:
        self.path = pipeline.path
        self.address = str(self.path) if carrier is None else carrier.address
        """Where the run will be: its folder, or its address in an object store."""
        self._carrier = carrier
        self._pipeline = pipeline
        self._closed = False
        self._error_before = id(getattr(sys, "last_value", None))
        self._views: list[Any] = []
        self._known: dict[str, int] = {}
        """The sites of numbers that were logged before, until the session is closed."""
        self._known_losses: set[str] = set()
        _live.add(self)
        try:
            pipeline.attach()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ verbs

    @property
    @_otherwise(lambda self: 0)
    def current_step(self) -> int:
        """The step that is being recorded, or that has just ended; steps count from 1."""
        return self._pipeline.packer.step

    @property
    @_otherwise(lambda self: {})
    def optimizer_steps(self) -> dict[str, int]:
        """How many steps each optimizer has taken, by its name in the run."""
        return self._pipeline.optimizers.counts

    @property
    def is_closed(self) -> bool:
        """Whether it records no more."""
        return self._closed

    @property
    @_otherwise(lambda self: 0)
    def dropped_steps(self) -> int:
        """How many steps could not be recorded because the writer lagged behind."""
        return self._pipeline.packer.dropped

    @property
    @_otherwise(lambda self: 0)
    def held_bytes(self) -> int:
        """How much memory the recorder holds for steps that wait to be written, and for its diagnosis."""
        return self._pipeline.held_bytes()

    @property
    @_otherwise(_nothing)
    def cost(self) -> Cost | None:
        """What recording costs, as a share of a step's own time, and what was thinned to keep within the budget."""
        return self._pipeline.governor.cost()

    @property
    @_otherwise(lambda self: [])
    def findings(self) -> list[Finding]:
        """What is wrong with the run as far as is known, most severe first; complete once the session is closed."""
        return [] if self._pipeline.judge is None else self._pipeline.judge.findings

    @_otherwise(_nothing)
    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **scalars: float | Tensor) -> None:
        """Record single numbers of this step: a loss, an accuracy. A tensor is not waited for.

        Names that are not Python words go into a dict. Beside a dict, `step=` is accepted as by other loggers; the
        steps of a watched run are found from its loop, so there it changes nothing.

        Example:
            session.log(loss=loss, accuracy=0.93)
            session.log({"loss/train": loss})

        """
        # Programs call it in every step: numbers that are known and at hand are taken in a microsecond.
        if values is not None or Guard.paused is not None or not self._log_plain(scalars):
            self._log(values, scalars)

    def _log_plain(self, scalars: dict[str, Any]) -> bool:
        """Take numbers if all were logged before and need nothing else; return whether they were taken."""
        found = []
        for name, value in scalars.items():
            site = self._known.get(name)
            if type(value) is Tensor and value.is_cpu:
                try:
                    value = value.item()
                except RuntimeError:  # it has several elements, or none that can be had
                    return False
            if site is None or type(value) is not float:
                return False
            found.append((site, value))
        packer = self._pipeline.packer
        packer.logged_losses.update(self._known_losses.intersection(scalars))
        packer.put_all(found)
        return True

    @unobserved()
    def _log(self, values: Mapping[str, float | Tensor] | None, scalars: dict[str, float | Tensor]) -> None:
        self._check_open("log")
        if values is not None:
            scalars.pop("step", None)
        packer = self._pipeline.packer
        for name, value in (mapping("log(...)", values) | scalars).items():
            if is_loss_name(name):
                packer.logged_losses.add(name)
                self._known_losses.add(name)
            self._put_number(name, value)
            self._known[name] = self._pipeline.scalar_site(name)

    @unobserved()
    def _put_number(self, name: str, value: float | Tensor) -> None:
        """Record a number without taking it for the loss of this step."""
        if isinstance(value, Tensor):
            _refuse_nested("log", name, value)
            if value.is_complex():
                raise OptionError(f"log({name}=...) takes real numbers; this tensor is complex. Log its abs() or real.")
            if value.numel() != 1:
                raise OptionError(
                    f"log({name}=...) takes single numbers; this tensor has shape {tuple(value.shape)}. "
                    f"Use session.record({name!r}, tensor) for its statistics."
                )
            self._pipeline.packer.put_tensor(self._pipeline.scalar_site(name), value)
        else:
            self._pipeline.packer.put(self._pipeline.scalar_site(name), _number(name, value))

    @_otherwise(_nothing)
    @unobserved()
    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Record the statistics of a tensor, array or list of numbers under a name of your own.

        A `Reading` that was made elsewhere is taken as it is. `quantity` is what the numbers are, if they are not
        just values: a gradient that you hand in is shown beside those that Sonde saw itself.
        """
        self._check_open("record")
        _check_site(site, quantity)
        if isinstance(values, Tensor):
            _refuse_nested("record", site, values)
            self._pipeline.packer.see(self._pipeline.packer.site(site, quantity, tensor=values), values.detach())
        elif isinstance(values, Reading):
            bins = np.zeros(schema.NUM_BINS, np.uint64) if values.bins is None else values.bins
            self._pipeline.packer.put_reading(self._pipeline.packer.site(site, quantity), values.row, bins)
        else:
            row, bins = summarise(_numbers(site, values))
            self._pipeline.packer.put_reading(self._pipeline.packer.site(site, quantity), row, bins)

    @_otherwise(lambda self, loader: loader)
    def loading(self, loader: Iterable[T]) -> Iterable[T]:
        """Return `loader` to iterate over, with the time of its `next` recorded as waiting for data.

        Torch's own DataLoader is timed without it; this is for every other way of making batches.

        Example:
            for batch in session.loading(my_generator()):
                train(batch)

        """
        return loader if self._pipeline.step_vitals is None else self._pipeline.step_vitals.loading(loader)

    @_otherwise(_nothing)
    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened on the run's timeline."""
        self._check_open("event")
        _check_word("event", "what happened, such as 'note'", event_type)
        self._pipeline.packer.put_event(event_type, str(message), mapping("event(data=...)", data))

    @_otherwise(_nothing)
    def epoch(self, number: int) -> None:
        """Set the epoch that the following steps belong to."""
        self._check_open("epoch")
        number = whole_number("epoch(...)", number, least=0, most=2**31 - 1)
        self._pipeline.packer.begin()
        self._pipeline.packer.epoch = number
        self._pipeline.packer.put_event("epoch", f"epoch {number}", {"epoch": number})

    @_otherwise(_nothing)
    @unobserved()
    def step(self, number: int | None = None) -> None:
        """End a training iteration by hand.

        Without it an iteration ends before an optimizer that has stepped in it steps again. Call it once per iteration
        where that is not what you count, or where no torch optimizer steps; from the first call on nothing else ends
        one. `number` is the iteration's number, if you have a count of your own that runs ahead of Sonde's.
        """
        self._check_open("step")
        if number is not None:
            number = whole_number("step(...)", number, least=0)
        self._pipeline.end_by_hand(number)

    @_otherwise(_nothing)
    def save_bundle(self, reason: str = "by hand") -> Path | None:
        """Save what is needed to repeat the present step in the run; call it after the forward, before the step.

        Returns its folder, or None after a fault of Sonde's, which the log and the run report.
        """
        self._check_open("save_bundle")
        _check_word("save_bundle", "the reason", reason)
        return self._pipeline.save_bundle(reason)

    @_otherwise(lambda self, *args, **kwargs: Examination(step=0, note="Sonde failed; its log says why."))
    def examine(self, step: int | None = None, *, only: Iterable[str] = ()) -> Examination:
        """Repeat a taped step with one thing changed at a time, and return what that did.

        It takes up to a minute in a process of its own, on the CPU, and waits for it. Works on a closed session too.

        Args:
            step: The step whose tape is examined; the last one by default.
            only: Names of experiments; all by default.

        Raises:
            RunNotFound: The run has no tape yet.

        """
        if not self._closed:
            self.flush()
        return examination.examine(tape.find(self.path, step), only=only)

    @_otherwise(_nothing)
    def tape(self) -> None:
        """Record the next step operation by operation; `sonde tape RUN` and `run.tape()` show it.

        A few early steps are taped in every run, and one when something is found.
        """
        self._check_open("tape")
        self._pipeline.request_tape()

    @_otherwise(_nothing)
    def subscribe(self, sink: Sink) -> None:
        """Hand everything recorded from now on to `sink` too, in the worker thread."""
        self._check_open("subscribe")
        check_sink("subscribe(...)", sink)
        self._pipeline.worker.subscribe(sink)

    @_otherwise(_nothing)
    def show(self, *, height: int = 420, every_s: float = 1.0) -> None:
        """Show the run below the notebook's cell, and draw it again while it trains, until the session is closed.

        Findings, curves of what was logged and layers that stand out, in a frame of `height` pixels, every `every_s`
        seconds. Drawing takes at most a fiftieth of the time.
        """
        self._check_open("show")
        # By name: recording knows nothing of views.
        view = import_module("sonde.views.notebook").LiveView(open_run(self.path), height=height, every_s=every_s)
        if view.start():
            self._views.append(view)

    @_otherwise(lambda self, *args, **kwargs: False)
    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything seen so far can be read from the run.

        Returns False if that took longer than the timeout, or if the disk or its budget refused a part of it.
        """
        self._check_open("flush")
        self._pipeline.packer.ship()
        return self._pipeline.worker.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Detach from the model and finish the run, whatever fails on the way. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._known.clear()
        pipeline = self._pipeline
        pipeline.guard.run_each(
            [
                ("the last iteration", unobserved()(pipeline.finish)),
                ("the cost", pipeline.note_final_cost),
                ("detaching", pipeline.detach),
                ("the last step", pipeline.packer.ship_rest),
                # If a device refused its rows, this has been noted meanwhile; what is left needs no device.
                ("the last events", pipeline.packer.ship),
                ("late reports", pipeline.guard.report_late),
                ("the last events", pipeline.packer.ship),
                ("removing hooks", pipeline.guard.release),
                ("the ranks", self._end_ranks),
                ("the ranks", self._end_ranks),  # once more, if the first failed
                ("the worker", lambda: self._end_worker(timeout_s)),
                ("the worker", pipeline.worker.stop),
                ("emptying arenas", pipeline.pool.clear),
                ("closing", functools.partial(_live.discard, self)),
                *(("the view in the notebook or the printed output", view.finish) for view in self._views),
                ("the findings", self._log_findings),
                *([("carrying the run to its store", self._carrier.finish)] if self._carrier is not None else []),
            ]
        )

    def keep_logs(self) -> None:
        """Keep the program's source files, and from now on what it prints, in the run."""
        save_code(self.path)
        self._views.append(PrintedOutput(self.path, lambda: self.current_step, self._pipeline.guard))

    def _end_ranks(self) -> None:
        if self._pipeline.rank_watch is not None:
            self._pipeline.rank_watch.close(self._pipeline.writer.final_state)

    def _end_worker(self, timeout_s: float) -> None:
        judge = self._pipeline.judge
        if not self._pipeline.worker.close(timeout_s + (0.0 if judge is None else judge.patience_s)):
            logger.warning(
                "the run %s could not be finished within %g s; its end may be missing.", self.path, timeout_s
            )

    def _log_findings(self) -> None:
        """Log in one line what was found, once, when the run ends."""
        found = [f"{finding.kind} ({finding.severity})" for finding in self.findings if finding.severity != "info"]
        if found and not self.is_automatic and self._pipeline.writer.rank == 0:
            path = files.short(self.path)
            logger.warning("found in %s: %s. Run: sonde diagnose %s", path, ", ".join(found), path)

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

    @_otherwise(lambda self: f"<Session {self.path}>")
    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self.current_step}"
        return f"<Session {self.path} ({state})>"

    def _skip_to(self, step: int) -> None:
        """Set how many steps the program had made when recording began."""
        self._pipeline.packer.renumber(step)

    # ------------------------------------------------------------------ ends

    @_otherwise(_nothing)
    def _note_exception(self, error: BaseException) -> None:
        self._pipeline.writer.final_state = outcome = outcome_of(error)
        if outcome == "finished":
            return  # it ended by sys.exit(0), which is not an error
        text = "".join(traceback.format_exception(error))
        kind = "exception" if outcome == "failed" else "interrupted"
        self._pipeline.packer.put_event(kind, message_of(error), {"traceback": text[-8000:]})

    def _abandon(self) -> None:
        """Detach in a forked child: the run, its threads and its files belong to the parent.

        A child that continues the program calls methods of the session: they do nothing there.
        """
        self._closed = True
        guard = self._pipeline.guard
        self.__class__ = IdleSession
        guard.run_each([("detaching", self._pipeline.detach), ("removing hooks", guard.release)])

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
    """A session that records nothing: nothing is attached, no file is made, every method does nothing.

    It is what `watch(..., enabled=False)` returns, and what is returned where the run cannot be written. In a forked
    child, a session becomes one.
    """

    _is_unrecorded = False

    def __init__(self, path: Path, *, is_unrecorded: bool = False) -> None:
        self.path = path
        self.address = str(path)
        self._closed = False
        self._is_unrecorded = is_unrecorded

    def __repr__(self) -> str:
        why = "could not be recorded" if self._is_unrecorded else "switched off"
        return f"<Session {self.path} ({why})>"

    current_step = 0
    optimizer_steps: dict[str, int] = {}  # noqa: RUF012 - takes the place of a property
    dropped_steps = 0
    held_bytes = 0
    cost = None

    @property
    def findings(self) -> list[Finding]:
        """Empty: nothing is measured."""
        return []

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    log = record = event = epoch = step = tape = subscribe = show = _note_exception = _ignore

    def loading(self, loader: Iterable[T]) -> Iterable[T]:
        """Return the loader."""
        return loader

    def save_bundle(self, reason: str = "by hand") -> Path:
        """Save nothing; return the path the session was given."""
        return self.path

    def examine(self, step: int | None = None, *, only: Iterable[str] = ()) -> Examination:
        """Examine nothing."""
        return Examination(step=0, note="Nothing was recorded: the session is switched off.")

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Return at once; False if the run could not be recorded."""
        return not self._is_unrecorded

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Mark the session as closed."""
        self._closed = True


class HandFedSession(Session):
    """A session without a model: it records what is passed to it, and steps end by `step()`.

    Values can be read at once, since no forward pass comes along to send them to the writer.
    """

    def log(self, values: Mapping[str, float | Tensor] | None = None, /, **scalars: float | Tensor) -> None:
        """Record single numbers of this step; with a dict and `step=`, of the step with that number if it is later."""
        step = scalars.pop("step", None) if values is not None else None
        if step is not None and whole_number("log(step=...)", step, least=0) > self.current_step:
            if self._pipeline.packer.has_readings:
                self._pipeline.end_by_hand(None)
            self._pipeline.packer.begin()
            self._pipeline.packer.renumber(int(step))
        self._pipeline.packer.begin()
        super().log(values, **scalars)

    def record(self, site: str, values: Any, *, quantity: Quantity = "value") -> None:
        """Record the statistics of a tensor, array or list of numbers, or a reading, under a name of your own."""
        self._pipeline.packer.begin()
        super().record(site, values, quantity=quantity)

    def event(self, event_type: str, message: str = "", data: Mapping[str, Any] | None = None) -> None:
        """Note something that happened on the run's timeline."""
        super().event(event_type, message, data)
        self._pipeline.packer.ship()


def check_sink(name: str, sink: Any) -> None:
    """Refuse an object that is not a sink; `name` is where it was passed."""
    methods = ("take_sites", "take_block", "take_event", "take_finding", "flush", "close")
    with_methods(name, sink, "a sink, an object with " + ", ".join(methods), methods)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(
            f"log({name}=...) takes a number or a tensor with one element; got {shown(value)}."
        ) from error


def _check_word(verb: str, purpose: str, word: Any) -> None:
    if not isinstance(word, str) or not word:
        raise OptionError(f"{verb}(...) takes a string for {purpose}; got {shown(word)}.")


def _refuse_nested(verb: str, name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise OptionError(f"{verb}() takes no nested tensors; got one for {name!r}. Hand in its values() or its parts.")


def _check_site(site: Any, quantity: Any) -> None:
    _check_word("record", "where the values are from, such as 'scores'", site)
    if quantity not in QUANTITIES:
        raise OptionError(f"record({site!r}, ...) has no quantity {quantity!r}: choose from {', '.join(QUANTITIES)}.")


def _numbers(site: str, values: Any) -> schema.Rows:
    try:
        if values is None:
            raise TypeError  # numpy would make a NaN of it
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
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


# A forked child (a DataLoader worker) inherits hooks and files but no threads: it must release them at once.
after_fork_in_child(_abandon_in_child)
atexit.register(_close_at_exit)
