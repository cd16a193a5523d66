from __future__ import annotations

import numpy as np
import pytest
import torch
from made_training import Points, make_config

from sonde.store.pages import BatchValue, load_debug_outputs
from sonde.training import SupervisedTrainer
from sonde.training.datapoints import as_datapoint, sample_of


def test_samples_are_stored_so_that_nothing_else_is_needed(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path, checkpoint_method=2))
    trainer.run()
    stored = load_debug_outputs(tmp_path / "epoch_2" / "samples", tensors="torch")
    points = Points(10, 1)
    trainer.model.eval()
    with torch.no_grad():
        outputs = trainer.model(points.x)
    assert list(stored) == list(range(10))
    for sample in stored:
        assert torch.equal(stored[sample]["inputs"], points.x[sample])
        assert int(stored[sample]["labels"]) == int(points.y[sample])
        torch.testing.assert_close(stored[sample]["outputs"], outputs[sample])
        assert int(stored[sample]["prediction"]) == int(outputs[sample].argmax())
    assert (tmp_path / "epoch_1" / "samples").is_dir()
    assert not (tmp_path / "epoch_0" / "samples").exists()


@pytest.mark.parametrize("jobs", [1, 3])
def test_only_the_worst_samples_are_kept_if_asked(tmp_path, jobs):
    config = make_config(
        tmp_path, epochs=1, monitor="loss", save_samples={"max": 3, "policy": "worst"}, eval_n_jobs=jobs
    )
    trainer = SupervisedTrainer(config)
    trainer.run()
    assert set(load_debug_outputs(tmp_path / "epoch_0" / "samples")) == {n for n, _ in trainer.scores.worst("loss", 3)}


def test_samples_are_bounded_and_can_be_left_out(tmp_path):
    SupervisedTrainer(make_config(tmp_path / "a", epochs=1, save_samples=4)).run()
    assert list(load_debug_outputs(tmp_path / "a" / "epoch_0" / "samples")) == [0, 1, 2, 3]
    SupervisedTrainer(make_config(tmp_path / "b", epochs=1, save_samples=False)).run()
    assert not (tmp_path / "b" / "epoch_0" / "samples").exists()


def test_what_belongs_to_a_batch_of_one_belongs_to_its_sample():
    one = sample_of({"x": torch.ones(1, 2), "loss": 0.5}, 0, ["only"])
    assert (one["x"].tolist(), one["loss"]) == ([1, 1], 0.5)


def test_a_sample_is_cut_out_of_whatever_a_batch_is():
    batch = {"x": torch.arange(6).reshape(3, 2), "names": ["a", "b", "c"], "scale": torch.tensor(2.0), "n": 5}
    one = sample_of(batch, 1, [7, 8, 9])
    assert one["x"].tolist() == [2, 3]
    assert one["names"] == "b"
    assert one["scale"] == BatchValue(2, (7, 8, 9)), "given once for the whole batch"
    assert one["n"] == BatchValue(5, (7, 8, 9))
    pair = sample_of((torch.ones(3, 1), [torch.zeros(3), torch.ones(3)]), 0, [7, 8, 9])
    assert pair[0].shape == (1,)
    assert [float(each) for each in pair[1]] == [0, 1]


@pytest.mark.parametrize(
    ("idx", "expected"),
    [
        (torch.tensor([4, 5]), [4, 5]),
        ([torch.tensor([4]), torch.tensor([5])], [4, 5]),
        (["a", "b"], ["a", "b"]),
        (np.array([4, 5]), [4, 5]),
        (7, [7]),
        ("x", ["x"]),
    ],
)
def test_ids_are_read_from_whatever_collating_made_of_them(idx, expected):
    dp = as_datapoint({"inputs": torch.zeros(2, 1), "labels": None, "meta_info": {"idx": idx, "more": 1}})
    assert dp["meta_info"] == {"idx": expected, "more": 1}


def test_samples_without_ids_are_numbered_by_the_loader():
    assert as_datapoint((torch.zeros(3, 1), torch.zeros(3)), 5)["meta_info"]["idx"] == [5, 6, 7]
    assert as_datapoint(torch.zeros(2, 1))["meta_info"]["idx"] == [0, 1]
    listed = {"inputs": torch.zeros(2, 1), "meta_info": [{"idx": 8}, {"idx": 9}]}
    assert as_datapoint(listed)["meta_info"]["idx"] == [8, 9]
