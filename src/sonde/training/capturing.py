"""The debugger of a trainer or evaluator: switched on for one folder, saved with the scores, switched off.

A debugger needs `enabled`, `reset_buffer()`, `save_all(folder)` and to be callable. Used where they exist are
`open(folder, ...)`, so that captures are on disk as they come; `save_all(scores=...)`, so that it can keep only the
captures of bad samples; `take_problems()`, which returns what is not in the captures; `on_error`; and `close()`.

A debugger that fails does not end the training: a warning names it, the sample and the error, and the scores list what
is missing. `on_error="raise"` among its args, or as its attribute, lets errors through.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sonde.errors import SondeError
from sonde.hooks.guard import Guard, OnError, Report
from sonde.training.builder import build_from_config, is_description, name_of
from sonde.training.datapoints import Datapoint, SampleId
from sonde.training.moments import Split
from sonde.training.scores import Scores

logger = logging.getLogger("sonde")


class Captures:
    """Runs the debugger of a trainer or evaluator; there may be none.

    Args:
        debugger: The debugger.
        problems: Debuggers that could not be built, with their errors.

    """

    def __init__(self, debugger: Any = None, problems: Mapping[str, str] | None = None) -> None:
        self.debugger = debugger
        self._not_built = dict(problems or {})
        self._folder: Path | None = None
        self._errors: dict[str, str] = {}
        self._logged: set[str] = set()
        self._failed: list[SampleId] = []
        self._chosen = getattr(debugger, "on_error", None)
        if self._chosen is None and hasattr(debugger, "on_error"):
            debugger.on_error = "isolate"

    @property
    def _name(self) -> str:
        return type(self.debugger).__name__

    def set_enabled(self, enabled: bool) -> None:
        """Switch captures on or off."""
        if self.debugger is not None:
            self._run("be switched on or off", partial(setattr, self.debugger, "enabled", enabled))

    def begin(self, folder: Path, epoch: int | None, split: Split) -> None:
        """Switch captures on, for one folder."""
        self._folder, self._errors, self._failed = folder, {}, []
        debugger = self.debugger
        if debugger is None:
            return

        def start() -> None:
            debugger.enabled = True
            debugger.reset_buffer()
            self._take_problems()  # of an earlier folder
            if hasattr(debugger, "open"):
                debugger.open(folder, epoch=epoch, split=split)

        if not self._run(f"begin its captures in {folder}", start):
            self.set_enabled(False)

    def look(self, dp: Datapoint, model: nn.Module) -> Any:
        """Return what the debugger returns for a datapoint; an empty dict if it fails."""
        found: list[Any] = [{}]
        ids = dp["meta_info"]["idx"]
        if not self._run(f"look at sample {ids!r:.80}", lambda: found.append(self.debugger(dp, model))):
            self._failed += ids
        return found[-1]

    def end(self, scores: Scores, monitor: str | None) -> Scores:
        """Save the captures and switch them off; return the scores, which list what is missing from the captures."""
        folder, self._folder = self._folder, None
        if folder is None:
            return scores
        debugger = self.debugger
        if debugger is not None and debugger.enabled:
            self._run(f"save its captures to {folder}", lambda: _save(debugger, folder, scores, monitor))
            self.set_enabled(False)
        problems = self._take_problems()
        if self._failed:
            problems.setdefault("failed", {})[self._name] = self._failed
        if errors := {**problems.get("errors", {}), **self._errors, **self._not_built}:
            problems["errors"] = errors
        return dataclasses.replace(scores, captures={"complete": False, **problems}) if problems else scores

    def close(self, *, keep: bool) -> None:
        """Release the model. A debugger that came built is only switched off: its owner closes it."""
        debugger = self.debugger
        if keep:
            self.set_enabled(False)
            if self._chosen is None and hasattr(debugger, "on_error"):
                debugger.on_error = None
        elif hasattr(debugger, "close"):
            self._run("be closed", debugger.close)

    def _take_problems(self) -> dict[str, Any]:
        return dict(self.debugger.take_problems()) if hasattr(self.debugger, "take_problems") else {}

    def _run(self, what: str, function: Callable[[], None]) -> bool:
        """Call the debugger; return whether it succeeded."""
        return not _guarded(
            f"failed to {what}", function, self._report, "raise" if self._chosen == "raise" else "isolate"
        )

    def _report(self, what: str, trace: str) -> None:
        error = _last_line(trace)
        self._errors.setdefault(self._name, error)
        if error not in self._logged:
            self._logged.add(error)
            _warn(self._name, what, trace)


_GOES_ON = "Training and evaluation go on, and the scores list what is not captured; on_error='raise' stops instead."


def _warn(debugger: str, what: str, trace: str) -> None:
    logger.warning("Debugger %s %s: %s. %s\n%s", debugger, what, _last_line(trace), _GOES_ON, trace.rstrip())


def _last_line(trace: str) -> str:
    return trace.rstrip().splitlines()[-1]


def _guarded(part: str, function: Callable[[], None], report: Report, on_error: OnError) -> bool:
    """Call a function; return whether it failed and was reported."""
    guard = Guard(on_error, report)
    guard.wrap(part, function)()
    return part in guard.failed


def _save(debugger: Any, folder: Path, scores: Scores, monitor: str | None) -> None:
    if monitor in scores.directions and "scores" in inspect.signature(debugger.save_all).parameters:
        by_sample = {
            sample: float(score) if not isinstance(score, list) else math.fsum(score) / len(score)
            for sample, score in zip(scores.ids, scores.per_datapoint.get(monitor, []), strict=True)
        }
        debugger.save_all(str(folder), scores=by_sample, higher_is_better=scores.directions[monitor] > 0)
    else:
        debugger.save_all(str(folder))


def build_debugger(described: Any, model: nn.Module) -> tuple[Any, dict[str, str]]:
    """Build a debugger around a model, without the parts that fail, and return it with their errors.

    Raises:
        OptionError: The config cannot be understood. That is known before training begins, so it is always raised.

    """
    if not is_description(described):
        return build_from_config(described), {}
    on_error: OnError = "raise" if described["args"].get("on_error") == "raise" else "isolate"
    problems: dict[str, str] = {}

    def report(name: str, trace: str) -> None:
        problems[name] = _last_line(trace)
        _warn(name, "cannot be built", trace)

    def build(name: str, config: Any, **kwargs: Any) -> Any:
        built: list[Any] = []

        def make() -> None:
            try:
                built.append(build_from_config(config, **kwargs))
            except SondeError as error:
                built.append(error)

        _guarded(name, make, report, on_error)
        if built and isinstance(built[0], SondeError):
            raise built[0]
        return built[0] if built else None

    args = dict(described["args"])
    items = args.get("debuggers_config")
    if isinstance(items, list | tuple):
        built = [build(_name_of_item(item), item) for item in items]
        args["debuggers_config"] = [item for item in built if item is not None]
    return build(name_of(described["class"]), {**described, "args": args}, model=model), problems


def _name_of_item(item: Any) -> str:
    return str(item.get("name", "?")) if isinstance(item, Mapping) else repr(item)[:80]
