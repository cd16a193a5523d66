"""The run that a debugger writes, and the automatic checks of every step that such a run records."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from sonde.core import files, schema, signals
from sonde.core.schema import Rows
from sonde.errors import ClosedError, OptionError, RunError
from sonde.hooks.guard import Guard, remove_all, warn_of_fault
from sonde.hooks.on_step import on_step
from sonde.pytorch_debugging.checks import check_gradients, check_loss, check_parameters
from sonde.pytorch_debugging.events import LEVELS
from sonde.record.live_steps import LiveStep, StepFeed
from sonde.records import Finding, Quantity, Reading, Site
from sonde.session import IdleSession, Session
from sonde.store.runs import numbered
from sonde.watching import open_session, watch

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger

logger = logging.getLogger("sonde")

MAX_WAITING: Final = 256
"""Steps that may wait for the training thread; older ones are dropped and counted."""
_TIMES: Final = {signals.part_of(signals.time_of(phase)): phase for phase in ("forward", "backward")}
_CLIP_NORM: Final = signals.part_of(signals.CLIP_NORM)


class Notes:
    """Writes events, numbers and readings into a run, which is opened when there is something to write.

    Without a watched model, a second check of the same quantity starts the next step.
    """

    def __init__(self, log_dir: Path, config: Mapping[str, Any]) -> None:
        self.path: Path | None = None
        """The run's folder, once there is something in it."""
        self._log_dir = log_dir
        self._config = dict(config)
        self._session: Session | None = None
        self._watches = False
        self._seen: set[Quantity] = set()
        self._findings: list[Finding] = []

    def watch(self, model: nn.Module) -> Session:
        """Open the run and watch a model; the steps are then those of its optimizer."""
        self.close()
        self._watches = True
        self._session = watch(model, run=self._new_folder(), rank=0, config=self._config, budget=None)
        return self._session

    def event(self, event_type: str, message: str, data: Mapping[str, Any]) -> None:
        """Write an event."""
        with _unless_closed():
            self._ready().event(event_type, message, data)

    def log(self, **scalars: float) -> None:
        """Write numbers of this step."""
        with _unless_closed():
            self._ready().log(**scalars)

    def readings(self, quantity: Quantity, readings: Mapping[str, Reading]) -> None:
        """Write readings of this step, unless the session takes them itself."""
        if self._watches:
            return
        if quantity in self._seen:
            self.end_step()
        self._seen.add(quantity)
        with _unless_closed():
            session = self._ready()
            for name, reading in readings.items():
                session.record(name, reading, quantity=quantity)

    def end_step(self) -> None:
        """End the step, unless an optimizer does."""
        if not self._watches and self._seen:
            self._seen.clear()
            with _unless_closed():
                self._ready().step()

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the watched model."""
        own = [] if self._session is None else self._session.findings
        return list(own or self._findings)

    @property
    def held_bytes(self) -> int:
        """How much memory the session holds."""
        return 0 if self._session is None else self._session.held_bytes

    def take_findings(self, findings: list[Finding]) -> None:
        """Keep the findings of another session that watches the model."""
        self._findings = list(findings)

    def flush(self) -> None:
        """Wait until everything so far is written and judged."""
        if self._session is not None:
            with _unless_closed():
                self._session.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Finish the run, as failed if an error ended it. What is written later opens another one."""
        session, self._session = self._session, None
        self._watches = False
        self._seen.clear()
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)
            self._findings = list(session.findings)

    def _ready(self) -> Session:
        if self._session is None:
            try:
                # Each debugger of a distributed program has its own folder, in which it is the first rank.
                self._session = open_session(run=self._new_folder(), rank=0, config=self._config)
            except (OSError, RunError) as error:
                # Training goes on, and what is kept in memory still makes a report.
                logger.warning(
                    "no run is written to %s: %s. Free the disk or choose another log_dir.", self._log_dir, error
                )
                self._session = IdleSession(self._log_dir)
                self.path = None
        return self._session

    def _new_folder(self) -> Path:
        """Make the folder after the last of `run-0001`, `run-0002`, ..."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        last = max(numbered(self._log_dir / "run-*"), default=0)
        self.path = files.claim(self._log_dir / f"run-{number:04}" for number in itertools.count(last + 1))
        return self.path


def made_folder(log_dir: Any) -> Path:
    """Return the folder, which is created if it does not exist."""
    if not isinstance(log_dir, str | os.PathLike):
        raise OptionError(f"log_dir takes a path; got {log_dir!r}.")
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise OptionError(f"log_dir={str(folder)!r} is not a folder: a file is in the way. Choose another.") from None
    except OSError as error:
        raise OptionError(f"log_dir={str(folder)!r} cannot be made: {error.strerror}. Choose another.") from None
    return folder


def _unless_closed() -> contextlib.AbstractContextManager[None]:
    # In a forked child the session is closed: the run belongs to the parent.
    return contextlib.suppress(ClosedError)


# ------------------------------------------------------------------ automatic checks


def _label(site: Site) -> tuple[str, str] | None:
    """Return what a site measures and under which name, if the checks of a debugger need it.

    Numbers are `loss`, `clip_norm` (the gradient norm before clipping), `forward` and `backward` (seconds).
    """
    if site.phase != "train" or site.call:
        return None
    if site.quantity in ("gradient", "parameter"):
        return site.quantity, site.name
    if site.quantity == "output" and site.name == signals.LOSS and not site.part:
        return "number", "loss"
    if site.quantity == "vital" and site.name == signals.LOOP and site.part in _TIMES:
        return "number", _TIMES[site.part]
    if site.quantity == "vital" and site.part == _CLIP_NORM:
        return "number", "clip_norm"
    return None


def _number(row: Rows) -> float:
    """Return the mean of what was measured; NaN or an infinity if an element is one."""
    if row[schema.NAN]:
        return math.nan
    if row[schema.POS_INF] or row[schema.NEG_INF]:
        return math.inf if row[schema.POS_INF] else -math.inf
    return float(row[schema.MEAN])


class LiveChecks:
    """Checks every step of a watched model as soon as its readings have arrived, in the thread that trains.

    What the user has checked in a step is not checked again.
    """

    def __init__(self, debugger: PyTorchDebugger, session: Session) -> None:
        self._debugger = debugger
        self._session = session
        self._feed = StepFeed(_label, MAX_WAITING)
        self._by_hand: set[tuple[str, int]] = set()
        session.subscribe(self._feed)
        guard = Guard("isolate", warn_of_fault)
        self._handles = on_step(
            guard.wrap("checking steps", lambda *_: None), guard.wrap("checking steps", lambda *_: self.update())
        )

    def mark(self, what: str) -> None:
        """Note that the user checks this part of the current step."""
        self._by_hand.add((what, self._session.current_step))

    def update(self) -> None:
        """Check the steps that have arrived. Findings that are new become events."""
        steps = self._feed.take()
        for step in steps:
            self._check(step)
        if steps:
            self._by_hand = {(what, number) for what, number in self._by_hand if number > steps[-1].step}
        for finding in self._feed.take_findings():
            self._report(finding)

    def close(self) -> None:
        """Remove the hooks; what has arrived can still be taken by `update`."""
        remove_all(self._handles)

    def _check(self, step: LiveStep[tuple[str, str]]) -> None:
        debugger, number = self._debugger, step.step
        rows: dict[str, dict[str, Rows]] = {"gradient": {}, "parameter": {}, "number": {}}
        for (what, name), row in step.rows.items():
            rows[what][name] = row
        numbers = {name: _number(row) for name, row in rows["number"].items()}

        def is_new(what: str) -> bool:
            return (what, number) not in self._by_hand

        if "loss" in numbers and is_new("loss"):
            check_loss(debugger, numbers["loss"], step=number)
        for name, times in (("forward", debugger.forward_times), ("backward", debugger.backward_times)):
            if name in numbers and is_new(name):
                times.append(numbers[name])
        if not debugger.enable_gradient_checking:
            return
        if rows["gradient"] and is_new("gradient") and not step.skipped:
            check_gradients(debugger, rows["gradient"], step=number, clip_norm=numbers.get("clip_norm"))
        if rows["parameter"] and is_new("parameter"):
            check_parameters(debugger, rows["parameter"], step=number)

    def _report(self, finding: Finding) -> None:
        if finding.withdrawn:
            words, data = f"{finding.kind} no longer holds", {"kind": finding.kind}
            self._debugger._note("finding_withdrawn", words, data, finding="info")
        else:
            self._debugger._note("finding", str(finding), finding.to_json(), finding=LEVELS[finding.severity])
