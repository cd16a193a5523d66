"""The training logger: durations that are measured, files that any parser reads, errors that do not get lost."""

from __future__ import annotations

import json
import logging
import math

import pytest

from sonde.errors import OptionError, RunNotFound
from sonde.pytorch_debugging import TrainingEventType, TrainingLogger, analyze_training_logs, load_training_logs
from sonde.testing import FakeClock


@pytest.fixture
def clock():
    return FakeClock(100.0)


@pytest.fixture
def make(tmp_path, clock):
    made = []

    def make_logger(**options):
        options = {"enable_console_logging": False, "clock": clock, "now": clock} | options
        made.append(TrainingLogger(tmp_path, "digits", **options))
        return made[-1]

    yield make_logger
    for logger in made:
        logger.close()


def train(logger, clock, epochs=3):
    with logger.training_context({"lr": 0.1}):
        for epoch in range(epochs):
            with logger.epoch_context(epoch, epochs):
                with logger.batch_context(0, 1):
                    clock.advance(2.0)
                logger.log_metrics({"loss": 1.0 / (epoch + 1)}, step=epoch, epoch=epoch)
                logger.log_validation_metrics({"accuracy": 0.5 + 0.1 * epoch}, epoch)


def test_durations_and_the_time_that_remains_are_measured(make, clock, tmp_path):
    train(make(), clock)
    events = load_training_logs(tmp_path, "digits")["events"]
    ends = [event["data"] for event in events if event["event_type"] == "epoch_end"]
    assert [end["duration"] for end in ends] == [2.0, 2.0, 2.0]
    assert [end["remaining"] for end in ends] == [4.0, 2.0, 0.0]
    assert next(event for event in events if event["event_type"] == "batch_end")["data"]["duration"] == 2.0


def test_the_report_keeps_its_final_metrics(make, clock, tmp_path):
    train(make(), clock)
    report = load_training_logs(tmp_path, "digits")["report"]
    assert report["final_metrics"] == {"loss": pytest.approx(1 / 3), "val_accuracy": pytest.approx(0.7)}
    assert report["duration"] == 6.0
    assert report["num_epochs"] == 3


def test_an_exception_is_logged_with_its_traceback_and_goes_on(make, tmp_path):
    logger = make()
    with pytest.raises(ZeroDivisionError), logger.training_context(), logger.epoch_context(0):
        raise ZeroDivisionError("planted")
    report = load_training_logs(tmp_path, "digits")["report"]
    assert report["num_errors"] == 2
    assert "planted" in report["errors"][0]["traceback"]


def test_numbers_that_are_not_finite_are_strict_json(make, tmp_path):
    logger = make()
    logger.log_metrics({"loss": math.nan, "norm": math.inf}, step=1)
    logger.flush()
    line = (tmp_path / "digits_metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["metrics"] == {"loss": "nan", "norm": "inf"}
    found = analyze_training_logs(tmp_path, "digits")["metrics"]["loss"]
    assert math.isnan(found["last"])
    assert "best" not in found


def test_lines_wait_for_the_flush_interval_and_errors_do_not(make, tmp_path):
    logger = make(flush_interval=3)
    path = tmp_path / "digits_events.jsonl"
    logger.log_info("one")
    logger.log_info("two")
    assert not path.exists()
    logger.log_info("three")
    assert len(path.read_text().splitlines()) == 3
    logger.log_error("bad")
    assert len(path.read_text().splitlines()) == 4


def test_a_line_that_was_cut_short_is_left_out(make, tmp_path, clock):
    train(make(), clock)
    with (tmp_path / "digits_metrics.jsonl").open("ab") as file:
        file.write(b'{"metrics": {"lo')
    assert len(load_training_logs(tmp_path, "digits")["metrics"]) == 6


def test_analysis_names_first_last_and_best(make, clock, tmp_path):
    train(make(), clock)
    found = analyze_training_logs(tmp_path, "digits")
    assert found["num_epochs"] == 3
    assert found["mean_epoch_duration"] == 2.0
    assert found["metrics"]["loss"] == {
        "first": 1.0,
        "last": pytest.approx(1 / 3),
        "count": 3,
        "best": pytest.approx(1 / 3),
    }
    assert found["metrics"]["val_accuracy"]["best"] == pytest.approx(0.7)


def test_every_event_type_has_a_name_of_its_own():
    assert len(set(TrainingEventType)) == 15


def test_missing_logs_are_an_error_that_names_those_there(make, clock, tmp_path):
    train(make(), clock)
    with pytest.raises(RunNotFound, match="there are digits"):
        load_training_logs(tmp_path, "digts")


def test_the_text_log_has_its_level(make, tmp_path):
    logger = make(log_level="WARNING")
    logger.log_info("quiet")
    logger.log_warning("loud")
    logger.flush()
    text = (tmp_path / "digits.log").read_text()
    assert "loud" in text
    assert "quiet" not in text
    with pytest.raises(OptionError, match="log_level='LOUD'"):
        make(log_level="LOUD")


def test_two_loggers_of_one_name_do_not_share_handlers(make):
    first, second = make(), make()
    first.close()
    second.log_warning("still here")
    assert logging.getLogger("sonde.training.digits").handlers == []


def test_the_curves_are_drawn_without_a_network(make, clock, tmp_path):
    logger = make()
    train(logger, clock)
    page = logger.create_training_visualizations().read_text(encoding="utf-8")
    assert "val_accuracy" in page
    assert 'src="http' not in page
    assert make(enable_visualization=False).create_training_visualizations() is None
