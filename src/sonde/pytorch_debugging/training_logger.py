"""The training logger: the course of a training, as a text log for people and as JSON lines for programs.

log_dir/
  <experiment>.log              the text log, rotated
  <experiment>_metrics.jsonl    one object for each set of metrics
  <experiment>_events.jsonl     one object for each event
  <experiment>_report.json      a summary, written when the training ends

In a distributed training each further rank has its own files: <experiment>_rank1.log and so on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sonde.core import files
from sonde.core.outcome import message_of, outcome_of
from sonde.diagnosis.case import LOSS_NAMES
from sonde.diagnosis.judgement import Curves, Judgement, judge_curves, loss_now
from sonde.errors import OptionError
from sonde.parallel.ranks import suffix, this_rank
from sonde.pytorch_debugging.recording import made_folder
from sonde.store.lines import LineWriter

_KEPT_NUMBERS: Final = 2048
"""How many of the last values of each metric are judged."""
_MAX_TEXT_BYTES: Final = 10 << 20
_KEPT_EPOCHS: Final = 10_000
_KEPT_ERRORS: Final = 100
# Batches of lines that wait while the disk refuses them.
_MAX_REFUSED: Final = 1000


class TrainingEventType(StrEnum):
    """The types of events in a training."""

    TRAINING_START = "training_start"
    TRAINING_END = "training_end"
    EPOCH_START = "epoch_start"
    EPOCH_END = "epoch_end"
    BATCH_START = "batch_start"
    BATCH_END = "batch_end"
    VALIDATION_START = "validation_start"
    VALIDATION_END = "validation_end"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_LOAD = "checkpoint_load"
    LEARNING_RATE_CHANGE = "learning_rate_change"
    EARLY_STOPPING = "early_stopping"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class TrainingLogger:
    """Logs a training. Use it as a context manager, or call `close` at the end.

    Args:
        log_dir: The folder for the files.
        experiment_name: The first part of their names; the time of the start by default.
        log_level: The lowest level in the text log: a number or a name of `logging`.
        enable_file_logging: Whether to write the text log.
        enable_console_logging: Whether to write the same lines to stderr.
        enable_metrics_logging: Whether to write metrics and events as JSON lines.
        enable_visualization: Whether `create_training_visualizations` plots; else it returns None.
        max_log_files: How many rotated text logs to keep.
        flush_interval: How many JSON lines are collected before they are written. Errors and ends write at once.
        clock: Returns seconds, for durations.
        now: Returns the time of events, in seconds since the epoch.

    Example:
        with TrainingLogger("logs", "digits") as log, log.training_context({"lr": 0.1}):
            for epoch in range(2):
                with log.epoch_context(epoch, 2):
                    log.log_metrics({"loss": 0.5}, step=epoch)

    """

    def __init__(
        self,
        log_dir: str | Path = "logs",
        experiment_name: str | None = None,
        log_level: int | str = logging.INFO,
        enable_file_logging: bool = True,
        enable_console_logging: bool = True,
        enable_metrics_logging: bool = True,
        enable_visualization: bool = True,
        max_log_files: int = 10,
        flush_interval: int = 100,
        *,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.log_dir = made_folder(log_dir)
        by_time = time.strftime("training-%Y%m%d-%H%M%S", time.localtime(now()))
        self.experiment_name = checked_name(experiment_name) or by_time
        self.enable_visualization = enable_visualization
        self.rank = this_rank()
        """The rank of this process; from the second on, it is in the files' names."""
        self._clock, self._now = clock, now
        self.num_events = 0
        self.errors: deque[dict[str, Any]] = deque(maxlen=_KEPT_ERRORS)
        self.num_errors = self.num_warnings = 0
        self.epochs: deque[dict[str, Any]] = deque(maxlen=_KEPT_EPOCHS)
        """A line for each epoch that has ended: its number, duration and last metrics."""
        self.last_metrics: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.duration: float | None = None
        """Seconds of the training that has ended; None before that."""
        self._numbers: dict[str, deque[tuple[int, float]]] = {}
        """By metric: its last values, each with the number of losses logged by then."""
        self._num_losses = 0
        self._began: float | None = None
        self._text = self._open_text(log_level, enable_file_logging, enable_console_logging, max_log_files)
        if flush_interval < 1:
            raise OptionError(f"flush_interval takes a whole number of at least 1; got {flush_interval!r}.")
        self._lines = {
            name: _Lines(LineWriter(self._file(f"_{name}.jsonl"), _MAX_REFUSED), flush_interval)
            for name in (("metrics", "events") if enable_metrics_logging else ())
        }

    # ------------------------------------------------------------------ messages

    def log_info(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Log a message."""
        self._text.info("%s", message)
        self.log_event(TrainingEventType.INFO, message, data)

    def log_warning(self, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Log a warning."""
        self.num_warnings += 1
        self._text.warning("%s", message)
        self.log_event(TrainingEventType.WARNING, message, data)

    def log_error(self, error: BaseException | str, context: Any = None) -> None:
        """Log an error: a message, or an exception with its traceback. It is written at once."""
        self.num_errors += 1
        data: dict[str, Any] = {} if context is None else {"context": context}
        message = str(error)
        if isinstance(error, BaseException):
            message = message_of(error)
            data["traceback"] = "".join(traceback.format_exception(error))[-8000:]
        self.errors.append({"timestamp": self._stamp(), "message": message, **data})
        self._text.error("%s", message)
        self.log_event(TrainingEventType.ERROR, message, data)
        self.flush()

    def log_event(self, event_type: TrainingEventType | str, message: str = "", data: Any = None) -> None:
        """Log an event of any type."""
        self.num_events += 1
        event = {"timestamp": self._stamp(), "event_type": str(event_type), "message": message}
        self._put("events", event | {"data": dict(data or {})})

    # ------------------------------------------------------------------ numbers

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int | None = None, epoch: int | None = None, split: str = "train"
    ) -> None:
        """Log numbers by name. A training loss that is not finite is a warning."""
        self.last_metrics.update(metrics)
        self._keep(metrics, split)
        line = {"timestamp": self._stamp(), "step": step, "epoch": epoch, "split": split, "metrics": dict(metrics)}
        self._put("metrics", line)

    def _keep(self, metrics: Mapping[str, Any], split: str) -> None:
        """Keep numbers for `judge`; warn of a loss that has become NaN or infinite."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        if split != "train":
            numbers = {name if name.startswith("val") else f"{split}_{name}": each for name, each in numbers.items()}
        loss = next((numbers.pop(name) for name in LOSS_NAMES if name in numbers), None) if split == "train" else None
        if loss is not None:
            self._num_losses += 1
            losses = self._numbers.setdefault("loss", deque(maxlen=_KEPT_NUMBERS))
            moment = loss_now(loss)
            if moment.verdict == "non-finite" and (not losses or math.isfinite(losses[-1][1])):
                self.log_warning(moment.words[:1].upper() + moment.words[1:], {"metrics": dict(metrics)})
            losses.append((self._num_losses, loss))
        for name, value in numbers.items():
            self._numbers.setdefault(name, deque(maxlen=_KEPT_NUMBERS)).append((self._num_losses, value))

    def judge(self) -> Judgement:
        """Ask the doctor about the last values of the metrics: the rules that `sonde.diagnose` uses for a run."""
        curves = {name: dict(values) for name, values in self._numbers.items()}
        losses = curves.pop("loss", {})
        return judge_curves(Curves(losses=losses, scalars=curves, finished=self.duration is not None))

    def log_validation_metrics(self, metrics: Mapping[str, Any], epoch: int | None = None) -> None:
        """Log the metrics of a validation; their names get the prefix `val_`."""
        named = {name if name.startswith("val_") else f"val_{name}": value for name, value in metrics.items()}
        self.log_metrics(named, epoch=epoch, split="val")
        self.log_event(TrainingEventType.VALIDATION_END, _in_words(named), {"epoch": epoch, **named})

    def log_checkpoint(self, path: str | Path, epoch: int | None = None) -> None:
        """Log that a checkpoint was saved."""
        self.log_event(TrainingEventType.CHECKPOINT_SAVE, f"saved {path}", {"path": str(path), "epoch": epoch})

    def log_early_stopping(self, reason: str, epoch: int | None = None) -> None:
        """Log that the training ends early."""
        self._text.info("%s", reason)
        self.log_event(TrainingEventType.EARLY_STOPPING, reason, {"epoch": epoch})

    # ------------------------------------------------------------------ contexts

    @contextlib.contextmanager
    def training_context(self, config: Mapping[str, Any] | None = None) -> Iterator[Self]:
        """Log the start and the end of a training, its duration, and the exception that ends it, which is re-raised."""
        self.config = dict(config or {})
        self._began = self._clock()
        self.log_event(TrainingEventType.TRAINING_START, f"training {self.experiment_name}", {"config": self.config})
        try:
            with self._noting_errors("training"):
                yield self
        finally:
            self.duration = self._clock() - self._began
            words = f"training ended after {self.duration:.3g} s"
            self._text.info("%s", words)
            self.log_event(TrainingEventType.TRAINING_END, words, {"duration": self.duration})
            for finding in self.judge().findings:
                if finding.severity != "info":
                    self.log_warning(str(finding), finding.to_json())
            self.save_report()

    @contextlib.contextmanager
    def epoch_context(self, epoch: int, total_epochs: int | None = None) -> Iterator[Self]:
        """Log the start and the end of an epoch, and estimate how long the rest takes."""
        began = self.begin_epoch(epoch, total_epochs)
        try:
            with self._noting_errors(f"epoch {epoch}"):
                yield self
        finally:
            self.end_epoch(epoch, began, total_epochs)

    @contextlib.contextmanager
    def batch_context(self, batch: int, total_batches: int | None = None) -> Iterator[Self]:
        """Log the start and the end of a batch."""
        began = self._clock()
        self.log_event(TrainingEventType.BATCH_START, f"batch {batch}", {"batch": batch, "of": total_batches})
        try:
            with self._noting_errors(f"batch {batch}"):
                yield self
        finally:
            data = {"batch": batch, "of": total_batches, "duration": self._clock() - began}
            self.log_event(TrainingEventType.BATCH_END, f"batch {batch}", data)

    def begin_epoch(self, epoch: int, total_epochs: int | None = None) -> float:
        """Log the start of an epoch; return the time, for `end_epoch`."""
        self.log_event(TrainingEventType.EPOCH_START, f"epoch {epoch}", {"epoch": epoch, "of": total_epochs})
        return self._clock()

    def end_epoch(self, epoch: int, began: float, total_epochs: int | None = None) -> None:
        """Log the end of an epoch that began at `began`."""
        duration = self._clock() - began
        self.epochs.append({"epoch": epoch, "duration": duration, "metrics": dict(self.last_metrics)})
        data: dict[str, Any] = {"epoch": epoch, "of": total_epochs, "duration": duration, **self.last_metrics}
        if total_epochs is not None:
            mean = sum(line["duration"] for line in self.epochs) / len(self.epochs)
            data["remaining"] = max(0, total_epochs - epoch - 1) * mean
        words = f"epoch {epoch}: {_in_words(self.last_metrics)} ({duration:.3g} s)"
        self._text.info("%s", words)
        self.log_event(TrainingEventType.EPOCH_END, words, data)

    # ------------------------------------------------------------------ ends

    @property
    def report_path(self) -> Path:
        """Where the report is, once the training has ended."""
        return self._file("_report.json")

    def get_report(self) -> dict[str, Any]:
        """Return the summary of the training; findings and health are the doctor's, over the last metrics."""
        judged = self.judge()
        return {
            "experiment_name": self.experiment_name,
            "rank": self.rank,
            "config": self.config,
            "duration": self.duration,
            "num_epochs": len(self.epochs),
            "epochs": list(self.epochs),
            "final_metrics": dict(self.last_metrics) or None,
            "num_events": self.num_events,
            "num_warnings": self.num_warnings,
            "num_errors": self.num_errors,
            "errors": list(self.errors),
            "findings": [finding.to_json() for finding in judged.findings],
            "health": judged.health._asdict(),
        }

    def save_report(self) -> Path:
        """Write the report; return its path."""
        self.flush()
        files.write(self.report_path, self.get_report(), indent=2, sync=False)
        return self.report_path

    def create_training_visualizations(self) -> Path | None:
        """Plot loss, scores, learning rate, gradient norm and epoch times into one HTML page; return its path."""
        if not self.enable_visualization:
            return None
        from sonde.pytorch_debugging.training_logs import plot_training_logs

        self.flush()
        return plot_training_logs(self.log_dir, f"{self.experiment_name}{suffix(self.rank)}")

    def flush(self) -> None:
        """Write all lines that are waiting."""
        for lines in self._lines.values():
            lines.flush()
        for handler in self._text.handlers:
            handler.flush()

    def close(self) -> None:
        """Write all lines that are waiting and close the files. Closing twice is fine."""
        for lines in self._lines.values():
            lines.flush()
            lines.writer.close()
        for handler in list(self._text.handlers):
            self._text.removeHandler(handler)
            handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, name: str, line: Mapping[str, Any]) -> None:
        if name in self._lines:
            self._lines[name].put(line)

    @contextlib.contextmanager
    def _noting_errors(self, context: str) -> Iterator[None]:
        """Log an error that ends a part of the training, or that it was interrupted; it is re-raised."""
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            if outcome == "failed":
                self.log_error(error, context)
            elif outcome == "interrupted":
                self.log_warning(f"{context} was interrupted: {message_of(error)}", {"context": context})
            raise

    def _file(self, ending: str) -> Path:
        return self.log_dir / f"{self.experiment_name}{suffix(self.rank)}{ending}"

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).isoformat()

    def _open_text(self, level: int | str, to_file: bool, to_console: bool, kept: int) -> logging.Logger:
        # Not registered with `logging`: two loggers of one name must not share handlers, nor stay in memory.
        text = logging.Logger(f"sonde.training.{self.experiment_name}", _level(level))
        handlers: list[logging.Handler] = []
        if to_file:
            path = self._file(".log")
            handlers.append(RotatingFileHandler(path, maxBytes=_MAX_TEXT_BYTES, backupCount=kept, encoding="utf-8"))
        if to_console:
            handlers.append(logging.StreamHandler(sys.stderr))
        for handler in handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
            text.addHandler(handler)
        return text


