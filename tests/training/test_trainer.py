from __future__ import annotations

import json
import logging
import random

import numpy as np
import pytest
import torch
from made_training import FakeDebugger, NamedPoints, Points, make_config, network, same_state
from torch import nn
from torch.utils.data import DataLoader

import sonde
from sonde.errors import OptionError, RunExists
from sonde.training import BaseTrainer, SupervisedTrainer


def by_hand(epochs=3):
    """Train the same network with the loop that anybody would write."""
    torch.manual_seed(7)
    loader = DataLoader(Points(40), batch_size=8, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    return model.state_dict()


def test_a_run_with_seeds_puts_the_random_state_back(tmp_path):
    torch.manual_seed(99)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    SupervisedTrainer(make_config(tmp_path, train_seeds=1, val_seeds=[1, 2, 3])).run()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state()[1].tolist() == state[2]


@pytest.mark.parametrize("watch", [False, True], ids=["unwatched", "watched"])
def test_weights_are_those_of_a_loop_written_by_hand(tmp_path, watch):
    trainer = SupervisedTrainer(make_config(tmp_path, watch=watch))
    trainer.run()
    assert same_state(trainer.model.state_dict(), by_hand())


def test_validation_and_observers_leave_training_as_it_is(tmp_path):
    def meddle(glimpse):
        torch.rand(3)
        random.random()
        np.random.rand()
        return "ignored"

    trainer = SupervisedTrainer(
        make_config(tmp_path, val_seeds=[1, 2, 3], debugger={"class": FakeDebugger, "args": {}})
    )
    for moment in ("before_forward", "after_backward", "after_train_step", "before_epoch", "after_eval_step"):
        trainer.on(moment, meddle)
    trainer.run()
    assert same_state(trainer.model.state_dict(), by_hand())
    bare = SupervisedTrainer(make_config(tmp_path / "bare", val_dataset=None, val_dataloader=None))
    bare.run()
    assert same_state(bare.model.state_dict(), by_hand())


def test_the_work_dir_is_a_run(tmp_path):
    SupervisedTrainer(make_config(tmp_path, watch=None, clip_grad_norm=1.0)).run()
    run = sonde.open_run(tmp_path)
    assert run.status == "finished"
    assert run.series("loss:scalar").steps.tolist() == list(range(1, 16))
    keys = {site.key for site in run.sites}
    for key in ("0.weight:gradient", "4.weight:update", "0:output", "0:output@eval", "val_accuracy:scalar"):
        assert key in keys
    assert "grad_norm:scalar" in keys
    assert [event.data["epoch"] for event in run.events if event.event_type == "epoch"] == [0, 1, 2]
    assert run.header.config["user"]["optimizer"]["class"] == "torch.optim.adamw.AdamW"


def test_what_is_watched_can_be_chosen(tmp_path):
    SupervisedTrainer(make_config(tmp_path, watch={"what": ["gradients"], "every": 5})).run()
    # The loss itself is always recorded: a diagnosis needs it.
    quantities = {site.quantity for site in sonde.open_run(tmp_path).sites if site.name != "loss_fn"}
    assert "gradient" in quantities
    assert "output" not in quantities
    with pytest.raises(OptionError, match="watch has no option 'evry' \\(nearest: every\\)"):
        SupervisedTrainer(make_config(tmp_path, watch={"evry": 5}))


def test_scores_are_written_by_sample_as_strict_json(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path))
    trainer.run()
    text = (tmp_path / "epoch_1" / "validation_scores.json").read_text()
    scores = json.loads(text, parse_constant=pytest.fail)
    assert scores["ids"] == list(range(10))
    assert len(scores["per_datapoint"]["loss"]) == 10
    assert scores["aggregated"]["loss"] == pytest.approx(np.mean(scores["per_datapoint"]["loss"]))
    assert scores["directions"] == {"accuracy": 1, "loss": -1}
    assert trainer.history[1] == scores["aggregated"]


def test_scores_that_are_not_finite_are_still_strict_json(tmp_path):
    class Strange:
        DIRECTIONS = {"strange": 1}  # noqa: RUF012

        def __call__(self, dp):
            values = torch.zeros(len(dp["labels"]))
            values[0], values[1] = float("nan"), float("inf")
            return {"strange": values}

    trainer = SupervisedTrainer(make_config(tmp_path, epochs=1, metric=Strange()))
    trainer.run()
    scores = json.loads((tmp_path / "epoch_0" / "validation_scores.json").read_text(), parse_constant=pytest.fail)
    assert scores["per_datapoint"]["strange"][:3] == ["nan", "inf", 0.0]
    assert trainer.best.epoch is None


