from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from made_training import FakeDebugger, NamedPoints, Points, make_config, network
from torch import nn

import sonde
from sonde.debuggers import FeatureMapDebugger, SequentialDebugger
from sonde.errors import OptionError, RunError, RunExists
from sonde.records import Finding
from sonde.store import timeline
from sonde.store.pages import load_debug_outputs
from sonde.training import BaseEvaluator, SupervisedTrainer


def eval_config(work_dir, **changes):
    trained = make_config(work_dir)
    config = {key: trained[key] for key in ("work_dir", "model", "metric", "device", "watch")}
    config |= {"eval_dataset": {"class": Points, "args": {"count": 23, "seed": 3}}, "batch_size": 5, "seed": 11}
    return {key: value for key, value in (config | changes).items() if value is not None}


def hidden(**args):
    items = [{"name": "hidden", "debugger_config": {"class": FeatureMapDebugger, "args": {"layer_name": "2"}}}]
    return {"class": SequentialDebugger, "args": {"debuggers_config": items, **args}}


def test_scores_and_captures_of_every_sample_are_written(tmp_path):
    model = network()
    scores = BaseEvaluator(eval_config(tmp_path, model=model, debugger=hidden())).run()
    written = json.loads((tmp_path / "evaluation_scores.json").read_text(), parse_constant=pytest.fail)
    assert written["aggregated"] == scores.aggregated
    assert written["ids"] == list(range(23))
    points = Points(23, 3)
    model.eval()
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(points.x), points.y, reduction="none")
        features = model[:3](points.x)
    assert written["per_datapoint"]["loss"] == pytest.approx(losses.tolist(), rel=1e-5)
    outputs = load_debug_outputs(tmp_path / "debugger")
    assert list(outputs) == list(range(23))
    for sample in outputs:
        captured = np.asarray(outputs[sample]["hidden"]["feature_map"]).reshape(-1)
        assert np.allclose(captured, features[sample].numpy(), atol=1e-6)


def test_a_checkpoint_of_a_trainer_is_loaded(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path / "run", epochs=2))
    trainer.run()
    config = eval_config(
        tmp_path / "eval",
        eval_dataset={"class": Points, "args": {"count": 10, "seed": 1}},
        checkpoint_filepath=tmp_path / "run" / "checkpoint_latest.pt",
    )
    scores = BaseEvaluator(config).run()
    assert scores.aggregated == pytest.approx(trainer.history[1])
    bare = tmp_path / "bare.pt"
    torch.save(trainer.model.state_dict(), bare)
    again = BaseEvaluator({**config, "work_dir": str(tmp_path / "again"), "checkpoint_filepath": bare})
    assert again.run().aggregated == pytest.approx(scores.aggregated)
    with pytest.raises(RunError, match="There is no checkpoint"):
        BaseEvaluator({**config, "work_dir": str(tmp_path / "c"), "checkpoint_filepath": tmp_path / "none.pt"}).run()


def test_several_threads_capture_what_one_does(tmp_path):
    model = network()
    one = BaseEvaluator(eval_config(tmp_path / "one", model=model, debugger=hidden(), watch=True))
    four = BaseEvaluator(eval_config(tmp_path / "four", model=model, debugger=hidden(), watch=True, eval_n_jobs=4))
    assert one.run() == four.run()
    left, right = (load_debug_outputs(tmp_path / name / "debugger") for name in ("one", "four"))
    assert list(left) == list(right)
    for sample in left:
        pair = [np.asarray(each[sample]["hidden"]["feature_map"]) for each in (left, right)]
        assert np.array_equal(*pair)


def test_only_the_worst_captures_stay_with_keep(tmp_path):
    evaluator = BaseEvaluator(eval_config(tmp_path, debugger=hidden(keep="worst:4+control:0"), monitor="loss"))
    scores = evaluator.run()
    assert set(load_debug_outputs(tmp_path / "debugger")) == {sample for sample, _ in scores.worst("loss", 4)}


