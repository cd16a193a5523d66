"""The training optimizer: learns, stops, resumes, can be awaited and cancelled, and says what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.errors import OptionError, RunExists
from sonde.pytorch_debugging import create_enhanced_training_optimizer, train_model_with_logging
from sonde.pytorch_debugging.enhanced_training_optimizer import INTERRUPTED
from sonde.training import SupervisedTrainer, load_checkpoint


def loaders(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    data = TensorDataset(x, y)
    return DataLoader(data, 16, shuffle=True), DataLoader(data, 32)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def make(tmp_path):
    made = []

    def make_optimizer(net=None, **options):
        train, val = loaders()
        defaults = {"max_epochs": 4, "learning_rate": 0.02, "seed": 0, "experiment_name": "exp", "log_level": "ERROR"}
        folders = {"log_dir": tmp_path / "logs", "checkpoint_dir": tmp_path / "runs"}
        made.append(create_enhanced_training_optimizer(net or model(), train, val, **defaults | folders | options))
        return made[-1]

    yield make_optimizer
    for each in made:
        each.cleanup()


def test_the_model_learns_and_the_results_say_how_far(make):
    optimizer = make()
    results = optimizer.train()
    losses = [scores["loss"] for scores in results["history"].values()]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert results["steps"] == 4 * 6
    assert results["best_epoch"] == 3
    assert load_checkpoint(results["best_checkpoint"])["epoch"] == 3


def test_it_is_the_trainer_and_not_a_second_loop(make, tmp_path):
    optimizer = make(gradient_clip=None, optimizer="sgd", weight_decay=0.0)
    optimizer.train()
    train, val = loaders()
    plain = model()
    config = {
        "work_dir": str(tmp_path / "plain"),
        "epochs": 4,
        "model": plain,
        "train_dataloader": train,
        "val_dataloader": val,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": {"class": torch.optim.SGD, "args": {"lr": 0.02}},
        "init_seed": 0,
        "train_seeds": [0, 1, 2, 3],
        "watch": False,
    }
    SupervisedTrainer(config).run()
    for ours, theirs in zip(optimizer.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_can_be_awaited_and_called_plainly(make):
    async def main():
        return await make(experiment_name="awaited").train()

    awaited = asyncio.run(main())
    plain = make(experiment_name="plain").train()
    assert awaited["history"] == plain["history"]

    async def again():
        return await plain

    assert asyncio.run(again()) is plain


def test_cancelling_stops_cleanly_with_a_checkpoint_and_the_run_goes_on_later(make, tmp_path):
    optimizer = make(max_epochs=50)
    reached = asyncio.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def look(glimpse):
            if glimpse.step == 9:
                loop.call_soon_threadsafe(reached.set)

        optimizer.trainer.on("after_train_step", look)
        task = asyncio.ensure_future(optimizer.train())
        await reached.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())
    saved = load_checkpoint(tmp_path / "runs" / "exp" / INTERRUPTED)
    assert saved["step"] >= 9
    assert sonde.open_run(tmp_path / "runs" / "exp").status == "finished"
    optimizer.cleanup()
    results = make(max_epochs=5).train(resume_from=tmp_path / "runs" / "exp")
    assert sorted(results["history"]) == [0, 1, 2, 3, 4]


def test_resuming_gives_what_one_go_would_have_given(make, tmp_path):
    whole = make(experiment_name="whole", save_interval=1)
    whole.train()
    first = make(max_epochs=2, save_interval=1)
    first.train()
    second = make(max_epochs=4, save_interval=1)
    second.train(resume_from=tmp_path / "runs" / "exp" / "checkpoint_latest.pt")
    for one, two in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_run_is_not_overwritten(make):
    make(max_epochs=1).train()
    with pytest.raises(RunExists):
        make(max_epochs=1).train()


def test_weights_from_elsewhere_are_a_beginning(make, tmp_path):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.save(net.state_dict(), tmp_path / "other.pt")
    optimizer = make(learning_rate=0.0, weight_decay=0.0, max_epochs=1)
    optimizer.train(resume_from=tmp_path / "other.pt")
    for ours, theirs in zip(optimizer.model.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_early_stopping_says_why(make):
    results = make(learning_rate=0.0, max_epochs=20, patience=2).train()
    assert results["epochs"] == 3
    assert "has not improved for 2 epochs" in results["stop_reason"]


@pytest.mark.parametrize("scheduler", ["plateau", "cosine", "step"])
def test_schedulers_by_name(make, scheduler):
    optimizer = make(scheduler=scheduler, max_epochs=3)
    optimizer.train()
    assert optimizer.trainer.scheduler is not None


def test_mixed_precision_and_accumulation(make):
    results = make(use_amp=True, accumulation_steps=2).train()
    assert results["steps"] == 4 * 3


def test_debugging_is_really_on(make, tmp_path):
    optimizer = make(debug_mode=True, enable_pytorch_debugging=True, max_epochs=1)
    optimizer.train()
    summary = optimizer.get_training_summary()
    assert summary["debug_summary"]["debug_mode"] is True
    assert optimizer.debugger.gradient_norms
    assert not torch.is_anomaly_enabled()
    assert list((tmp_path / "logs" / "exp_debug").glob("debug_report_*.json"))


def test_the_debug_report_of_a_training_has_the_findings_of_its_run(make, tmp_path):
    net = model()
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    optimizer = make(net, debug_mode=True, max_epochs=1, log_level="CRITICAL")
    found = optimizer.train()["findings"]
    (path,) = (tmp_path / "logs" / "exp_debug").glob("debug_report_*.json")
    report = json.loads(path.read_text())
    assert found
    assert [each["kind"] for each in report["findings"]] == [each["kind"] for each in found]
    messages = [event["message"] for event in report["debug_events"] if event["event_type"] == "nan_gradient_detected"]
    assert messages[0].startswith("Step 1: NaN in")


def test_training_is_the_same_with_debugging_on(make):
    plain, debugged = (
        make(experiment_name="a"),
        make(experiment_name="b", debug_mode=True, enable_pytorch_debugging=True),
    )
    plain.train()
    debugged.train()
    for one, two in zip(plain.model.parameters(), debugged.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_summary_and_the_logs_agree(make):
    optimizer = make(max_epochs=2)
    results = optimizer.train()
    summary = optimizer.get_training_summary()
    assert summary["epochs_completed"] == 2
    assert summary["best_epoch"] == results["best_epoch"]
    assert summary["final_metrics"]["val_loss"] == pytest.approx(results["history"][1]["loss"])
    assert optimizer.create_training_visualizations().is_file()


def test_train_model_with_logging_cleans_up_after_itself(tmp_path):
    train, val = loaders()
    results = asyncio.run(
        train_model_with_logging(
            model(),
            train,
            val,
            max_epochs=1,
            log_dir=tmp_path / "logs",
            checkpoint_dir=tmp_path / "runs",
            log_level="ERROR",
        )
    )
    assert sonde.open_run(results["run"]).status == "finished"


def test_a_misspelt_option_names_its_neighbours(make):
    with pytest.raises(OptionError, match="nearest: learning_rate"):
        make(learning_rat=0.1)
    with pytest.raises(OptionError, match="choose from adam, adamw"):
        make(optimizer="adan")
    with pytest.raises(OptionError, match="max_epochs takes a whole number"):
        make(max_epochs=0)
