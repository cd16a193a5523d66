"""The loop of the README: one line added, everything recorded, read back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sonde
from sonde.testing import tiny_mlp


def train(model, optimizer, steps=3, session=None, inputs=8):
    for _ in range(steps):
        x = torch.randn(10, inputs)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.log(loss=loss)
    return loss


def test_every_parameter_gradient_update_and_output_is_recorded_at_every_step(watched):
    model = tiny_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with watched(model, optimizer) as seen:
        train(model, optimizer, 3, seen)
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert list(seen[f"{name}:parameter"]) == [0, 1, 2, 3]
        assert list(seen[f"{name}:gradient"]) == [1, 2, 3]
        assert list(seen[f"{name}:update"]) == [1, 2, 3]
    for name in ("0", "1", "2"):
        assert list(seen[f"{name}:output"]) == [1, 2, 3]
    assert list(seen["loss:scalar"]) == [1, 2, 3]


def test_readings_are_those_of_the_tensors_at_that_moment(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = {}
    with watched(model, optimizer) as seen:
        for step in (1, 2, 3):
            x = torch.randn(10, 8)
            before = model[0].weight.detach().double().clone()
            hidden = model[0](x).detach().double()
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            grad = model[0].weight.grad.double().clone()
            optimizer.step()
            seen.log(loss=loss)
            after = model[0].weight.detach().double()
            truth[step] = (grad, after.clone(), after - before, hidden, loss.item())
    for step, (grad, after, change, hidden, loss) in truth.items():
        assert seen["0.weight:gradient"][step].norm == pytest.approx(grad.norm().item(), rel=1e-5)
        assert seen["0.weight:parameter"][step].std == pytest.approx(after.std().item(), rel=1e-5)
        assert seen["0.weight:update"][step].norm == pytest.approx(change.norm().item(), rel=1e-4)
        assert seen["0:output"][step].mean == pytest.approx(hidden.mean().item(), rel=1e-4)
        assert seen["0:output"][step].count == hidden.numel()
        assert seen["loss:scalar"][step].mean == pytest.approx(loss, rel=1e-6)


def test_readings_carry_histograms_unless_switched_off(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        train(model, optimizer, 1)
    reading = seen["0.weight:gradient"][1]
    assert reading.bins is not None
    assert reading.bins.sum() + reading.row[5] == reading.count
    with watched(model, optimizer, histogram=False) as seen:
        train(model, optimizer, 1)
    assert seen["0.weight:gradient"][1].bins is None
    assert seen["0.weight:gradient"][1].norm is not None


def test_a_run_reads_back_what_the_sinks_saw(watched):
    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    with watched(model, optimizer) as seen:
        train(model, optimizer, 5, seen)
    run = sonde.open_run(seen.session.path)
    assert run.status == "finished"
    np.testing.assert_array_equal(run.steps, range(6))
    series = run.series("0.weight:gradient", "norm")
    np.testing.assert_array_equal(series.steps, range(1, 6))
    np.testing.assert_allclose(series.values, [r.norm for r in seen["0.weight:gradient"].values()], rtol=1e-12)
    ratio = run.series("0.weight:update", "ratio").values
    expected = [
        u.norm / p.norm
        for u, p in zip(seen["0.weight:update"].values(), list(seen["0.weight:parameter"].values())[1:], strict=True)
    ]
    np.testing.assert_allclose(ratio, expected, rtol=1e-12)
    at_three = {site.key: reading for site, reading in run.at(3).items()}
    assert at_three["loss:scalar"].mean == pytest.approx(seen["loss:scalar"][3].mean)


def test_learning_rate_momentum_and_weight_decay_of_each_group_are_recorded(watched):
    model = tiny_mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "weight_decay": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with watched(model, optimizer, scheduler=scheduler) as seen:
        for _ in range(2):
            train(model, optimizer, 1)
            scheduler.step()
    assert [r.mean for r in seen["optimizer.group0.lr:scalar"].values()] == [0.5, 0.25]
    assert [r.mean for r in seen["optimizer.group1.lr:scalar"].values()] == [0.1, 0.05]
    assert seen["optimizer.group0.momentum:scalar"][1].mean == 0.9
    assert seen["optimizer.group1.weight_decay:scalar"][1].mean == 0.25
    assert [r.mean for r in seen["scheduler.last_epoch:scalar"].values()] == [0, 1]


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_scheduler_is_read_before_it_steps_even_if_the_iteration_goes_on(watched, by_hand):
    model = tiny_mlp()
    optimizers = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
    with watched(model, optimizers, scheduler=scheduler, steps_by_hand=by_hand) as seen:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizers[0].step()
            scheduler.step()
            optimizers[1].step()
            if by_hand:
                seen.session.step()
    assert [r.mean for r in seen["scheduler.last_epoch:scalar"].values()] == [0, 1, 2]


def test_optimizer_state_and_output_gradients_are_recorded_when_asked(watched):
    model = tiny_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with watched(model, optimizer, what=["optimizer_state", "output_gradients"]) as seen:
        x = torch.randn(6, 8)
        out = model(x)
        out.retain_grad()
        out.square().mean().backward()
        optimizer.step()
    second = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert seen["0.weight:state.exp_avg_sq"][1].mean == pytest.approx(second.mean().item(), rel=1e-5)
    assert seen["2:output_gradient"][1].norm == pytest.approx(out.grad.norm().item(), rel=1e-5)
    others = {key for key in seen.sink.keys if not key.startswith("loss_fn:")}  # which a diagnosis needs
    assert not any(key.endswith((":gradient", ":output", ":parameter")) for key in others)


def test_where_chooses_modules_with_their_parameters(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, where="2", diagnose=False) as seen:
        train(model, optimizer, 1)
    keys = {key for key in seen.sink.keys if "optimizer" not in key}
    assert keys == {"2:output", "2.weight:parameter", "2.weight:gradient", "2.weight:update"} | {
        "2.bias:parameter",
        "2.bias:gradient",
        "2.bias:update",
    }


def test_where_takes_class_names_and_lists(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, where=["kind:ReLU", "0.bias"], diagnose=False) as seen:
        train(model, optimizer, 1)
    assert {key for key in seen.sink.keys if ":output" in key} == {"1:output"}
    assert {key for key in seen.sink.keys if ":gradient" in key} == {"0.bias:gradient"}


def test_every_chooses_steps(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, every=sonde.first(3) | sonde.every(4)) as seen:
        train(model, optimizer, 9, seen)
    assert list(seen["0.weight:gradient"]) == [1, 2, 4, 8]
    assert list(seen["0:output"]) == [1, 2, 4, 8]
    assert list(seen["loss:scalar"]) == list(range(1, 10)), "what is handed in by hand is always kept"


def test_updates_of_a_sampled_step_are_those_of_that_step_alone(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    with watched(model, optimizer, every=5) as seen:
        for _ in range(10):
            before = model[0].weight.detach().clone()
            train(model, optimizer, 1)
            sizes.append((model[0].weight.detach() - before).norm().item())
    assert seen["0.weight:update"][5].norm == pytest.approx(sizes[4], rel=1e-4)
    assert seen["0.weight:update"][10].norm == pytest.approx(sizes[9], rel=1e-4)


def test_an_update_leaves_out_what_the_user_wrote_between_steps(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watched(model, optimizer) as seen:
        train(model, optimizer, 1)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        train(model, optimizer, 1)
    assert seen["0.weight:update"][2].get("abs_max") == 0.0
    assert seen["0.weight:update"][2].get("zero_share") == 1.0


def test_the_optimizer_is_found_when_none_is_given(watched):
    model, other = tiny_mlp(), tiny_mlp()
    with watched(model) as seen:
        for net in (other, model):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            train(net, optimizer, 2)
    assert list(seen["0.weight:gradient"]) == [1, 2]
    assert list(seen["0.weight:update"]) == [1, 2]


def test_steps_can_be_ended_by_hand_without_an_optimizer(watched):
    model = tiny_mlp()
    with watched(model) as seen:
        for _ in range(2):
            model(torch.randn(3, 8)).sum().backward()
            seen.session.step()
    assert list(seen["0:output"]) == [1, 2]
    assert list(seen["0.weight:gradient"]) == [1, 2]


def test_the_loss_module_is_watched_when_handed_in(watched):
    model, loss_fn = tiny_mlp(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer, loss_fn=loss_fn) as seen:
        loss = loss_fn(model(torch.randn(5, 8)), torch.randn(5, 4))
        loss.backward()
        optimizer.step()
    assert seen["loss_fn:output"][1].mean == pytest.approx(loss.item())


def test_values_of_the_users_own_are_recorded_and_merged_within_a_step(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        seen.session.record("rewards", [1.0, 2.0])
        seen.session.record("rewards", np.array([3.0, math.nan]))
        seen.session.record("mask", torch.tensor([True, False, True]))
        train(model, optimizer, 1)
        seen.session.event("note", "half way", {"x": 1})
        seen.session.epoch(4)
        train(model, optimizer, 1)
    rewards = (
        seen["rewards:value"][0].merge(seen["rewards:value"][1])
        if len(seen["rewards:value"]) > 1
        else next(iter(seen["rewards:value"].values()))
    )
    assert (rewards.count, rewards.mean, rewards.nonfinite) == (4, 2.0, 1)
    assert next(iter(seen["mask:value"].values())).mean == pytest.approx(2 / 3)
    run = sonde.open_run(seen.session.path)
    note = next(event for event in run.events if event.event_type == "note")
    assert (note.message, note.step, note.data) == ("half way", 1, {"x": 1})
    assert seen.sink.blocks[-1].epoch == 4


def test_every_logged_number_is_recorded_exactly_whatever_is_recorded_besides(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged = {"loss": [], "plain": [], "half": []}
    with sonde.watch(model, optimizer, run=tmp_path / "run", every=50) as session:
        for step in range(400):
            loss = model(torch.randn(4, 8)).square().mean()
            half = loss.detach().to(torch.bfloat16)
            if step % 2:
                session.log(loss=loss, plain=step / 3, half=half)  # in the step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not step % 2:
                session.log(loss=loss, plain=step / 3, half=half)  # after it
            for name, value in (("loss", loss.item()), ("plain", step / 3), ("half", half)):
                logged[name].append(float(value))
    run = sonde.open_run(tmp_path / "run")
    for name, values in logged.items():
        series = run.series(f"{name}:scalar", "mean")
        assert series.steps.tolist() == list(range(1, 401))
        assert series.values.tolist() == values


def test_logging_a_tensor_keeps_no_graph_alive(watched):
    import weakref

    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        loss = train(model, optimizer, 1, seen)
        died = weakref.ref(loss)
        del loss
        assert died() is None


def test_a_disabled_session_does_nothing_at_all(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "off", enabled=False) as session:
        from sonde.testing import assert_no_taps

        assert_no_taps(model)
        train(model, optimizer, 1, session)
        session.record("x", [1])
        session.event("a", "b")
        session.epoch(1)
        session.step()
        assert session.flush()
    assert not (tmp_path / "off").exists()


def test_what_comes_after_a_flush_is_merged_into_the_same_step(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        model(torch.randn(4, 8)).sum().backward()
        seen.session.flush()
        model(torch.randn(6, 8)).sum().backward()
        optimizer.step()
        seen.log(note=1.0)
        seen.session.flush()
        seen.log(note=3.0)
        seen.session.flush()
    run = sonde.open_run(seen.session.path)
    assert run.steps.tolist() == [0, 1]
    for reading in (seen["0:output"][1], run.at(1)[run.site("0:output")]):
        assert reading.count == (4 + 6) * 16
    note = run.at(1)[run.site("note:scalar")]
    assert (note.count, note.mean) == (2, 2.0)
    assert run.series("0.weight:gradient", "count").values.tolist() == [8 * 16]


def unfilled(*shape):
    """Return what memory that nobody has filled may hold."""
    values = torch.full(shape, 1e30)
    values.view(-1)[::3] = math.nan
    return values.requires_grad_()


def dry_pass(model):
    model(unfilled(10, 8))


def fake_pass(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(10, 8))


def gradient_of_the_inputs(model):
    """Do as a pipeline does that learns the shapes of its stages."""
    inputs = unfilled(10, 8)
    torch.autograd.grad(F.cross_entropy(model(inputs), torch.zeros(10).long()), inputs)


@pytest.mark.parametrize(
    ("dry", "at"), [(dry_pass, 0), (fake_pass, 0), (gradient_of_the_inputs, 0), (gradient_of_the_inputs, 2)]
)
def test_a_pass_that_nothing_comes_of_is_neither_recorded_nor_judged(watched, dry, at):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        if at:
            train(model, optimizer, at, seen)
        seen.log(mine=1.0)
        dry(model)
        with torch.no_grad():
            model(torch.randn(3, 8))
        dry(model)
        train(model, optimizer, 3, seen)
    run = sonde.open_run(seen.session.path)
    assert not [finding.kind for finding in (*run.findings, *sonde.diagnose(run).findings) if "nan" in finding.kind]
    for site in ("(model):input[0]", "0:output", "2:output", "loss_fn:input.input"):
        assert len({reading.count for reading in seen[site].values()}) == 1, site
        assert not any(reading.nonfinite for reading in seen[site].values()), site
    assert not [site.key for site in run.sites if site.call], "the first call of a step is the one that trains"
    assert [reading.count for reading in seen["2:output@eval"].values()] == [12.0], "evaluations stay"
    assert list(seen["mine:scalar"]) == [at]


def test_a_batch_that_the_program_skips_is_judged(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def skips_what_is_not_finite(x):
        return F.cross_entropy(model(x), torch.zeros(10).long()).isfinite()

    with watched(model, optimizer) as seen:
        assert not skips_what_is_not_finite(unfilled(10, 8).detach())
        train(model, optimizer, 3, seen)
    assert "nan_in_data" in {finding.kind for finding in sonde.diagnose(seen.session.path).findings}


def test_passes_that_every_step_takes_the_gradient_of_the_inputs_of_are_recorded(watched):
    """As for adversarial examples."""
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def attacked(x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), x[:, :4].argmax(1)), x)
        return (x + 0.1 * gradient.sign()).detach()

    with watched(model, optimizer) as seen:
        for _ in range(4):
            x = torch.randn(10, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(attacked(x)), x[:, :4].argmax(1)).backward()
            optimizer.step()
    assert list(seen["0:output"]) == [1, 2, 3, 4]
    assert list(seen["0:output#1"]) == [2, 3, 4], "the first time it could not be known"


@pytest.mark.parametrize(("by_hand", "steps"), [(False, 8), (True, 4)], ids=["as it comes", "by hand"])
def test_two_critic_steps_for_each_generator_step_are_two_steps_unless_counted_by_hand(watched, by_hand, steps):
    models = {"critic": tiny_mlp(), "generator": nn.Linear(8, 8)}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in models.values()]
    with watched(models, optimizers, steps_by_hand=by_hand) as seen:
        for _ in range(4):
            for turn in (0, 0, 1):
                optimizers[turn].zero_grad()
                score = models["critic"](models["generator"](torch.randn(4, 8))).mean()
                (-score if turn else score).backward()
                optimizers[turn].step()
            if by_hand:
                seen.session.step()
        assert seen.session.current_step == steps
        assert seen.session.optimizer_steps == {"optimizer": 8, "optimizer2": 4}
    updates = {name: sorted(seen[f"{name}:update"]) for name in ("critic.0.weight", "generator.weight")}
    assert updates["critic.0.weight"] == list(range(1, steps + 1))
    assert len(updates["generator.weight"]) == 4
