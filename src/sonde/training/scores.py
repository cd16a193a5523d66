"""Compute metrics per sample, collect them as scores, and write them as strict JSON."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sonde.core import files
from sonde.errors import OptionError
from sonde.training.datapoints import SampleId, apply_tensor_op, tensors_in

# --------------------------------------------------------------------------------
# Compute the loss of each sample with criteria that return one number for a batch.


def per_sample_loss(criterion: Callable[[Any, Any], Tensor], outputs: Any, labels: Any) -> Tensor:
    """Return the loss of every sample of a batch.

    A criterion with a `reduction`, as torch's losses have, is asked not to reduce. Any other is called for one sample
    after the other, which is slow but right for whatever treats samples apart.
    """
    if getattr(criterion, "reduction", None) in ("mean", "sum", "none"):
        apart = copy.copy(criterion)
        apart.reduction = "none"  # type: ignore[attr-defined] # checked above
        losses = apart(outputs, labels)
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses
    size = next(tensors_in(outputs)).shape[0]
    return torch.stack([criterion(_one(outputs, i), _one(labels, i)).reshape(()) for i in range(size)])


def _one(value: Any, index: int) -> Any:
    return apply_tensor_op(lambda tensor: tensor[index : index + 1], inputs=value)


# --------------------------------------------------------------------------------
# Metrics: scores for every sample of a batch, by name, and whether higher or lower is better.
#
# A metric is any callable that takes a datapoint and returns `{name: values}` with one value (or one row) a sample.
# Its `DIRECTIONS` give for each name whether more (1) or less (-1) is better. Its `aggregate`, if it has one, makes
# the scores of a dataset of those of the samples; without it, that is their mean.


Datapoint = Mapping[str, Any]


class Metric(Protocol):
    """The interface of a metric."""

    DIRECTIONS: ClassVar[Mapping[str, int]]

    def __call__(self, datapoint: Datapoint) -> Mapping[str, Any]:
        """Return the scores of every sample."""


class Accuracy:
    """The share of correct predictions: 0 or 1 for a sample with one label, in between for a map of labels."""

    DIRECTIONS: ClassVar[Mapping[str, int]] = {"accuracy": 1}

    def __call__(self, datapoint: Datapoint) -> dict[str, Tensor]:
        """Return the accuracy of every sample."""
        hits = (predictions(datapoint["outputs"]) == datapoint["labels"]).float()
        return {"accuracy": hits.flatten(1).mean(1) if hits.ndim > 1 else hits}


class LossPerSample:
    """The loss of every sample.

    Args:
        criterion: Takes outputs and labels.

    """

    DIRECTIONS: ClassVar[Mapping[str, int]] = {"loss": -1}

    def __init__(self, criterion: Callable[[Any, Any], Tensor]) -> None:
        self.criterion = criterion

    def __call__(self, datapoint: Datapoint) -> dict[str, Tensor]:
        """Return the loss of every sample."""
        return {"loss": per_sample_loss(self.criterion, datapoint["outputs"], datapoint["labels"])}


class IoU:
    """Intersection over union for maps of classes: `iou`, the mean over the classes that occur, and `class_iou`.

    A class that occurs neither in the answer nor in the labels of a sample has no IoU there: it is NaN in `class_iou`,
    and left out of means.

    Args:
        num_classes: How many classes there are.
        ignore_index: A label that does not count.

    """

    DIRECTIONS: ClassVar[Mapping[str, int]] = {"iou": 1, "class_iou": 1}

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        self.num_classes, self.ignore_index = num_classes, ignore_index

    def __call__(self, datapoint: Datapoint) -> dict[str, Tensor]:
        """Return the IoU of every sample, and of every class in it."""
        labels = datapoint["labels"].flatten(1)
        answers = predictions(datapoint["outputs"]).flatten(1)
        counted = torch.ones_like(labels, dtype=torch.bool)
        if self.ignore_index is not None:
            counted = labels != self.ignore_index
        classes = torch.arange(self.num_classes, device=labels.device)[None, :, None]
        said = (answers[:, None] == classes) & counted[:, None]
        true = (labels[:, None] == classes) & counted[:, None]
        # 0 / 0 is NaN, as it should be for a class that does not occur.
        class_iou = (said & true).sum(2).double() / (said | true).sum(2)
        return {"iou": class_iou.nanmean(1), "class_iou": class_iou}

    def aggregate(self, per_datapoint: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Average over the samples in which something occurs."""
        return {
            name: torch.tensor(values, dtype=torch.float64).nanmean(0).tolist()
            for name, values in per_datapoint.items()
        }


