"""What means nothing is refused before it does harm, with the culprit and the cure; what ends a training is noted."""

from __future__ import annotations

import json

import pytest
import torch
from tests.pytorch_debugging.conftest import batch, small_model
from torch import nn

import sonde
from sonde.errors import OptionError, RunExists
from sonde.pytorch_debugging import (
    TrainingLogger,
    create_enhanced_training_optimizer,
    create_pytorch_debugger,
    debug_training_session,
    load_training_logs,
    replace_nonfinite_,
    step_if_finite,
)


def test_a_loss_that_is_not_a_tensor_is_refused(make):
    with pytest.raises(OptionError, match="takes the loss itself, a tensor; got float"):
        make().debug_backward_pass(0.5)


@pytest.mark.parametrize("threshold", ["big", -1.0, 0, True, float("nan")])
def test_a_threshold_that_is_not_a_norm_is_refused(make, threshold):
    with pytest.raises(OptionError, match="gradient_threshold takes a norm above 0"):
        make().check_gradients(small_model(), gradient_threshold=threshold)


def test_a_report_in_a_format_that_is_not_known_is_refused_unless_it_is_named(make, tmp_path):
    debugger = make()
    with pytest.raises(OptionError, match=r"report.pdf ends in no known format: use .json, .md"):
        debugger.save_debug_report("report.pdf")
    assert not (tmp_path / "report.pdf").exists()
    assert json.loads(debugger.save_debug_report("report.txt", format="json").read_text())["rank"] == 0
    assert json.loads(debugger.save_debug_report("report").read_text())["debug_summary"]


def test_a_log_dir_that_is_not_a_folder_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    for wrong, message in ((tmp_path / "taken", "a file is in the way"), (5, "takes a path; got 5")):
        with pytest.raises(OptionError, match=message):
            create_pytorch_debugger(log_dir=wrong)


def test_parameters_without_values_are_not_reported_as_none_at_all(make):
    with pytest.raises(OptionError, match="Linear are on the meta device"):
        make().check_model_parameters(nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ValueError("boom"), "failed", "training_error"),
        (KeyboardInterrupt(), "interrupted", "training_interrupted"),
    ],
    ids=repr,
)
def test_a_session_that_something_ends_leaves_a_run_that_names_it(tmp_path, error, status, kind):
    model, (x, y) = small_model(), batch()
    with (
        pytest.raises(type(error)),
        debug_training_session(model, enable_anomaly_detection=False, log_dir=tmp_path) as debugger,
    ):
        nn.functional.cross_entropy(model(x), y).backward()
        raise error
    run = sonde.open_run(debugger.run)
    assert run.status == status
    (event,) = (event for event in run.events if event.event_type == kind)
    assert event.data["error_type"] == type(error).__name__
    (report,) = tmp_path.glob("debug_report_*.json")
    assert json.loads(report.read_text())["debug_events"][-1]["message"] == event.message


