"""Store samples with a run: inputs, labels, outputs and scores, so that the viewer needs neither dataset nor code."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor

from sonde.capture import Capture
from sonde.errors import OptionError
from sonde.training.datapoints import Datapoint, SampleId, sample_of

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
        # A sample that cannot be stored is logged; the evaluation goes on.
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
