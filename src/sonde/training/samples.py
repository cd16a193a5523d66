"""What an evaluation keeps of samples: captures of the debugger, and the samples themselves.

Inputs, labels, outputs and scores are stored with the run, so that the viewer needs neither dataset nor code.
"""

from __future__ import annotations

import dataclasses
import heapq
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn

from sonde.capture import Capture
from sonde.errors import OptionError, SondeError
from sonde.hooks.guard import Guard, OnError, Report
from sonde.training.config import build_from_config, is_description, name_of
from sonde.training.datapoints import Datapoint, SampleId, sample_of
from sonde.training.moments import Split
from sonde.training.scores import Scores

# --------------------------------------------------------------------------------
# The debugger of a trainer or evaluator: switched on for one folder, saved with the scores, switched off.
#
# A debugger needs `enabled`, `reset_buffer()`, `save_all(folder)` and to be callable. Used where they exist are
# `open(folder, ...)`, so that captures are on disk as they come; `save_all(scores=...)`, so that it can keep only the
# captures of bad samples; `take_problems()`, which returns what is not in the captures; `on_error`; and `close()`.
#
# A debugger that fails does not end the training: a warning names it, the sample and the error, and the scores list
# what is missing. `on_error="raise"` among its args, or as its attribute, lets errors through.


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


_CONTINUES = (
    "Training and evaluation continue, and the scores list what is not captured; on_error='raise' stops instead."
)


def _warn(debugger: str, what: str, trace: str) -> None:
    logger.warning("Debugger %s %s: %s. %s\n%s", debugger, what, _last_line(trace), _CONTINUES, trace.rstrip())


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


# --------------------------------------------------------------------------------


DEFAULT_MOST: Final = 200
PAGE_BYTES: Final = 100 << 20
_KEPT: Final = ("inputs", "labels", "outputs")


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How many samples to store, and which."""

    most: int = DEFAULT_MOST
    policy: Literal["first", "worst"] = "first"


def sample_options(option: Any) -> SampleOptions:
    """Read the config's `save_samples`: `{"max": 500, "policy": "worst"}`, a number, True or False.

    Raises:
        OptionError: It is invalid.

    """
    if option is None or option is True:
        return SampleOptions()
    if option is False:
        return SampleOptions(0)
    if isinstance(option, int):
        option = {"max": option}
    if not isinstance(option, Mapping) or set(option) - {"max", "policy"}:
        raise OptionError(
            f"save_samples takes {{'max': 500, 'policy': 'worst' or 'first'}} or False; got {option!r:.80}."
        )
    most, policy = option.get("max", DEFAULT_MOST), option.get("policy", "first")
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise OptionError(f"save_samples takes a 'max' of 0 or more; got {most!r}.")
    if policy not in ("first", "worst"):
        raise OptionError(f"save_samples has the policy {policy!r}: choose 'first' or 'worst'.")
    return SampleOptions(most, policy)


class SampleKeeper:
    """Stores the samples of one evaluation: the first ones as they come, or the worst ones at the end.

    Args:
        folder: Where their pages go.
        options: How many, and which.
        rank_by: The score by which samples are ranked.
        direction: 1 if higher is better, -1 if lower is.

    """

    def __init__(self, folder: Path, options: SampleOptions, rank_by: str | None, direction: int) -> None:
        self._options, self._rank_by, self._direction = options, rank_by, direction
        self._room = options.most
        self._closed = False
        self._order = itertools.count()
        # The top of the heap is the best of the worst, which is dropped next. Of equals, the earlier stays.
        self._worst: list[tuple[float, int, _Kept]] = []
        # A sample that cannot be stored is logged; the evaluation continues.
        self._pages = Capture(page_bytes=PAGE_BYTES, on_error="isolate")
        self._pages.open(folder)

    def take(self, dp: Datapoint, rows: list[dict[str, Any]]) -> None:
        """Store samples of a batch, or rank them by their scores."""
        ids = dp["meta_info"]["idx"]
        for index, sample in enumerate(ids):
            if self._options.policy == "first":
                if not self._room:
                    return
                self._room -= 1
                self._pages.add(sample, _describe(dp, index), info={"scores": rows[index]})
            else:
                self._rank(dp, index, rows[index], sample)

    def _rank(self, dp: Datapoint, index: int, scores: dict[str, Any], sample: SampleId) -> None:
        badness = self._badness(scores)
        if len(self._worst) >= self._options.most:
            if badness <= self._worst[0][0]:
                return
            heapq.heappop(self._worst)
        kept = _Kept(sample, _describe(dp, index), scores)
        heapq.heappush(self._worst, (badness, -next(self._order), kept))

    def _badness(self, scores: dict[str, Any]) -> float:
        score = scores.get(self._rank_by or "", 0.0)
        if isinstance(score, list):
            score = sum(score) / len(score)
        return math.inf if math.isnan(score) else -self._direction * score

    def close(self) -> None:
        """Write the worst samples, and finish the pages. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for _, _, kept in sorted(self._worst, key=lambda entry: (-entry[0], -entry[1])):
            self._pages.add(kept.sample, kept.parts, info={"scores": kept.scores})
        self._worst.clear()
        self._pages.close()


class _Kept(NamedTuple):
    sample: SampleId
    parts: dict[str, Any]
    scores: dict[str, Any]


def _describe(dp: Datapoint, index: int) -> dict[str, Any]:
    samples = dp["meta_info"]["idx"]
    parts = {key: sample_of(dp[key], index, samples) for key in _KEPT if dp.get(key) is not None}
    prediction = _prediction(parts.get("outputs"), parts.get("labels"))
    return parts if prediction is None else {**parts, "prediction": prediction}


def _prediction(outputs: Any, labels: Any) -> Tensor | None:
    """Return the predicted class of a sample, where outputs are clearly class scores for integer labels."""
    if not (isinstance(outputs, Tensor) and isinstance(labels, Tensor)):
        return None
    is_classes = outputs.is_floating_point() and not labels.is_floating_point() and outputs.ndim == labels.ndim + 1
    return outputs.argmax(0) if is_classes and outputs.shape[1:] == labels.shape and outputs.shape[0] > 1 else None
