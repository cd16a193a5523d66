from __future__ import annotations

import pytest
from made_training import make_config

from sonde.errors import OptionError
from sonde.training import BaseEvaluator, Moment, SupervisedTrainer


def watch_all(runner):
    seen = []
    for moment in Moment:
        runner.on(
            moment, lambda glimpse: seen.append((glimpse.moment.value, glimpse.split, glimpse.epoch)), on_error="raise"
        )
    return seen


def test_every_moment_has_its_pair():
    for moment in Moment:
        assert moment.pair.pair is moment
        assert moment.pair is not moment
    assert Moment.before_forward.pair is Moment.after_forward


def test_every_moment_is_drawn_in_the_docstring():
    for moment in Moment:
        assert moment in Moment.__doc__


def test_the_loop_fires_as_it_is_drawn(tmp_path):
    trainer = SupervisedTrainer(
        make_config(tmp_path, epochs=1, train_dataset={"class": "made_training.Points", "args": {"count": 16}})
    )
    seen = watch_all(trainer)
    trainer.run()
    names = [name for name, _, _ in seen]
    step = ["before_forward", "after_forward", "before_backward", "after_backward", "before_update", "after_update"]
    steps = ["before_train_step", *step, "after_train_step"] * 2
    checks = ["before_eval_step", "after_eval_step"] * 3
    assert names == [
        "before_run", "before_epoch", "before_train_loop", *steps, "after_train_loop", "before_checkpoint",
        "after_checkpoint", "before_val_loop", *checks, "after_val_loop", "after_epoch", "after_run",
    ]  # fmt: skip


def test_moments_come_in_pairs_in_every_loop(tmp_path):
    trainer = SupervisedTrainer(
        make_config(tmp_path, test_dataset={"class": "made_training.Points", "args": {"count": 4}})
    )
    seen = watch_all(trainer)
    trainer.run()
    counts = {moment: sum(name == moment for name, _, _ in seen) for moment in Moment}
    assert all(counts[moment] == counts[moment.pair] for moment in Moment)
    assert counts[Moment.before_epoch] == 3
    assert {split for name, split, _ in seen if name == "after_eval_step"} == {"val", "test"}
    assert [epoch for name, _, epoch in seen if name == "after_val_loop"] == [0, 1, 2]


def test_an_evaluator_fires_its_own(tmp_path):
    config = make_config(tmp_path)
    evaluator = BaseEvaluator(
        {key: config[key] for key in ("work_dir", "model", "metric", "watch")} | {"eval_dataset": config["val_dataset"]}
    )
    seen = watch_all(evaluator)
    evaluator.run()
    assert [name for name, _, _ in seen] == [
        "before_run", "before_eval_loop", "before_eval_step", "after_eval_step", "after_eval_loop", "after_run",
    ]  # fmt: skip


def test_an_observation_can_be_undone(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path, epochs=1))
    seen = []
    first = trainer.on("before_forward", lambda glimpse: seen.append("first"))
    trainer.on("before_forward", lambda glimpse: first.remove())
    with trainer.on("before_forward", lambda glimpse: seen.append("second")):
        pass
    trainer.run()
    assert seen == ["first"]
    first.remove()


def test_a_moment_that_is_none_is_refused(tmp_path):
    with pytest.raises(OptionError, match="There is no moment 'before_lunch'"):
        SupervisedTrainer(make_config(tmp_path)).on("before_lunch", print)
