"""Metrics: scores for every sample of a batch, by name, and whether higher or lower is better.

A metric is any callable that takes a datapoint and returns `{name: values}` with one value (or one row) a sample. Its
`DIRECTIONS` say for each name whether more (1) or less (-1) is better. Its `aggregate`, if it has one, makes the scores
of a dataset of those of the samples; without it, that is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from sonde.errors import OptionError
from sonde.training.criteria import per_sample_loss

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