class Metrics:
    """Several metrics as one."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = tuple(metrics)
        self.DIRECTIONS: dict[str, int] = {}
        for metric in self.metrics:
            twice = self.DIRECTIONS.keys() & directions_of(metric).keys()
            if twice:
                raise OptionError(f"Two metrics are called {', '.join(sorted(twice))}; scores need names of their own.")
            self.DIRECTIONS.update(directions_of(metric))

    def __call__(self, datapoint: Datapoint) -> dict[str, Any]:
        """Return the scores of all of them."""
        return {name: values for metric in self.metrics for name, values in metric(datapoint).items()}

    def aggregate(self, per_datapoint: Mapping[str, list[Any]]) -> dict[str, Any]:
        """Aggregate the scores of every metric with the metric itself."""
        done: dict[str, Any] = {}
        for metric in self.metrics:
            mine = {name: values for name, values in per_datapoint.items() if name in directions_of(metric)}
            done |= aggregate(metric, mine)
        return done | aggregate(None, {name: each for name, each in per_datapoint.items() if name not in done})


def predictions(outputs: Any) -> Tensor:
    """Return the predicted class: the largest of (samples, classes, ...), or the sign of a single output."""
    if not isinstance(outputs, Tensor):
        raise OptionError(f"Classes are read from a tensor of outputs; the model returned a {type(outputs).__name__}.")
    if outputs.ndim >= 2 and outputs.shape[1] > 1:
        return outputs.argmax(1)
    flat = outputs.squeeze(1) if outputs.ndim >= 2 else outputs
    return (flat > 0).long()


def directions_of(metric: Any) -> Mapping[str, int]:
    """Return the direction of each score of a metric: 1 if higher is better, -1 if lower; empty if it has none."""
    directions = getattr(metric, "DIRECTIONS", {})
    for name, direction in directions.items():
        if direction not in (1, -1):
            raise OptionError(f"DIRECTIONS of {type(metric).__name__}: {name} takes 1 (more is better) or -1.")
    return dict(directions)


def aggregate(metric: Any, per_datapoint: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Aggregate the scores of samples into those of the dataset."""
    if hasattr(metric, "aggregate"):
        return dict(metric.aggregate(per_datapoint))
    return {name: torch.tensor(values, dtype=torch.float64).mean(0).tolist() for name, values in per_datapoint.items()}