@dataclass(slots=True)
class _Lines:
    """JSON lines that are written together. What the disk refuses is written with the next ones."""

    writer: LineWriter
    interval: int
    waiting: list[bytes] = field(default_factory=list)

    def put(self, line: Mapping[str, Any]) -> None:
        self.waiting.append(files.dumps(line) + b"\n")
        if len(self.waiting) >= self.interval:
            self.flush()

    def flush(self) -> None:
        lines, self.waiting = b"".join(self.waiting), []
        if lines:
            self.writer.put(lines)


def _level(level: int | str) -> int:
    if isinstance(level, str):
        known = logging.getLevelNamesMapping()
        if level.upper() not in known:
            raise OptionError(f"log_level={level!r}: choose from {', '.join(known)}.")
        return known[level.upper()]
    return level


def checked_name(name: Any) -> str:
    """Return the name of an experiment; empty if there is none.

    >>> checked_name("digits"), checked_name(None)
    ('digits', '')
    """
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise OptionError(
            f"experiment_name takes a plain name, such as 'digits'; got {name!r:.80}. Folders are chosen by log_dir "
            "and checkpoint_dir."
        )
    return name or ""


def _in_words(metrics: Mapping[str, Any]) -> str:
    parts = (f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))
    return ", ".join(parts) or "no metrics"
