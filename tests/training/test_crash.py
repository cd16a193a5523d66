"""kill -9 at every kind of moment: what goes on afterwards is as if nothing had happened."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from made_training import same_state
from tests.waiting import ask, started

import sonde
from sonde.store.pages import load_debug_outputs
from sonde.training import load_checkpoint

PROCESS = Path(__file__).with_name("training_process.py")


@pytest.fixture(scope="module")
def train():
    with started([sys.executable, PROCESS]) as process:
        yield lambda work_dir, **more: int(ask(process, json.dumps({"work_dir": str(work_dir), **more})))


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """A run that nothing happened to."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert train(path) == 0
    return path


def captured(folder):
    outputs = load_debug_outputs(folder)
    assert not outputs.problems
    return {sample: np.asarray(outputs[sample]["hidden"]["feature_map"]) for sample in outputs}


def assert_same_run(path, whole):
    one, two = (load_checkpoint(each / "checkpoint_latest.pt") for each in (path, whole))
    assert same_state(one["model"], two["model"]), "the weights differ"
    assert one["step"] == two["step"] == 20
    for epoch in range(4):
        names = [each / f"epoch_{epoch}" / "validation_scores.json" for each in (path, whole)]
        assert names[0].read_text() == names[1].read_text()
    for epoch in (1, 3):
        folders = [each / f"epoch_{epoch}" / "debugger" for each in (path, whole)]
        left, right = map(captured, folders)
        assert list(left) == list(right) == list(range(10))
        assert all(np.array_equal(left[sample], right[sample]) for sample in left)
        pages = [sorted(file.name for file in folder.glob("page_*.safetensors")) for folder in folders]
        assert pages[0] == pages[1]
        assert len(pages[0]) > 2
        assert not list(folders[0].glob("*.open"))
        assert list(load_debug_outputs(path / f"epoch_{epoch}" / "samples")) == list(range(10))
    losses = [sonde.open_run(each).series("loss:scalar") for each in (path, whole)]
    assert losses[0].steps.tolist() == losses[1].steps.tolist() == list(range(1, 21))
    assert losses[0].values.tolist() == losses[1].values.tolist()
    assert sonde.open_run(path).status == "finished"


@pytest.mark.parametrize(
    "kill",
    [
        {"kill_at": "after_train_step", "kill_epoch": 0, "kill_batch": 2},
        {"kill_at": "after_backward", "kill_epoch": 2, "kill_batch": 3},
        {"kill_at": "before_checkpoint", "kill_epoch": 1},
        {"kill_at": "after_checkpoint", "kill_epoch": 1},
        {"kill_at": "after_eval_step", "kill_epoch": 1, "kill_batch": 2},
        {"kill_at": "after_eval_step", "kill_epoch": 2, "kill_batch": 1},
        {"kill_at": "after_val_loop", "kill_epoch": 1},
        {"kill_at": "after_epoch", "kill_epoch": 3},
    ],
    ids=lambda kill: f"{kill['kill_at']}-{kill['kill_epoch']}",
)
def test_a_killed_run_resumes_to_the_same_weights_and_pages(train, whole, tmp_path, kill):
    path = tmp_path / "run"
    assert train(path, **kill) == -signal.SIGKILL
    assert sonde.open_run(path).status == "crashed"
    finished = {file: file.read_bytes() for file in _finished_files(path)}
    assert train(path, resume=True) == 0
    assert_same_run(path, whole)
    for file, content in finished.items():
        assert file.read_bytes() == content, f"{file} was complete and has been written again"


def _finished_files(path):
    for epoch in range(4):
        folder = path / f"epoch_{epoch}"
        if (folder / "validation_scores.json").is_file():
            yield from folder.glob("debugger/page_*.safetensors")
            yield folder / "validation_scores.json"


def test_a_run_survives_being_killed_again_and_again(train, whole, tmp_path):
    path = tmp_path / "run"
    kills = [("after_train_step", 0, 3), ("after_eval_step", 0, 1), ("after_forward", 1, 0), ("after_eval_step", 3, 2)]
    for number, (moment, epoch, batch) in enumerate(kills):
        end = train(path, kill_at=moment, kill_epoch=epoch, kill_batch=batch, resume=number > 0)
        assert end == -signal.SIGKILL
    assert train(path, resume=True) == 0
    assert_same_run(path, whole)


def test_resuming_a_finished_run_changes_nothing(train, whole):
    before = {
        file: file.stat().st_mtime_ns for file in whole.rglob("*") if file.is_file() and file.name != "config.json"
    }
    assert train(whole, resume=True) == 0
    after = {
        file: file.stat().st_mtime_ns for file in whole.rglob("*") if file.is_file() and file.name != "config.json"
    }
    assert after == before


def test_a_damaged_checkpoint_sends_the_run_back_to_an_earlier_one(train, whole, tmp_path):
    path = tmp_path / "run"
    train(path, kill_at="before_epoch", kill_epoch=3)
    damaged = path / "epoch_2" / "checkpoint.pt"
    assert (path / "epoch_1" / "checkpoint.pt").is_file()
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert train(path, resume=True) == 0
    assert_same_run(path, whole)