# --------------------------------------------------------------------------------
# Collect scores sample by sample, aggregate them, and write them as strict JSON.
#
# {"aggregated": {"accuracy": 0.97}, "per_datapoint": {"accuracy": [1.0, 0.0, ...]}, "ids": [0, 1, ...], the samples,
# in the order of the lists above "directions": {"accuracy": 1}, "captures": {"complete": false, only where captures
# are missing, or a debugger failed "missing": [7], samples without a capture "failed": {"gradcam": [3]}, "errors":
# {"gradcam": "ValueError: ..."}}, "answers": {"label": [3, ...], "prediction": [5, ...]}}


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of an evaluation."""

    aggregated: dict[str, Any]
    per_datapoint: dict[str, list[Any]]
    ids: list[SampleId] = field(default_factory=list)
    directions: dict[str, int] = field(default_factory=dict)
    captures: dict[str, Any] = field(default_factory=dict)
    """What is missing from the captures; empty if they are complete, or nothing was captured."""
    answers: dict[str, list[Any]] = field(default_factory=dict)
    """`label` and `prediction` of every sample, where outputs are scores of classes; empty otherwise."""

    def write(self, path: Path) -> None:
        """Write the scores, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: getattr(self, name) for name in self.__slots__}
        for name in ("captures", "answers"):
            if not plain[name]:
                del plain[name]
        files.write(path, plain)

    @classmethod
    def read(cls, path: Path) -> Scores:
        """Read what `write` wrote.

        Raises:
            RunDamaged: The file holds something else.
            OSError: It cannot be read.

        """
        plain = files.read_object(path)
        aggregated = {name: _number(value) for name, value in plain.get("aggregated", {}).items()}
        lists = {name: _number(values) for name, values in plain.get("per_datapoint", {}).items()}
        ids, directions, captures = plain.get("ids", []), plain.get("directions", {}), plain.get("captures", {})
        return cls(aggregated, lists, ids, directions, captures, plain.get("answers", {}))

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Return the aggregated scores as single numbers; lists become `name[0]`, `name[1]` and so on."""
        numbers: dict[str, float] = {}
        for name, value in self.aggregated.items():
            if isinstance(value, list):
                numbers.update((f"{prefix}{name}[{index}]", each) for index, each in enumerate(value))
            else:
                numbers[f"{prefix}{name}"] = value
        return numbers

    def worst(self, name: str, most: int = 5) -> list[tuple[SampleId, float]]:
        """Return the samples that score worst by a metric, the worst first; NaN is worse than any number."""
        sign = self.directions.get(name, 1)
        pairs = zip(self.ids, self.per_datapoint.get(name, []), strict=True)
        ranked = sorted(pairs, key=lambda pair: -math.inf if math.isnan(pair[1]) else sign * pair[1])
        return ranked[:most]


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value)  # what is not finite is written as "nan", "inf" or "-inf"


class ScoreBook:
    """Collects the scores of samples, in any order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._scores: dict[SampleId, dict[str, Any]] = {}
        self._answers: dict[SampleId, tuple[int, int]] = {}

    def note(self, ids: Sequence[SampleId], outputs: Any, labels: Any) -> None:
        """Take the label and the predicted class of each sample of a batch, where outputs are scores of classes."""
        if not (isinstance(outputs, Tensor) and isinstance(labels, Tensor) and outputs.is_floating_point()):
            return
        if labels.is_floating_point() or outputs.ndim != 2 or outputs.shape[1] < 2 or labels.shape != outputs.shape[:1]:
            return
        pairs = torch.stack([labels.long(), outputs.argmax(1)]).tolist()
        self._answers |= {sample: (pairs[0][row], pairs[1][row]) for row, sample in enumerate(ids)}

    def add(self, ids: Sequence[SampleId], scores: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take the scores of a batch, and return them sample by sample.

        Raises:
            OptionError: A metric did not return one score for each sample, or two samples have the same id.

        """
        lists = {name: _one_each(name, values, len(ids)) for name, values in scores.items()}
        rows = [{name: values[row] for name, values in lists.items()} for row in range(len(ids))]
        for sample, each in zip(ids, rows, strict=True):
            if sample in self._scores:
                raise OptionError(
                    f"Two samples have the id {sample!r}; scores and captures need unique ids. "
                    "Check meta_info['idx'] of the dataset."
                )
            self._scores[sample] = each
        return rows

    def close(self) -> Scores:
        """Return all scores, in the order of the ids."""
        ids = sorted(self._scores, key=lambda sample: (isinstance(sample, str), sample))
        names = dict.fromkeys(name for row in self._scores.values() for name in row)
        lists = {name: [self._scores[sample].get(name, math.nan) for sample in ids] for name in names}
        aggregated = aggregate(self._metric, lists) if ids else {}
        known = [self._answers.get(sample, (None, None)) for sample in ids] if self._answers else []
        answers = {"label": [pair[0] for pair in known], "prediction": [pair[1] for pair in known]} if known else {}
        return Scores(aggregated, lists, ids, dict(directions_of(self._metric)), answers=answers)


def _one_each(name: str, values: Any, size: int) -> list[Any]:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu()
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        values = [values]
    if len(values) != size:
        raise OptionError(
            f"The metric returned {len(values)} value(s) of {name!r} for {size} samples; return one for each sample."
        )
    return [_number(list(each)) if isinstance(each, list | tuple) else float(each) for each in values]
