"""The same loop on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_training import Points, make_config, same_state

import sonde
from sonde.debuggers import FeatureMapDebugger, SequentialDebugger
from sonde.store.pages import load_debug_outputs
from sonde.training import BaseEvaluator, SupervisedTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_device(path, **changes):
    items = [{"name": "hidden", "debugger_config": {"class": FeatureMapDebugger, "args": {"layer_name": "2"}}}]
    debugger = {"class": SequentialDebugger, "args": {"debuggers_config": items}}
    return make_config(path, device="cuda", debugger=debugger, watch=True, **changes)


@pytest.mark.parametrize("amp", [None, "bf16", "fp16"])
def test_training_captures_and_resumes(tmp_path, amp):
    whole = SupervisedTrainer(on_device(tmp_path / "whole", amp=amp, clip_grad_norm=1.0))
    whole.run()
    cut = SupervisedTrainer(on_device(tmp_path / "cut", amp=amp, clip_grad_norm=1.0))
    cut.on("after_train_step", lambda glimpse: glimpse.step == 8 and cut.stop("cut"))
    cut.run()
    rest = SupervisedTrainer(on_device(tmp_path / "cut", amp=amp, clip_grad_norm=1.0))
    rest.run(resume=True)
    assert same_state(rest.model.state_dict(), whole.model.state_dict())
    assert rest.history == whole.history
    pages = [load_debug_outputs(tmp_path / name / "epoch_2" / "debugger") for name in ("whole", "cut")]
    for sample in range(10):
        left, right = (np.asarray(page[sample]["hidden"]["feature_map"], np.float32) for page in pages)
        assert np.array_equal(left, right)
    assert list(load_debug_outputs(tmp_path / "cut" / "epoch_2" / "samples")) == list(range(10))
    losses = [sonde.open_run(tmp_path / name).series("loss:scalar").values.tolist() for name in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_validation_and_observers_leave_the_devices_random_numbers_alone(tmp_path):
    plain = SupervisedTrainer(make_config(tmp_path / "plain", device="cuda", val_dataset=None, val_dataloader=None))
    plain.run()
    seen = SupervisedTrainer(on_device(tmp_path / "seen", val_seeds=3))
    seen.on("before_forward", lambda glimpse: torch.rand(3, device="cuda"))
    seen.run()
    assert same_state(plain.model.state_dict(), seen.model.state_dict())


def test_several_threads_evaluate(tmp_path):
    config = on_device(tmp_path)
    shared = {key: config[key] for key in ("model", "metric", "device", "debugger", "watch")}
    shared |= {"eval_dataset": {"class": Points, "args": {"count": 60}}, "batch_size": 4, "seed": 1}
    scores = [
        BaseEvaluator({**shared, "work_dir": str(tmp_path / str(jobs)), "eval_n_jobs": jobs}).run() for jobs in (1, 4)
    ]
    assert scores[0] == scores[1]
    left, right = (load_debug_outputs(tmp_path / name / "debugger") for name in ("1", "4"))
    assert list(left) == list(right) == list(range(60))
    for sample in left:
        pair = [np.asarray(each[sample]["hidden"]["feature_map"]) for each in (left, right)]
        assert np.array_equal(*pair)