@pytest.mark.parametrize(
    ("model", "loader", "message"),
    [
        (None, [batch()], "model takes a torch.nn.Module; got NoneType"),
        (nn.Linear(4, 3), None, "train_loader takes something that gives batches; got NoneType"),
        (nn.Linear(4, 3), [], "gives no batches"),
    ],
)
def test_a_training_without_its_parts_does_not_begin(tmp_path, model, loader, message):
    with pytest.raises(OptionError, match=message):
        create_enhanced_training_optimizer(model, loader, log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_training_twice_says_how_to_go_on(tmp_path):
    options = {"log_dir": tmp_path / "logs", "checkpoint_dir": tmp_path / "runs", "max_epochs": 1}
    optimizer = create_enhanced_training_optimizer(small_model(), [batch()], **options)
    optimizer.train()
    with pytest.raises(RunExists, match=r"train\(resume_from=True\), or choose another experiment_name"):
        optimizer.train()
    optimizer.cleanup()


def test_an_epoch_shorter_than_the_log_interval_has_its_loss_in_the_log(tmp_path, capsys):
    options = {"log_dir": tmp_path / "logs", "checkpoint_dir": tmp_path / "runs", "experiment_name": "short"}
    optimizer = create_enhanced_training_optimizer(
        small_model(), [batch(0), batch(1)], max_epochs=2, log_interval=3, debug_mode=True, **options
    )
    optimizer.train()
    optimizer.cleanup()
    lines = load_training_logs(tmp_path / "logs", "short")["metrics"]
    losses = [(line["step"], line["metrics"]["loss"]) for line in lines if "loss" in line["metrics"]]
    steps = sonde.open_run(tmp_path / "runs" / "short").series("loss:scalar", "mean")
    norms = [line["step"] for line in lines if "gradient_norm" in line["metrics"]]
    assert norms == [3], "a gradient and the loss it came from have the same step"
    assert losses == [(step, pytest.approx(steps.values[step - 1], rel=1e-5)) for step in (2, 3, 4)]
    assert "does nothing" not in capsys.readouterr().err, "what was not asked for is not spoken of"


def test_recovery_is_found_where_the_debugger_is():
    model = small_model()
    model[0].weight.grad = torch.full_like(model[0].weight, float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step_if_finite(model, optimizer) is False
    assert replace_nonfinite_(torch.tensor([float("inf")])) == 1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.ReLU(), {}, "ReLU has no parameters to train"),
        (
            nn.Linear(4, 3).requires_grad_(False),
            {},
            "Linear has no parameters to train: it has none, or all are frozen",
        ),
        (nn.Linear(4, 3), {"learning_rate": "0.1"}, "learning_rate takes a number of at least 0; got '0.1'"),
        (nn.Linear(4, 3), {"max_epochs": None}, "max_epochs takes a whole number of at least 1; got None"),
        (nn.Linear(4, 3), {"experiment_name": "a/b"}, "takes a plain name, such as 'digits'; got 'a/b'. Folders"),
        (nn.Linear(4, 3), {"experiment_name": 3}, "experiment_name takes a plain name, such as 'digits'; got 3"),
    ],
)
def test_options_that_mean_nothing_leave_nothing_behind(tmp_path, model, options, message):
    with pytest.raises(OptionError, match=message):
        create_enhanced_training_optimizer(
            model, [batch()], log_dir=tmp_path / "logs", checkpoint_dir=tmp_path / "runs", **options
        )
    assert not list(tmp_path.iterdir())


def test_a_loader_that_is_used_up_is_named_in_the_epoch_that_lacks_batches(tmp_path):
    options = {"log_dir": tmp_path / "logs", "checkpoint_dir": tmp_path / "runs", "log_level": "CRITICAL"}
    for batches, epoch in (([], 0), ([batch()], 1)):
        training = create_enhanced_training_optimizer(
            small_model(), iter(batches), experiment_name=f"used-{epoch}", max_epochs=2, **options
        )
        with pytest.raises(OptionError, match=f"gave no batches in epoch {epoch}: it is empty, or an iterator that is"):
            training.train()
        training.cleanup()


def test_a_batch_without_labels_is_named(tmp_path):
    options = {"log_dir": tmp_path / "logs", "checkpoint_dir": tmp_path / "runs", "log_level": "CRITICAL"}
    training = create_enhanced_training_optimizer(small_model(), [batch()[0]], **options)
    with pytest.raises(OptionError, match=r"returned a batch without labels, which .*\(inputs, labels\)"):
        training.train()
    training.cleanup()


def test_missing_gradients_are_reported(make):
    debugger = make()
    assert debugger.check_gradients(small_model()) == 0.0
    assert debugger.debug_events[-1]["event_type"] == "no_gradients"
    assert "after loss.backward(), and before optimizer.zero_grad()" in debugger.debug_events[-1]["message"]


def test_a_step_without_its_parts_is_refused(make):
    with pytest.raises(
        OptionError, match="takes a function of outputs and targets, and an optimizer; got NoneType and"
    ):
        make().debug_training_step(small_model(), *batch(), None, None)


def test_a_logger_whose_folder_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OptionError, match="is not a folder: a file is in the way"):
        TrainingLogger(tmp_path / "taken")
