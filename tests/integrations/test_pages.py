"""The examples on the pages of docs/integrations, run against the real packages: transformers.md, lightning.md,
accelerate.md, ignite.md, trackers.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

import sonde

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
# What other packages warn of is their own business.
pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return a function that runs a page's example with and without its one line, and compares the weights."""
    monkeypatch.chdir(tmp_path)

    def run(name, package, off, end, block=0):
        pytest.importorskip(package)
        code = re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(), flags=re.S)[block]
        weights = []
        for text in (code, re.sub(off, "", code).partition("\nfor finding in")[0]):
            names: dict[str, object] = {}
            exec(compile(text, name, "exec"), names)
            model = end(names)
            weights.append([each.detach().clone() for each in model.parameters()])
            model.zero_grad()
        assert weights[0]
        assert all(map(torch.equal, *weights)), "training must be bit-identical"
        (path,) = Path("runs").iterdir()
        run = sonde.open_run(path)
        assert run.status == "finished"
        assert not [each for each in sonde.diagnose(run).findings if each.severity != "info"]
        return run

    return run


def values(run, name):
    series = run.series(f"{name}:scalar", "value")
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def epochs(run):
    return [(event.step, event.data["epoch"]) for event in run.events if event.event_type == "epoch"]


def test_a_trainer_of_transformers_is_recorded(example):
    run = example("transformers.md", "transformers", r", callbacks=\[callback\]", lambda names: names["model"])
    assert run.steps.tolist() == list(range(17))
    assert list(values(run, "train/loss")) == [4, 8, 12, 16]
    loss = values(run, "loss")
    assert list(loss) == list(range(1, 17)), "of every step, also between the Trainer's logs"
    assert sum(loss[step] for step in range(5, 9)) / 4 == pytest.approx(values(run, "train/loss")[8], rel=1e-3)
    assert list(values(run, "eval/loss")) == [8, 16]
    assert values(run, "train/learning_rate")[4] > values(run, "train/learning_rate")[16]
    assert epochs(run) == [(1, 0), (9, 1)]
    assert run.header.config["user"]["per_device_train_batch_size"] == 8
    assert [event.message for event in run.events if event.event_type == "checkpoint"] == ["out/checkpoint-16"]


def test_a_trainer_of_trl_with_adapters_is_recorded(example):
    pytest.importorskip("peft")
    off = r"callbacks=\[callback\],"
    run = example("transformers.md", "trl", off, lambda names: names["trainer"].model, block=1)
    assert run.steps.tolist() == list(range(13))
    assert list(values(run, "loss")) == list(range(1, 13))
    trained = {site.name for site in run.sites if site.quantity == "gradient"}
    assert trained
    assert all("lora_" in name for name in trained)


def test_a_trainer_of_lightning_is_recorded(example):
    run = example(
        "lightning.md", "lightning", r", callbacks=\[callback\]", lambda names: names["trainer"].lightning_module
    )
    assert run.steps.tolist() == list(range(13))
    assert values(run, "loss") == values(run, "train_loss")
    assert list(values(run, "loss")) == list(range(1, 13))
    assert list(values(run, "val_loss")) == [4, 8, 12]
    assert epochs(run) == [(1, 0), (5, 1), (9, 2)]
    assert run.header.config["user"] == {"width": 16}


def test_a_loop_with_accelerate_is_recorded(example):
    run = example(
        "accelerate.md",
        "accelerate",
        r", log_with=tracker|tracker = .*|accelerator.(init_trackers|log)\(.*|accelerator.end_training\(\)",
        lambda names: names["model"],
    )
    assert run.steps.tolist() == list(range(13)), "two passes of eight batches are a step"
    assert list(values(run, "loss")) == list(range(1, 13))
    assert run.header.config["user"] == {"lr": 0.01}


def test_an_engine_of_ignite_is_recorded(example):
    run = example("ignite.md", "ignite", r"handler = .*|handler.attach\(.*", lambda names: names["model"])
    assert run.steps.tolist() == list(range(13))
    assert list(values(run, "loss")) == list(range(1, 13))
    assert list(values(run, "validation/mse")) == [4, 8, 12]
    assert epochs(run) == [(1, 0), (5, 1), (9, 2)]


@pytest.mark.parametrize(("block", "package"), list(enumerate(["wandb", "mlflow", "tensorboard", "comet_ml"], 1)))
def test_a_tracker_takes_a_run(block, package, tmp_path, monkeypatch, caplog):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    if package == "mlflow":  # its server and its databases are not in mlflow-skinny
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        importlib.import_module(package).set_tracking_uri((tmp_path / "mlruns").as_uri())
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / "trackers.md").read_text(), flags=re.S)
    assert f"to_{package.removesuffix('_ml')}(" in blocks[block]
    exec(compile(f"{blocks[0]}\n{blocks[block]}", "trackers.md", "exec"), {})
    assert "failed" not in caplog.text
    assert sonde.open_run("runs/tracked-1").status == "finished"
