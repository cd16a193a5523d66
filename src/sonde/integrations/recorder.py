"""What all integrations of training frameworks share: a session that a framework's callbacks open, feed and close."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from sonde.core import files
from sonde.hooks.guard import Guard, warn_of_fault
from sonde.options import Keywords
from sonde.parallel.ranks import this_rank
from sonde.records import Finding
from sonde.session import Session
from sonde.watching import watch


class Recorder:
    """A session inside a framework. After it was opened, a fault of Sonde's never reaches the framework.

    Args:
        run: The folder to write; see `sonde.watch`.
        report: Takes a line about each new finding, on the first rank.
        options: Options of `sonde.watch`.

    """

    def __init__(
        self, run: str | os.PathLike[str], report: Callable[[str], None], options: Mapping[str, Any] | None = None
    ) -> None:
        self.session: Session | None = None
        self.findings: list[Finding] = []
        """What was found so far, as of the last `report_findings`."""
        self._run = run
        self._report = report
        self._options = dict(options or {})
        self._known: dict[str, str] = {}
        guard = Guard("isolate", warn_of_fault)
        self.log = guard.wrap("logging of a framework", self._log)
        self.log_means = guard.wrap("logging of a framework", self._log_means)
        self.epoch = guard.wrap("epochs of a framework", self._epoch)
        self.step = guard.wrap("steps of a framework", self._step)
        self.event = guard.wrap("events of a framework", self._event)
        self.report_findings = guard.wrap("findings in a framework's log", self._report_findings)

    @property
    def is_open(self) -> bool:
        """Whether a session records."""
        return self.session is not None and not self.session.is_closed

    def open(
        self, model: nn.Module, optimizers: Iterable[Any], *, steps_before: int = 0, **found: Unpack[Keywords]
    ) -> None:
        """Start recording, unless that has been done; the user's options take precedence over what was found.

        A training that has taken `steps_before` steps continues the run at that step.
        """
        if self.is_open:
            return
        options: dict[str, Any] = {**found, **self._options}
        if steps_before or self.session is not None:
            options.setdefault("resume", True)
        if steps_before and options["resume"]:
            options.setdefault("start_step", steps_before + 1)
        run = self._run if self.session is None else self.session.path
        self.session = watch(model, list(optimizers) or None, run=run, **options)

    def close(self, error: BaseException | None = None) -> None:
        """Finish the run; `error` is what ended the training."""
        if self.session is not None and self.is_open:
            if error is not None:
                self.session._note_exception(error)
            self.session.is_automatic = True  # new findings are reported here
            self.session.close()
            self.report_findings()

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.session is not None and self.is_open:
            self.session.log({name: value for name, value in values.items() if _is_number(value)})

    def _log_means(self, values: Mapping[str, Any]) -> None:
        """Record numbers of several steps: none is the loss of this step, which is still taken from the model."""
        if self.session is not None and self.is_open:
            for name, value in values.items():
                if _is_number(value):
                    self.session._put_number(name, value)

    def _step(self, number: int) -> None:
        """End a step with the framework's number."""
        if self.session is not None and self.is_open:
            self.session.step(number)

    def _epoch(self, number: int) -> None:
        if self.session is not None and self.is_open:
            self.session.epoch(number)

    def _event(self, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        if self.session is not None and self.is_open:
            self.session.event(kind, message, data)

    def _report_findings(self) -> None:
        """Report warnings that are new, or graver than before."""
        if self.session is None or this_rank():
            return
        self.findings = [each for each in self.session.findings if each.severity != "info"]
        for finding in self.findings:
            if self._known.get(finding.kind) != finding.severity:
                self._known[finding.kind] = finding.severity
                self._report(f"sonde: {finding} Run: sonde diagnose {files.short(self.session.path)}")


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that a run can keep: numbers, words, and lists or mappings of them."""
    return {str(name): value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
