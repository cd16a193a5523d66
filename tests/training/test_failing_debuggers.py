"""Training and evaluation continue when debugging fails; a warning names it, and captures and scores mark it."""

import errno
import json
import logging
from collections import namedtuple

import pytest
import torch
from made_training import FakeDebugger, make_config, same_state

import sonde
from sonde.debuggers import BaseDebugger, FeatureMapDebugger, ForwardDebugger, SequentialDebugger
from sonde.errors import OptionError
from sonde.store.pages import PageWriter, load_debug_outputs
from sonde.training import BaseEvaluator, SupervisedTrainer
from sonde.training.samples import SampleKeeper


class InTheHook(ForwardDebugger):
    def process_forward(self, module, input, output):
        raise KeyError("inside the hook")


class AroundTheLayer(FeatureMapDebugger):
    def around_forward(self, module, args, kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        raise KeyError("leaving the layer")


class InTheCall(BaseDebugger):
    def __call__(self, datapoint, model):
        if 3 in datapoint["meta_info"]["idx"]:
            raise ValueError("no such luck")
        return {"fine": datapoint["outputs"]}


class Pair(namedtuple("Both", "one two")):
    """Cannot be built from its parts, and so not be split by sample."""

    def __new__(cls):
        return super().__new__(cls, "a", "b")


class Unsplittable(BaseDebugger):
    def __call__(self, datapoint, model):
        return {"pair": Pair()}


class InTheConstructor(BaseDebugger):
    def __init__(self):
        raise FileNotFoundError("labels.txt")

    def __call__(self, datapoint, model):
        return {}


def described(**debuggers):
    """Describe a sequence of debuggers, with one that works behind them."""
    options = debuggers.pop("options", {})
    items = [{"name": name, "debugger_config": each} for name, each in debuggers.items()]
    items.append({"name": "works", "debugger_config": {"class": FeatureMapDebugger, "args": {"layer_name": "2"}}})
    return {"class": SequentialDebugger, "args": {"debuggers_config": items, **options}}


def config_of(path, debugger, **changes):
    return make_config(path, epochs=2, checkpoint_method="all", debugger=debugger, **changes)


def evaluator_of(path, debugger, **changes):
    config = make_config(path, debugger=debugger, **changes)
    shared = {key: config[key] for key in ("work_dir", "model", "metric", "debugger", "device", "watch")}
    dataset, loader = config["val_dataset"], config["val_dataloader"]
    return BaseEvaluator({**shared, "eval_dataset": dataset, "eval_dataloader": loader, "seed": 0, **changes})


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


FAILURES = {
    "hook": (lambda: {"class": InTheHook, "args": {"layer_name": "0"}}, "KeyError: 'inside the hook'", range(10)),
    "scope": (
        lambda: {"class": AroundTheLayer, "args": {"layer_name": "0"}},
        "KeyError: 'leaving the layer'",
        range(10),
    ),
    "call": (lambda: {"class": InTheCall, "args": {}}, "ValueError: no such luck", range(4)),  # the batch with sample 3
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_debugger_that_fails_leaves_training_as_it_is_and_marks_the_samples(tmp_path, caplog, where):
    make, error, samples = FAILURES[where]
    plain = SupervisedTrainer(config_of(tmp_path / "plain", None))
    plain.run()
    trainer = SupervisedTrainer(config_of(tmp_path / "run", described(mine=make())))
    with caplog.at_level(logging.WARNING, "sonde"):
        trainer.run()
    assert same_state(plain.model.state_dict(), trainer.model.state_dict())
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Debugger 'mine' failed on samples [0, 1, 2, 3]: " + error)
    for epoch in ("epoch_0", "epoch_1"):
        captured = load_debug_outputs(tmp_path / "run" / epoch / "debugger")
        assert list(captured) == list(range(10))
        assert all("feature_map" in captured[sample]["works"] for sample in captured)
        for sample in captured:
            assert (captured[sample]["mine"] == {"error": error}) == (sample in samples)
            assert captured.info(sample).get("failed") == ({"mine": error} if sample in samples else None)
        scores = json.loads((tmp_path / "run" / epoch / "validation_scores.json").read_text())
        assert scores["captures"] == {"complete": False, "failed": {"mine": list(samples)}, "errors": {"mine": error}}
    assert trainer.scores.captures["errors"] == {"mine": error}


@pytest.mark.parametrize("jobs", [1, 4])
def test_an_evaluation_goes_on_with_several_threads_too(tmp_path, jobs):
    debugger = described(mine={"class": InTheCall, "args": {}}, hook={"class": InTheHook, "args": {"layer_name": "0"}})
    scores = evaluator_of(tmp_path, debugger, eval_n_jobs=jobs).run()
    assert scores.captures["failed"]["mine"] == [0, 1, 2, 3]
    assert sorted(scores.captures["failed"]["hook"]) == list(range(10))
    assert json.loads((tmp_path / "evaluation_scores.json").read_text())["captures"] == scores.captures
    captured = load_debug_outputs(tmp_path / "debugger")
    assert [sample for sample in captured if "failed" in captured.info(sample)] == list(range(10))
    assert len(captured) == 10


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("run", [SupervisedTrainer, evaluator_of])
def test_errors_come_through_if_asked_for(tmp_path, where, run):
    make, error, _ = FAILURES[where]
    debugger = described(mine=make(), options={"on_error": "raise"})
    runner = run(config_of(tmp_path, debugger)) if run is SupervisedTrainer else run(tmp_path, debugger)
    with pytest.raises((KeyError, ValueError), match=error.split(": ")[1].strip("'")):
        runner.run()


def test_outputs_that_cannot_be_split_are_missing_and_marked(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sonde"):
        scores = evaluator_of(tmp_path, described(mine={"class": Unsplittable, "args": {}})).run()
    assert "Debugger 'SequentialDebugger' failed on samples [0, 1, 2, 3]: TypeError" in warnings_of(caplog)[0]
    assert scores.captures["missing"] == list(range(10))
    assert len(scores.ids) == 10


def test_a_debugger_that_cannot_be_built_is_left_out(tmp_path, caplog):
    debugger = described(mine={"class": InTheConstructor, "args": {}})
    with caplog.at_level(logging.WARNING, "sonde"):
        scores = evaluator_of(tmp_path / "run", debugger).run()
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Debugger mine cannot be built: FileNotFoundError: labels.txt. ")
    assert list(load_debug_outputs(tmp_path / "run" / "debugger")[0]) == ["works"]
    assert scores.captures == {"complete": False, "errors": {"mine": "FileNotFoundError: labels.txt"}}
    debugger["args"]["on_error"] = "raise"
    with pytest.raises(FileNotFoundError):
        evaluator_of(tmp_path / "loud", debugger).run()


class BrokenSequence(SequentialDebugger):
    def __init__(self, debuggers_config, model):
        raise RuntimeError("no GPU for me")


def test_training_goes_on_without_any_debugger_if_none_can_be_built(tmp_path, caplog):
    trainer = SupervisedTrainer(config_of(tmp_path, {"class": BrokenSequence, "args": {"debuggers_config": []}}))
    with caplog.at_level(logging.WARNING, "sonde"):
        assert list(trainer.run()) == [0, 1]
    assert "BrokenSequence cannot be built: RuntimeError: no GPU for me" in warnings_of(caplog)[0]
    (error,) = trainer.scores.captures["errors"].values()
    assert error == "RuntimeError: no GPU for me"
    assert not (tmp_path / "epoch_1" / "debugger").exists()


@pytest.mark.parametrize(
    "debugger",
    [
        described(mine={"class": InTheHook, "args": {"layer": "0"}}),
        described(mine={"class": "nowhere.Debugger", "args": {}}),
        described(works=InTheCall()),
        described(options={"on_error": "ignore"}),
        described(options={"page_size": 3}),
    ],
    ids=["argument", "class", "name", "on_error", "option"],
)
def test_a_config_that_makes_no_sense_is_an_error_before_training_begins(tmp_path, debugger):
    with pytest.raises(OptionError):
        SupervisedTrainer(config_of(tmp_path, debugger)).run()


def test_scores_list_the_captures_that_a_full_disk_refused(tmp_path, monkeypatch, caplog):
    real = PageWriter.add

    def add(self, datapoint, outputs, **kwargs):
        if datapoint in (4, 7) and "works" in outputs:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, datapoint, outputs, **kwargs)

    monkeypatch.setattr(PageWriter, "add", add)
    with caplog.at_level(logging.WARNING, "sonde"):
        trainer = SupervisedTrainer(config_of(tmp_path / "run", described()))
        assert list(trainer.run()) == [0, 1]
    (warning,) = warnings_of(caplog)
    assert "The capture of datapoint 4 could not be written: OSError: [Errno 28] No space left on device" in warning
    error = "OSError: [Errno 28] No space left on device"
    assert trainer.scores.captures == {"complete": False, "missing": [4, 7], "errors": {"writer": error}}
    assert 4 not in load_debug_outputs(tmp_path / "run" / "epoch_1" / "debugger")
    with pytest.raises(sonde.RunError, match="2 captures could not be written; the first, of datapoint 4: OSError"):
        evaluator_of(tmp_path / "loud", described(options={"on_error": "raise"})).run()
    assert not (tmp_path / "loud" / "evaluation_scores.json").exists()


def test_a_folder_that_cannot_be_opened_costs_the_captures_only(tmp_path, caplog):
    (tmp_path / "epoch_0").mkdir()
    (tmp_path / "epoch_0" / "debugger").write_text("in the way")
    with caplog.at_level(logging.WARNING, "sonde"):
        SupervisedTrainer(config_of(tmp_path, described())).run(resume=True)
    assert "Debugger SequentialDebugger failed to begin its captures in" in warnings_of(caplog)[0]
    first, second = (json.loads((tmp_path / f"epoch_{at}" / "validation_scores.json").read_text()) for at in (0, 1))
    assert not first["captures"]["complete"]
    assert "RunError: Pages cannot be written" in first["captures"]["errors"]["SequentialDebugger"]
    assert "captures" not in second
    assert len(load_debug_outputs(tmp_path / "epoch_1" / "debugger")) == 10


@pytest.mark.parametrize("method", ["__call__", "reset_buffer", "save_all", "close"])
def test_debuggers_of_other_makers_may_fail_anywhere(tmp_path, caplog, method):
    def fail(self, *args):
        raise RuntimeError("a debugger's fault")

    failing = type("Failing", (FakeDebugger,), {method: fail})
    with caplog.at_level(logging.WARNING, "sonde"):
        trainer = SupervisedTrainer(config_of(tmp_path / "run", {"class": failing, "args": {}}))
        assert list(trainer.run()) == [0, 1]
    (warning,) = warnings_of(caplog)
    assert "Debugger Failing failed to " in warning
    assert "RuntimeError: a debugger's fault" in warning
    if method == "__call__":
        assert trainer.scores.captures["failed"] == {"Failing": list(range(10))}
    if method != "close":
        assert trainer.scores.captures["errors"] == {"Failing": "RuntimeError: a debugger's fault"}
    failing.on_error = "raise"
    with pytest.raises(RuntimeError, match="a debugger's fault"):
        SupervisedTrainer(config_of(tmp_path / "loud", {"class": failing, "args": {}})).run()


def test_a_debugger_that_came_built_raises_again_outside_the_training(tmp_path):
    config = config_of(tmp_path / "run", None)
    model = config["model"]["class"]()
    with SequentialDebugger([{"name": "mine", "debugger_config": InTheCall()}], model) as debugger:
        trainer = SupervisedTrainer({**config, "model": model, "debugger": debugger})
        trainer.run()
        assert trainer.scores.captures["failed"] == {"mine": [0, 1, 2, 3]}
        debugger.enabled = True
        with pytest.raises(ValueError, match="no such luck"):
            debugger({"outputs": torch.ones(1), "meta_info": {"idx": [3]}}, model)


def test_samples_that_cannot_be_kept_do_not_end_the_training(tmp_path, monkeypatch, caplog):
    def fail(self, *args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SampleKeeper, "take", fail)
    with caplog.at_level(logging.WARNING, "sonde"):
        assert list(SupervisedTrainer(config_of(tmp_path / "take", None)).run()) == [0, 1]
        monkeypatch.setattr(SampleKeeper, "__init__", fail)
        assert list(SupervisedTrainer(config_of(tmp_path / "open", None)).run()) == [0, 1]
    assert all("No space left on device" in each for each in warnings_of(caplog))
    assert len(warnings_of(caplog)) >= 2
