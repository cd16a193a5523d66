from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sonde.errors import OptionError
from sonde.training import Accuracy, EarlyStopping, IoU, LossPerSample, Metrics, Scores
from sonde.training.scores import ScoreBook, aggregate, per_sample_loss


def datapoint(outputs, labels):
    return {"outputs": torch.as_tensor(outputs), "labels": torch.as_tensor(labels)}


def test_accuracy_of_labels_and_of_maps():
    hits = Accuracy()(datapoint([[0.1, 0.9], [0.8, 0.2]], [1, 1]))["accuracy"]
    assert hits.tolist() == [1, 0]
    maps = torch.zeros(1, 2, 2, 2)
    maps[0, 1, 0] = 1
    assert Accuracy()(datapoint(maps, [[[1, 0], [0, 0]]]))["accuracy"].tolist() == [0.75]
    assert Accuracy()(datapoint([[1.5], [-2.0]], [1, 1]))["accuracy"].tolist() == [1, 0]
    with pytest.raises(OptionError, match="the model returned a tuple"):
        Accuracy()({"outputs": (1, 2), "labels": torch.ones(1)})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_sample_is_its_loss_alone(reduction):
    outputs, labels = torch.randn(5, 4, 3), torch.randint(0, 4, (5, 3))
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    alone = [float(nn.CrossEntropyLoss()(outputs[i : i + 1], labels[i : i + 1])) for i in range(5)]
    assert per_sample_loss(criterion, outputs, labels).tolist() == pytest.approx(alone)
    assert LossPerSample(criterion)(datapoint(outputs, labels))["loss"].tolist() == pytest.approx(alone)
    assert criterion.reduction == reduction


def test_a_criterion_without_reduction_is_asked_sample_by_sample():
    def criterion(outputs, labels):
        return (outputs["a"] - labels).square().mean()

    losses = per_sample_loss(criterion, {"a": torch.tensor([[1.0], [3.0]])}, torch.zeros(2, 1))
    assert losses.tolist() == [1, 9]


def test_iou_against_counting_by_hand():
    labels = torch.tensor([[[0, 0], [1, 255]], [[2, 2], [2, 2]]])
    answers = torch.tensor([[[0, 1], [1, 0]], [[2, 2], [0, 2]]])
    outputs = nn.functional.one_hot(answers, 3).permute(0, 3, 1, 2).float()
    scores = IoU(3, ignore_index=255)(datapoint(outputs, labels))
    assert scores["class_iou"][0].tolist()[:2] == [0.5, 0.5]
    assert math.isnan(scores["class_iou"][0, 2])
    assert scores["class_iou"][1, 0] == 0
    assert scores["class_iou"][1, 2] == 0.75
    assert scores["iou"].tolist() == [0.5, 0.375]
    whole = IoU(3).aggregate({name: values.tolist() for name, values in scores.items()})
    assert whole["iou"] == pytest.approx(0.4375)
    assert whole["class_iou"] == pytest.approx([0.25, 0.5, 0.75])


def test_metrics_that_share_a_name_are_refused():
    with pytest.raises(OptionError, match="Two metrics are called accuracy"):
        Metrics([Accuracy(), Accuracy()])
    both = Metrics([Accuracy(), IoU(2)])
    assert both.DIRECTIONS == {"accuracy": 1, "iou": 1, "class_iou": 1}
    lists = {"accuracy": [1.0, 0.0], "class_iou": [[1.0, math.nan], [0.0, 1.0]], "more": [2.0, 4.0]}
    assert aggregate(both, lists) == {"accuracy": 0.5, "class_iou": [0.5, 1.0], "more": 3.0}


def test_directions_are_one_or_minus_one():
    class Wrong:
        DIRECTIONS = {"x": "up"}  # noqa: RUF012

    with pytest.raises(OptionError, match="DIRECTIONS of Wrong: x takes 1"):
        Metrics([Wrong()])


def test_scores_come_one_a_sample_and_in_the_order_of_ids():
    book = ScoreBook(Accuracy())
    book.add([3, 1], {"accuracy": torch.tensor([1.0, 0.0]), "rows": [[1, 2], [3, 4]]})
    book.add(["b"], {"accuracy": 0.5, "rows": [[5, 6]]})
    scores = book.close()
    assert scores.ids == [1, 3, "b"]
    assert scores.per_datapoint == {"accuracy": [0.0, 1.0, 0.5], "rows": [[3, 4], [1, 2], [5, 6]]}
    assert scores.flat() == {"accuracy": 0.5, "rows[0]": 3.0, "rows[1]": 4.0}
    with pytest.raises(OptionError, match=r"returned 1 value\(s\) of 'accuracy' for 2 samples"):
        ScoreBook(None).add([1, 2], {"accuracy": 0.5})
    assert ScoreBook(None).close() == Scores({}, {}, [], {})


def test_scores_survive_a_file(tmp_path):
    scores = Scores({"a": math.inf, "l": [1.0]}, {"a": [1.0, -math.inf], "l": [[1.0], [2.0]]}, [0, "x"], {"a": -1})
    scores.write(tmp_path / "deep" / "scores.json")
    assert Scores.read(tmp_path / "deep" / "scores.json") == scores


def test_the_worst_samples_follow_the_direction():
    scores = Scores({}, {"up": [0.1, 0.9, math.nan], "down": [0.1, 0.9, 0.5]}, [7, 8, 9], {"up": 1, "down": -1})
    assert [sample for sample, _ in scores.worst("up")] == [9, 7, 8]
    assert scores.worst("down", 1) == [(8, 0.9)]


@pytest.mark.parametrize(("direction", "values"), [(1, [1.0, 2.0, 1.5, 2.0, 2.05]), (-1, [2.0, 1.0, 1.5, 1.0, 0.95])])
def test_early_stopping_waits_for_what_is_really_better(direction, values):
    stopping = EarlyStopping("x", direction, patience=3, min_delta=0.1)
    assert [stopping.update(epoch, value) for epoch, value in enumerate(values)] == [False] * 4 + [True]
    assert stopping.best.epoch == 1
    other = EarlyStopping("x", direction, patience=3, min_delta=0.1)
    other.load_state_dict(stopping.state_dict())
    assert other.should_stop
    assert not other.update(5, values[1] + direction)
    assert EarlyStopping("x", direction, patience=1).update(0, math.nan)