def test_a_debugger_of_the_plain_kind_is_enabled_for_all_and_saved_once(tmp_path):
    evaluator = BaseEvaluator(eval_config(tmp_path / "eval", debugger={"class": FakeDebugger, "args": {}}))
    evaluator.run()
    assert evaluator.debugger.log == ["reset", "save eval/debugger"]
    assert sorted(evaluator.debugger.buffer) == list(range(23))


def test_the_work_dir_is_a_run_of_one_step(tmp_path):
    BaseEvaluator(eval_config(tmp_path, watch=None)).run()
    run = sonde.open_run(tmp_path)
    assert run.status == "finished"
    keys = {site.key for site in run.sites}
    assert {"0.weight:parameter", "0:output@eval", "eval_accuracy:scalar"} <= keys
    assert int(run.steps[-1]) == 1


def test_an_evaluation_is_replaced_only_when_asked(tmp_path):
    config = eval_config(tmp_path, debugger=hidden(), watch=True)
    BaseEvaluator(config).run()
    with pytest.raises(RunExists, match="holds an evaluation already"):
        BaseEvaluator(config).run()
    found = Finding(kind="dead_relu", severity="warning", confidence=0.9, cause="", fix="", step=1, last_step=1)
    (tmp_path / "findings.jsonl").write_bytes(timeline.encode_finding(found))
    assert len(sonde.open_run(tmp_path).findings) == 1
    smaller = {**config, "eval_dataset": {"class": NamedPoints, "args": {"count": 4}}}
    scores = BaseEvaluator(smaller).run(overwrite=True)
    assert list(load_debug_outputs(tmp_path / "debugger")) == scores.ids == [f"point-{n:03d}" for n in range(4)]
    assert sonde.verify(tmp_path).ok
    assert sonde.open_run(tmp_path).findings == []


def test_an_evaluation_that_broke_off_is_done_again(tmp_path):
    evaluator = BaseEvaluator(eval_config(tmp_path, debugger=hidden(), watch=True))

    def fail(glimpse):
        if glimpse.batch == 2:
            raise RuntimeError("broken off")

    evaluator.on("after_eval_step", fail, on_error="raise")
    with pytest.raises(RuntimeError, match="broken off"):
        evaluator.run()
    assert not (tmp_path / "evaluation_scores.json").exists()
    assert list(load_debug_outputs(tmp_path / "debugger"))[:5] == list(range(5))
    BaseEvaluator(eval_config(tmp_path, debugger=hidden(), watch=True)).run()
    assert list(load_debug_outputs(tmp_path / "debugger")) == list(range(23))


def test_a_training_run_is_not_evaluated_into(tmp_path):
    SupervisedTrainer(make_config(tmp_path, epochs=1)).run()
    with pytest.raises(RunExists, match="holds a training run; give the evaluation a work_dir of its own"):
        BaseEvaluator(eval_config(tmp_path)).run(overwrite=True)


def test_evaluation_leaves_the_model_and_the_process_as_they_were(tmp_path):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    BaseEvaluator(eval_config(tmp_path, model=model, debugger=hidden())).run()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_hooks_of_an_evaluator_can_be_overridden(tmp_path):
    calls = []

    class Mine(BaseEvaluator):
        def _eval_epoch_(self):
            calls.append("_eval_epoch_")
            return super()._eval_epoch_()

        def _after_eval_loop_(self):
            calls.append("_after_eval_loop_")
            super()._after_eval_loop_()

    Mine(eval_config(tmp_path)).run()
    assert calls == ["_eval_epoch_", "_after_eval_loop_"]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(OptionError, match="The config lacks 'metric'"):
        BaseEvaluator(eval_config(tmp_path, metric=None))
    with pytest.raises(OptionError, match="The config lacks 'eval_dataset'"):
        BaseEvaluator(eval_config(tmp_path, eval_dataset=None)).run()
