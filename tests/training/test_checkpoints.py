from __future__ import annotations

import pickle

import pytest
import torch
from made_training import make_config

from sonde.errors import OptionError, RunError
from sonde.training import SupervisedTrainer, checkpoint_indices, load_checkpoint
from sonde.training.checkpoints import epochs_in, save_checkpoint, set_aside


@pytest.mark.parametrize(
    ("epochs", "method", "expected"),
    [
        (10, "latest", [9]),
        (10, "all", list(range(10))),
        (10, 2, [1, 3, 5, 7, 9]),
        (10, 3, [2, 5, 8, 9]),
        (10, 5, [4, 9]),
        (5, 2, [1, 3, 4]),
        (3, 5, [2]),
        (3, 10, [2]),
        (3, 1, [0, 1, 2]),
        (1, "latest", [0]),
    ],
)
def test_the_epochs_with_checkpoints(tmp_path, epochs, method, expected):
    assert checkpoint_indices(epochs, method) == expected
    trainer = SupervisedTrainer(make_config(tmp_path, epochs=epochs, checkpoint_method=method))
    assert trainer.checkpoint_indices == expected


@pytest.mark.parametrize("method", ["newest", 0, -1, 2.0, True, None, [1]])
def test_other_methods_are_refused(method):
    with pytest.raises(OptionError, match="choose 'all', 'latest' or a whole number"):
        checkpoint_indices(3, method)


@pytest.mark.parametrize(
    ("method", "kept"), [("all", {0, 1, 2, 3, 4}), (2, {1, 3, 4}), ("latest", {4})], ids=["all", "2", "latest"]
)
def test_the_best_and_the_latest_are_kept_beside_those_asked_for(tmp_path, method, kept):
    trainer = SupervisedTrainer(make_config(tmp_path, epochs=5, checkpoint_method=method))
    trainer.run()
    found = {epoch for epoch in epochs_in(tmp_path) if (tmp_path / f"epoch_{epoch}" / "checkpoint.pt").is_file()}
    assert found == kept | {trainer.best.epoch}
    best = load_checkpoint(tmp_path / "checkpoint_best.pt")
    latest = load_checkpoint(tmp_path / "checkpoint_latest.pt")
    assert best["epoch"] == trainer.best.epoch == max(trainer.history, key=lambda e: trainer.history[e]["accuracy"])
    assert latest["epoch"] == 4
    assert all((tmp_path / f"epoch_{epoch}" / "validation_scores.json").is_file() for epoch in range(5))


def test_a_checkpoint_holds_only_tensors_and_plain_values(tmp_path):
    SupervisedTrainer(make_config(tmp_path, epochs=1)).run()
    state = torch.load(tmp_path / "epoch_0" / "checkpoint.pt", weights_only=True)
    assert {"model", "optimizer", "scheduler", "scaler", "random", "loader", "epoch", "step"} <= state.keys()


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a checkpoint ran code')",))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(RunError, match="holds more than tensors and plain values"):
        load_checkpoint(tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(RunError):
        load_checkpoint(tmp_path / "plain.pt")


def test_a_missing_or_torn_checkpoint_is_named(tmp_path):
    with pytest.raises(RunError, match=r"There is no checkpoint .*none.pt"):
        load_checkpoint(tmp_path / "none.pt")
    save_checkpoint(tmp_path / "torn.pt", {"x": torch.ones(1000)})
    whole = (tmp_path / "torn.pt").read_bytes()
    (tmp_path / "torn.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=r"torn.pt cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "torn.pt")


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"x": 1})

    def refuse(*args):
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(OSError, match="full"):
        save_checkpoint(path, {"x": 2})
    assert torch.load(path, weights_only=True)["x"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_complete_epoch_steps_aside_and_an_unfinished_one_does_not(tmp_path):
    epoch = tmp_path / "epoch_0"
    (epoch / "debugger").mkdir(parents=True)
    set_aside(epoch, ["debugger", "samples"])
    assert (epoch / "debugger").is_dir()
    for _ in range(2):
        (epoch / "debugger").mkdir(exist_ok=True)
        (epoch / "validation_scores.json").write_text("{}")
        set_aside(epoch, ["debugger", "samples"])
    assert not list(epoch.iterdir())
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "epoch_0",
        "epoch_0.superseded-1",
        "epoch_0.superseded-2",
    ]
    assert epochs_in(tmp_path) == [0]
