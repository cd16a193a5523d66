import json
import math

import numpy as np
import pytest

from sonde.analysis.samples import average, columns_of, common_failures, failed_mask, pick, repeats_of
from sonde.analysis.scores import find_evaluation, find_evaluations, read_notes, read_scores
from sonde.errors import OptionError, RunDamaged, RunNotFound
from sonde.store import PageWriter


def write_scores(folder, name="validation_scores.json", **content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def scored(folder, losses, ids=None, **directions):
    return write_scores(
        folder,
        aggregated={"loss": 0.5},
        per_datapoint={"loss": losses},
        ids=list(range(len(losses))) if ids is None else ids,
        directions=directions or {"loss": -1},
    )


def table(folder, losses, **options):
    return read_scores(find_evaluation(scored(folder / "epoch_0", losses, **options).parent))


@pytest.fixture
def run(tmp_path):
    scored(tmp_path / "epoch_0", [0.1, 0.2, 0.9])
    scored(tmp_path / "epoch_10", ["nan", 0.2, 0.9])
    write_scores(tmp_path / "epoch_2", per_datapoint={"iou": [1, 0, 1], "class_iou": [[0, "nan"], [1, 0.5], [1, 1]]},
                 ids=["a", "b", "c"], directions={"iou": 1}, aggregated={"class_iou": [0.5, 0.6]})  # fmt: skip
    write_scores(tmp_path / "test", "test_results.json", per_datapoint={"loss": [3]}, ids=[0], directions={"loss": -1})
    (tmp_path / "epoch_3").mkdir()
    return tmp_path


def test_evaluations_come_in_the_order_of_epochs_and_empty_ones_are_left_out(run):
    assert [each.name for each in find_evaluations(run)] == ["0", "2", "10", "test"]
    assert find_evaluation(run).name == "test"
    with pytest.raises(RunNotFound, match="there is: 0, 2, 10, test"):
        find_evaluation(run, "7")
    with pytest.raises(RunNotFound, match="sonde train"):
        find_evaluation(run / "epoch_3")


def test_scores_are_read_as_columns_with_lists_taken_apart(run):
    found = read_scores(find_evaluation(run, "2"))
    assert list(found.columns) == ["iou", "class_iou[0]", "class_iou[1]"]
    assert math.isnan(found.columns["class_iou[1]"][0])
    assert found.directions["class_iou[1]"] == 1
    assert found.guessed == ("class_iou",)
    assert found.aggregated == {"class_iou[0]": 0.5, "class_iou[1]": 0.6}
    assert found.row_of("b") == 1
    assert found.row_of("z") is None
    with pytest.raises(OptionError, match="there is: iou"):
        found.column("loss")


def test_nan_is_worst_whatever_the_direction(run):
    found = read_scores(find_evaluation(run, "10"))
    assert found.worst_first("loss").tolist() == [0, 2, 1]
    found.directions["loss"] = 1
    assert found.worst_first("loss").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        {"per_datapoint": {"loss": [1, 2]}, "ids": [1]},
        {"per_datapoint": {"loss": [1, [2]]}},
        {"per_datapoint": {"loss": "text"}},
        {"per_datapoint": {"loss": [1], "other": [1, 2]}},
        {"per_datapoint": {"loss": [[[1]]]}},
        {"per_datapoint": [1]},
        {"per_datapoint": {"loss": [1]}, "ids": [None]},
        {"per_datapoint": {"loss": [{}]}},
    ],
)
def test_damaged_scores_are_an_error_that_names_the_file(tmp_path, content):
    write_scores(tmp_path / "epoch_0", **content)
    with pytest.raises(RunDamaged, match=r"validation_scores\.json"):
        read_scores(find_evaluation(tmp_path))


def test_failures_common_to_runs_share_one_threshold_and_respect_the_direction(tmp_path):
    first, second = table(tmp_path / "a", [0, 1, 9, 8]), table(tmp_path / "b", [0, 7, 1, 10])
    found = common_failures([first, second], "loss", 50)
    limit = np.quantile([0, 1, 9, 8, 0, 7, 1, 10], 0.5)
    assert found.threshold == limit
    assert found.failed.tolist() == [0, 1, 1, 2]
    assert [found.ids[row] for row in found.worst_first()] == [3, 1, 2]
    for each in (first, second):
        each.directions["loss"] = 1
    assert common_failures([first, second], "loss", 50).failed.tolist() == [2, 1, 1, 0]
    first.directions["loss"] = -1
    with pytest.raises(OptionError, match="disagree"):
        common_failures([first, second], "loss", 50)


def test_equally_good_samples_never_count_as_failures(tmp_path):
    perfect = table(tmp_path, [1.0] * 9 + [0.0], loss=1)
    assert common_failures([perfect], "loss", 50).failed.tolist() == [0] * 9 + [1]
    assert failed_mask(perfect, "loss", 50).tolist() == [False] * 9 + [True]


def test_samples_that_only_one_run_scored_are_counted_there(tmp_path):
    first, second = table(tmp_path / "a", [0, 5], ids=["x", "y"]), table(tmp_path / "b", [4, 9], ids=["y", "z"])
    found = common_failures([first, second], "loss", 60)
    assert found.ids == ["x", "y", "z"]
    assert found.scored.tolist() == [1, 2, 1]


def test_repeats_are_averaged_with_their_spread(tmp_path):
    assert repeats_of(["lr_run_0", "lr_run_1", "x-seed-3", "plain", "epoch_5"]) == {
        "lr": ["lr_run_0", "lr_run_1"], "x": ["x-seed-3"], "plain": ["plain"], "epoch_5": ["epoch_5"],
    }  # fmt: skip
    ids, means, spread = average([table(tmp_path / "a", [1, 5, "nan"]), table(tmp_path / "b", [3, 5, 2])], "loss")
    assert ids == [0, 1, 2]
    assert means.tolist() == [2, 5, 2]
    assert spread[:2].tolist() == [pytest.approx(np.std([1, 3], ddof=1)), 0]
    assert math.isnan(spread[2])


def test_labels_and_predictions_of_kept_samples_can_be_asked_for(run):
    with PageWriter(run / "epoch_0" / "samples", page_bytes=1 << 16) as pages:
        pages.add(0, {"inputs": np.ones(4), "labels": np.array(3), "prediction": np.array([5])})
        pages.add(2, {"labels": "cat", "prediction": np.zeros(2)})
    evaluation = find_evaluation(run, "0")
    notes = read_notes(evaluation)
    assert notes.labels == {0: 3, 2: "cat"}
    assert notes.predictions == {0: 5}
    assert [each.idx for each in pick(run, "label != prediction", evaluation="0")] == [0]
    assert [each.idx for each in pick(run, "label == 'cat'", evaluation="0")] == [2]
    assert columns_of(read_scores(evaluation), notes).values["label"].tolist() == [3, None, "cat"]


def test_an_expression_with_epoch_is_asked_of_all_epochs(tmp_path):
    for epoch in range(3):
        scored(tmp_path / f"epoch_{epoch}", [epoch, 0.5])
    assert [(each.epoch, each.idx) for each in pick(tmp_path, "epoch >= 1 and loss > 0.7")] == [(1, 0), (2, 0)]
    assert [(each.epoch, each.idx) for each in pick(tmp_path, "loss > 0")] == [(2, 0), (2, 1)]


def test_pick_can_still_be_imported_from_its_former_place():
    from sonde.analysis import picking

    assert picking.pick is pick