def test_samples_keep_their_place_in_the_dataset_whatever_their_order(tmp_path):
    shuffled = {"class": DataLoader, "args": {"batch_size": 3, "shuffle": True}}
    plain, mixed = (
        SupervisedTrainer(make_config(tmp_path / name, epochs=1, val_dataloader=loader))
        for name, loader in (("plain", {"class": DataLoader, "args": {"batch_size": 10}}), ("mixed", shuffled))
    )
    plain.run()
    mixed.run()
    assert mixed.scores.ids == plain.scores.ids
    assert mixed.scores.per_datapoint["loss"] == pytest.approx(plain.scores.per_datapoint["loss"], rel=1e-5)


def test_samples_may_have_names(tmp_path):
    named = {"class": NamedPoints, "args": {"count": 6}}
    trainer = SupervisedTrainer(make_config(tmp_path, epochs=1, train_dataset=named, val_dataset=named))
    trainer.run()
    assert trainer.scores.ids == [f"point-{index:03d}" for index in range(6)]


def test_two_samples_with_one_id_are_refused(tmp_path):
    class Twins(Points):
        def __getitem__(self, index):
            return {"inputs": self.x[index], "labels": self.y[index], "meta_info": {"idx": index // 2}}

    with pytest.raises(OptionError, match="Two samples have the id 0"):
        SupervisedTrainer(make_config(tmp_path, val_dataset=Twins(4), epochs=1)).run()


def test_the_debugger_captures_at_checkpoint_epochs_and_never_in_training_or_test(tmp_path):
    test = {"class": Points, "args": {"count": 30, "seed": 5}}
    config = make_config(
        tmp_path, epochs=5, checkpoint_method=2, debugger={"class": FakeDebugger, "args": {}}, test_dataset=test
    )
    trainer = SupervisedTrainer(config)
    states = []
    trainer.on("before_forward", lambda glimpse: states.append(trainer.debugger.enabled), on_error="raise")
    trainer.on("before_test_loop", lambda glimpse: states.append(trainer.debugger.enabled), on_error="raise")
    trainer.run()
    assert not any(states)
    saves = [entry for entry in trainer.debugger.log if entry.startswith("save")]
    assert saves == ["save epoch_1/debugger", "save epoch_3/debugger", "save epoch_4/debugger"]
    assert trainer.debugger.log.count("reset") == 3
    for captured in trainer.debugger.saved.values():
        assert sorted(captured) == list(range(10))
    assert len(json.loads((tmp_path / "test" / "test_results.json").read_text())["ids"]) == 30


def test_an_error_in_a_debugger_that_raises_comes_through_and_leaves_nothing_behind(tmp_path):
    class Failing(FakeDebugger):
        closed = False
        on_error = "raise"

        def __call__(self, datapoint, model):
            raise RuntimeError("a debugger's fault")

        def close(self):
            Failing.closed = True

    with pytest.raises(RuntimeError, match="a debugger's fault"):
        SupervisedTrainer(make_config(tmp_path, epochs=1, debugger={"class": Failing, "args": {}}, watch=True)).run()
    assert Failing.closed
    assert sonde.open_run(tmp_path).status == "failed"


def test_the_test_is_made_with_the_best_weights_and_the_last_ones_come_back(tmp_path):
    class Better:
        """Scores that fall, so that the first epoch is the best."""

        DIRECTIONS = {"score": 1}  # noqa: RUF012
        calls = 0

        def __call__(self, dp):
            Better.calls += 1
            return {"score": -torch.full((len(dp["labels"]),), float(Better.calls))}

    tested = []
    trainer = SupervisedTrainer(make_config(tmp_path, metric=Better(), test_dataset=Points(4)))
    trainer.on("before_test_loop", lambda glimpse: tested.append(trainer.model[0].weight.clone()))
    trainer.run()
    first = torch.load(tmp_path / "epoch_0" / "checkpoint.pt", weights_only=True)["model"]
    assert torch.equal(tested[0], first["0.weight"])
    assert same_state(trainer.model.state_dict(), by_hand())


def test_accumulation_is_one_large_batch(tmp_path):
    def train(name, batch, steps):
        # 40 samples in batches of 6 leave 4 over, and groups of 4 leave 3 batches over.
        loader = {"class": DataLoader, "args": {"batch_size": batch}}
        sizes = {"train_dataloader": loader, "accumulation_steps": steps}
        plain = {"class": torch.optim.SGD, "args": {"lr": 0.1}}
        model = {"class": linear, "args": {}}
        trainer = SupervisedTrainer(make_config(tmp_path / name, model=model, optimizer=plain, **sizes))
        losses = []
        trainer.on("after_update", lambda glimpse: losses.append(float(glimpse.loss)))
        trainer.run()
        return trainer, losses

    def linear():
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    torch.set_default_dtype(torch.float64)
    try:
        small, small_losses = train("small", 6, 4)
        large, large_losses = train("large", 24, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert small.cum_steps == large.cum_steps == 6
    assert small_losses == pytest.approx(large_losses)
    for name, value in small.model.state_dict().items():
        torch.testing.assert_close(value, large.model.state_dict()[name])
    assert small.num_steps == large.num_steps == 6


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains(tmp_path, amp):
    trainer = SupervisedTrainer(make_config(tmp_path, amp=amp, epochs=2, watch=True, clip_grad_norm=1.0))
    dtypes = []
    trainer.on("after_forward", lambda glimpse: dtypes.append(glimpse.datapoint["outputs"].dtype), on_error="raise")
    trainer.run()
    assert set(dtypes) == {torch.bfloat16 if amp == "bf16" else torch.float16}
    assert (trainer.precision.scaler is not None) == (amp == "fp16")
    assert torch.load(tmp_path / "epoch_1" / "checkpoint.pt", weights_only=True)["scaler"].get("scale", 1.0) > 0
    assert np.isfinite(trainer.history[1]["loss"])


def test_mixed_precision_is_that_of_a_loop_written_by_hand(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path, amp="fp16", epochs=1, scheduler=None, clip_grad_value=0.01))
    trainer.run()
    torch.manual_seed(7)
    loader, model = DataLoader(Points(40), batch_size=8, shuffle=True), network()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    assert same_state(trainer.model.state_dict(), model.state_dict())


def test_gradients_are_clipped(tmp_path):
    norms = []
    trainer = SupervisedTrainer(make_config(tmp_path, clip_grad_norm=1e-3, epochs=1))

    def look(glimpse):
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    trainer.on("after_update", look, on_error="raise")
    trainer.run()
    assert max(norms) <= 1e-3 * 1.001


def test_a_scheduler_moves_with_epochs_steps_or_scores(tmp_path):
    def rates(**changes):
        trainer = SupervisedTrainer(make_config(tmp_path / str(len(list(tmp_path.iterdir()))), **changes))
        seen = []
        trainer.on("before_update", lambda glimpse: seen.append(trainer.optimizer.param_groups[0]["lr"]))
        trainer.run()
        return seen

    by_epoch = rates()
    assert by_epoch == pytest.approx([0.01] * 5 + [0.007] * 5 + [0.0049] * 5)
    by_step = rates(scheduler_interval="step", epochs=1)
    assert by_step == pytest.approx([0.01 * 0.7**step for step in range(5)])
    plateau = {
        "class": torch.optim.lr_scheduler.ReduceLROnPlateau,
        "args": {"patience": 0, "factor": 0.1, "threshold": 10},
    }
    by_score = rates(scheduler=plateau)
    assert by_score[0] == 0.01
    assert by_score[-1] < 0.01


@pytest.mark.parametrize(("metric", "good"), [("accuracy", [0.5, 0.6, 0.6, 0.6]), ("loss", [0.5, 0.4, 0.4, 0.4])])
def test_training_stops_early_in_either_direction(tmp_path, metric, good):
    class Given:
        DIRECTIONS = {"accuracy": 1} if metric == "accuracy" else {"loss": -1}

        def __call__(self, dp):
            return {metric: torch.full((len(dp["labels"]),), good[min(trainer.cum_epochs, 3)])}

    config = make_config(tmp_path, epochs=20, metric=Given(), early_stopping={"patience": 3})
    trainer = SupervisedTrainer(config)
    trainer.run()
    assert trainer.best.epoch == 1
    assert list(trainer.history) == [0, 1, 2, 3, 4]
    assert trainer.stop_reason == f"{metric} has not improved for 3 epochs"
    again = SupervisedTrainer(config)
    again.run(resume=True)
    assert again.stop_reason == trainer.stop_reason
    assert again.cum_steps == trainer.cum_steps, "a run that was stopped early stays so when it is resumed"


def test_early_stopping_needs_a_direction(tmp_path):
    config = make_config(tmp_path, early_stopping={"metric": "f1"})
    with pytest.raises(OptionError, match="The direction of 'f1' is unknown"):
        SupervisedTrainer(config).run()
    with pytest.raises(OptionError, match="early_stopping has patence"):
        SupervisedTrainer(make_config(tmp_path / "b", early_stopping={"patence": 3})).run()


def test_a_run_that_is_there_is_not_overwritten(tmp_path):
    config = make_config(tmp_path, epochs=1)
    SupervisedTrainer(config).run()
    with pytest.raises(RunExists, match=r"holds a run already. Resume it"):
        SupervisedTrainer(config).run()


def test_switches_of_torch_are_put_back(tmp_path):
    seen = []
    trainer = SupervisedTrainer(make_config(tmp_path, epochs=1, deterministic=True, detect_anomaly=True))
    trainer.on(
        "before_forward",
        lambda glimpse: seen.append((torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled())),
    )
    trainer.run()
    assert set(seen) == {(True, True)}
    assert not torch.is_anomaly_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    plain = SupervisedTrainer(make_config(tmp_path / "plain", epochs=1))
    plain.on("before_forward", lambda glimpse: seen.append(torch.is_anomaly_enabled()))
    plain.run()
    assert seen[-1] is False


def test_without_seeds_two_runs_differ_as_two_loops_would(tmp_path):
    one, two = (SupervisedTrainer(make_config(tmp_path / name, init_seed=None, epochs=1)) for name in "ab")
    one.run()
    two.run()
    assert not same_state(one.model.state_dict(), two.model.state_dict())


def test_each_epoch_can_have_a_seed(tmp_path):
    orders = []
    trainer = SupervisedTrainer(make_config(tmp_path, train_seeds=[5, 5, 6]))
    trainer.on("before_forward", lambda glimpse: orders.append(glimpse.datapoint["inputs"].clone()))
    trainer.run()
    assert torch.equal(orders[0], orders[5])
    assert not torch.equal(orders[0], orders[10])
    with pytest.raises(OptionError, match="train_seeds has 1 seeds, and epoch 1 has none"):
        SupervisedTrainer(make_config(tmp_path / "b", train_seeds=[5])).run()


def test_several_threads_give_the_scores_of_one(tmp_path):
    one = SupervisedTrainer(make_config(tmp_path / "one"))
    four = SupervisedTrainer(
        make_config(tmp_path / "four", eval_n_jobs=4, debugger={"class": FakeDebugger, "args": {}})
    )
    one.run()
    four.run()
    assert four.history == one.history
    assert four.scores.per_datapoint == one.scores.per_datapoint
    assert sorted(four.debugger.buffer) == list(range(10))


def test_an_error_in_one_of_several_threads_comes_through(tmp_path):
    class Failing:
        DIRECTIONS = {"x": 1}  # noqa: RUF012

        def __call__(self, dp):
            raise ZeroDivisionError("in a thread")

    with pytest.raises(ZeroDivisionError, match="in a thread"):
        SupervisedTrainer(make_config(tmp_path, eval_n_jobs=3, metric=Failing())).run()


def test_modules_that_were_frozen_in_evaluation_stay_so(tmp_path):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def train(self, mode=True):
            super().train(mode)
            self.net[1].eval()
            return self

    modes = []
    trainer = SupervisedTrainer(make_config(tmp_path, model={"class": Frozen, "args": {}}))
    trainer.on("before_forward", lambda glimpse: modes.append([m.training for m in trainer.model.net]))
    trainer.run()
    assert all(mode == [True, False, True, True, True] for mode in modes)


def test_the_user_can_stop_a_run_and_resume_it(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path))
    trainer.on("after_train_step", lambda glimpse: glimpse.step == 7 and trainer.stop("seen enough"))
    trainer.run()
    assert trainer.cum_steps == 7
    assert not (tmp_path / "epoch_1" / "checkpoint.pt").exists()
    again = SupervisedTrainer(make_config(tmp_path))
    again.run(resume=True)
    assert same_state(again.model.state_dict(), by_hand())


def test_a_trainer_of_ones_own_is_one_method(tmp_path):
    class Autoencoder(BaseTrainer):
        def _compute_loss(self, dp):
            dp["outputs"] = self.model(dp["inputs"])
            return nn.functional.mse_loss(dp["outputs"], dp["inputs"])

    config = make_config(
        tmp_path, model={"class": nn.Linear, "args": {"in_features": 6, "out_features": 6}}, criterion=None,
        val_dataset=None, val_dataloader=None, metric=None,
    )  # fmt: skip
    trainer = Autoencoder(config)
    losses = []
    trainer.on("after_update", lambda glimpse: losses.append(float(glimpse.loss)))
    trainer.run()
    assert losses[-1] < losses[0]
    with pytest.raises(TypeError, match="abstract"):
        BaseTrainer(config)


def test_hooks_of_the_loop_can_be_overridden(tmp_path):
    calls = []

    class Mine(SupervisedTrainer):
        def _init_debugger(self):
            super()._init_debugger()
            calls.append("_init_debugger")

        def _before_val_loop(self):
            super()._before_val_loop()
            calls.append("_before_val_loop")

        def _eval_step(self, dp):
            super()._eval_step(dp)
            calls.append("_eval_step")

        def _after_val_loop_(self):
            super()._after_val_loop_()
            calls.append("_after_val_loop_")

    Mine(make_config(tmp_path, epochs=1)).run()
    assert calls == ["_init_debugger", "_before_val_loop", *["_eval_step"] * 3, "_after_val_loop_"]


def test_an_optimizer_can_pick_its_parameters(tmp_path):
    def head(model):
        return [{"params": model[4].parameters(), "lr": 0.5}]

    trainer = SupervisedTrainer(
        make_config(tmp_path, epochs=1, optimizer={"class": torch.optim.SGD, "args": {"params": head, "lr": 0.1}})
    )
    trainer.run()
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [0.5]


def test_a_model_that_lives_in_the_config_is_used_as_it_is(tmp_path):
    model = network()
    trainer = SupervisedTrainer(make_config(tmp_path, model=model, epochs=1))
    trainer.run()
    assert trainer.model is model


def test_an_epoch_without_validation_counts(tmp_path):
    trainer = SupervisedTrainer(make_config(tmp_path, val_dataset=None, val_dataloader=None, metric=None))
    assert trainer.run() == {}
    assert torch.load(tmp_path / "checkpoint_latest.pt", weights_only=True)["epoch"] == 2
    again = SupervisedTrainer(make_config(tmp_path, val_dataset=None, val_dataloader=None, metric=None))
    again.run(resume=True)
    assert again.cum_steps == 15


def test_strange_batches_are_refused_with_what_to_do(tmp_path):
    def collate(items):
        return 1, 2, 3

    loader = DataLoader(Points(4), collate_fn=collate)
    with pytest.raises(OptionError, match=r"the loader gave a tuple of 3. Override _datapoint"):
        SupervisedTrainer(make_config(tmp_path, train_dataset=None, train_dataloader=loader)).run()


def test_captures_of_a_lost_checkpoint_step_aside_and_are_not_overwritten(tmp_path):
    config = make_config(tmp_path, epochs=2, checkpoint_method="all", debugger={"class": FakeDebugger, "args": {}})
    SupervisedTrainer(config).run()
    before = (tmp_path / "epoch_1" / "debugger" / "3.txt").read_text()
    (tmp_path / "epoch_1" / "checkpoint.pt").write_bytes(b"damaged")
    broken = SupervisedTrainer(config)

    def fail(glimpse):
        raise RuntimeError("broken off")

    broken.on("before_val_loop", fail, on_error="raise")
    with pytest.raises(RuntimeError, match="broken off"):
        broken.run(resume=True)
    again = SupervisedTrainer(config)
    again.run(resume=True)
    assert (tmp_path / "epoch_1.superseded-1" / "debugger" / "3.txt").read_text() == before
    assert (tmp_path / "epoch_1.superseded-1" / "validation_scores.json").is_file()
    assert (tmp_path / "epoch_1" / "debugger" / "3.txt").is_file()
    assert same_state(again.model.state_dict(), by_hand(2))


def test_a_trainer_can_run_again_and_a_debugger_that_came_built_is_not_closed(tmp_path):
    class Closable(FakeDebugger):
        closed = False

        def close(self):
            self.closed = True

    model = network()
    debugger = Closable(model)
    trainer = SupervisedTrainer(make_config(tmp_path, model=model, epochs=1, debugger=debugger))
    trainer.on("after_train_step", lambda glimpse: trainer.stop() if glimpse.step == 2 else None)
    trainer.run()
    trainer.run(resume=True)
    assert trainer.cum_steps == 2
    assert trainer.stop_reason == "asked to stop"
    assert not debugger.closed
    assert not debugger.enabled


def test_a_failing_observer_is_reported_once_and_left_out(tmp_path, caplog):
    def fail(glimpse):
        raise ValueError("an observer's fault")

    trainer = SupervisedTrainer(make_config(tmp_path, epochs=1))
    trainer.on("before_forward", fail)
    with caplog.at_level(logging.WARNING, "sonde"):
        trainer.run()
    assert len(caplog.records) == 1
    assert "ValueError: an observer's fault" in caplog.text
    loud = SupervisedTrainer(make_config(tmp_path / "loud", epochs=1))
    loud.on("before_forward", fail, on_error="raise")
    with pytest.raises(ValueError, match="an observer's fault"):
        loud.run()
