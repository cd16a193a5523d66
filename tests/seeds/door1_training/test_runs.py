"""The configs of the examples, verbatim but for their imports, through a trainer, an evaluator and the commands."""

from __future__ import annotations

import json

import pytest
import torch
from tests.seeds.door1.conftest import HERE, Network, block
from torch import nn
from torch.utils.data import Dataset

from sonde.cli.main import app
from sonde.store.pages import BatchValue, load_debug_outputs
from sonde.training import Accuracy, BaseEvaluator, BaseTrainer, SupervisedTrainer

COUNT = 6
EXAMPLES = ("feature map", "attention", "activation stats", "layer output", "gradcam", "config")


class Pictures(Dataset):
    """Datapoints as the examples expect them."""

    def __init__(self, count=COUNT):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        inputs = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": torch.tensor(index % 5), "meta_info": {"idx": index}}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(request):
    def run_blocks(page, *names, **given):
        space = dict(given)
        for name in names:
            exec(compile(block(page, name), f"{page}: {name}", "exec"), space)
        return space

    return run_blocks


def training(work_dir, config, epochs=10):
    dataset = {"class": Pictures, "args": {}}
    return {
        "work_dir": str(work_dir),
        "epochs": epochs,
        "init_seed": 0,
        "model": {"class": Network, "args": {}},
        "train_dataset": dataset,
        "val_dataset": dataset,
        "batch_size": 3,
        "criterion": {"class": nn.CrossEntropyLoss, "args": {}},
        "metric": {"class": Accuracy, "args": {}},
        "optimizer": {"class": torch.optim.SGD, "args": {"lr": 0.01}},
        "device": "cpu",
        **config,
    }


def evaluation(work_dir, config):
    trained = training(work_dir, {})
    shared = {key: trained[key] for key in ("work_dir", "model", "metric", "device", "batch_size")}
    return {**shared, "eval_dataset": trained["val_dataset"], "debugger": config["debugger"]}


def test_training_saves_debug_outputs_every_five_epochs(run, tmp_path):
    config = run("overview", "define", "config", computed_gradcam=torch.ones(1, 8, 8))["config"]
    SupervisedTrainer(training(tmp_path, config)).run()
    # The documented layout, with pages that are safe to open in place of pickles.
    for epoch in (4, 9):
        folder = tmp_path / f"epoch_{epoch}"
        assert (folder / "checkpoint.pt").is_file()
        scores = json.loads((folder / "validation_scores.json").read_text(), parse_constant=pytest.fail)
        assert {"aggregated", "per_datapoint"} <= scores.keys()
        assert (folder / "debugger" / "page_0.safetensors").is_file()
        outputs = load_debug_outputs(folder / "debugger")
        assert list(outputs) == list(range(COUNT))
        assert set(outputs[0]) == {"backbone_features", "gradcam_analysis"}
    assert [n for n in range(10) if (tmp_path / f"epoch_{n}" / "debugger").exists()] == [4, 9]


def test_evaluation_saves_all_of_them(run, tmp_path):
    config = run("overview", "define", "config", computed_gradcam=torch.ones(1, 8, 8))["config"]
    BaseEvaluator(evaluation(tmp_path, config)).run()
    assert (tmp_path / "evaluation_scores.json").is_file()
    assert (tmp_path / "debugger" / "page_0.safetensors").is_file()
    assert list(load_debug_outputs(tmp_path / "debugger")) == list(range(COUNT))


@pytest.mark.parametrize("jobs", [1, 3])
def test_all_five_example_debuggers_run_in_a_trainer(run, tmp_path, jobs):
    config = run("examples", *EXAMPLES)["config"]
    assert config["checkpoint_method"] == 5
    SupervisedTrainer({**training(tmp_path, config, epochs=2), "eval_n_jobs": jobs}).run()
    outputs = load_debug_outputs(tmp_path / "epoch_1" / "debugger")
    assert list(outputs) == list(range(COUNT))
    named = [item["name"] for item in config["debugger"]["args"]["debuggers_config"]]
    assert all(list(outputs[sample]) == named for sample in outputs)
    # These examples compute one number for whatever comes; with batches of three it is not the sample's.
    assert outputs[3]["raw_outputs"]["downsample_factor"] == BatchValue(2, (3, 4, 5))
    assert outputs[3]["backbone_features"]["stats"]["mean"].samples == (3, 4, 5)
    assert outputs[3]["backbone_features"]["feature_map"].shape == (1, 8, 8, 8)


def test_the_integration_points_have_their_names():
    for name in ("_init_debugger", "_init_checkpoint_indices", "_before_val_loop", "_eval_step", "_after_val_loop_"):
        assert callable(getattr(BaseTrainer, name))
    for name in ("_init_debugger", "_eval_epoch_", "_eval_step", "_after_eval_loop_"):
        assert callable(getattr(BaseEvaluator, name))


def test_the_commands_take_a_config_file(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    text = block("overview", "define") + block("overview", "config")
    beside = (
        f"import sys, torch\nsys.path.insert(0, {str(HERE.parents[2])!r})\ncomputed_gradcam = torch.ones(1, 8, 8)\n"
    )
    here = "from tests.seeds.door1_training import test_runs\n"
    (tmp_path / "my_config_with_debugger.py").write_text(
        f"{beside}{here}{text}\nconfig = test_runs.training({str(tmp_path / 'trained')!r}, config, epochs=1)\n"
    )
    (tmp_path / "my_evaluator_config_with_debugger.py").write_text(
        f"{beside}{here}{text}\nconfig = test_runs.evaluation({str(tmp_path / 'evaluated')!r}, config)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for verb, name in (("train", "my_config_with_debugger.py"), ("eval", "my_evaluator_config_with_debugger.py")):
        result = CliRunner().invoke(app, [verb, "--config-filepath", str(tmp_path / name)], prog_name="sonde")
        assert result.exit_code == 0, result.output
    assert (tmp_path / "trained" / "epoch_0" / "debugger" / "page_0.safetensors").is_file()
    assert (tmp_path / "evaluated" / "debugger" / "page_0.safetensors").is_file()
