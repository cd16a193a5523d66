"""Vital signs of units, weights, inputs, modes and clipping, each against a plain oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn

from sonde.testing import tiny_mlp


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def train(tmp_path, model, inputs, *, zero=True, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watching(tmp_path, model, optimizer, **options) as seen:
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return seen


# ---------------------------------------------------------------------- units


def test_units_that_ever_were_active_are_those_of_numpy(tmp_path):
    model = tiny_mlp()
    with torch.no_grad():
        model[0].bias[:5] = -100.0
        model[0].bias[5:8] = -2.0  # rarely active
    batches = [torch.randn(4, 8) for _ in range(6)]
    seen = train(tmp_path, model, batches)
    positive = np.stack([model[0](x).detach().numpy().max(0) > 0 for x in batches])
    ever = np.logical_or.accumulate(positive)
    found = seen["1:vital.ever_active"]
    assert [reading.count for reading in found.values()] == [16] * 6
    assert seen.means("1:vital.ever_active") == {step: pytest.approx(ever[step - 1].mean()) for step in range(1, 7)}
    assert seen.means("1:vital.unit_samples") == {step: 4.0 * step for step in range(1, 7)}
    assert ever[-1].mean() < 0.8, "some units are dead"


@pytest.mark.parametrize(
    ("model", "shape", "units"),
    [
        (nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(inplace=True)), (2, 3, 4, 5), 6),
        (nn.Sequential(nn.Conv1d(3, 6, 1), nn.ReLU()), (2, 3, 5), 6),
        (nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.ReLU6()), (2, 3, 5), 6),
        (nn.Sequential(nn.Linear(3, 6), nn.ReLU()), (2, 5, 3), 6),
        (nn.Sequential(nn.Linear(3, 6), nn.ReLU()), (2, 5, 7, 3), 6),
    ],
)
def test_units_lie_where_the_layer_before_has_its_channels(tmp_path, model, shape, units):
    seen = train(tmp_path, model, [torch.randn(shape)])
    name = str(len(model) - 1)
    assert seen[f"{name}:vital.ever_active"][1].count == units


def test_rectifiers_are_looked_at_less_often_after_twenty_passes_and_others_not_at_all(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.GELU(), nn.LeakyReLU(), nn.Linear(4, 1))
    seen = train(tmp_path, model, [torch.randn(2, 4)] * 32)
    assert list(seen["1:vital.ever_active"]) == [*range(1, 21), 30]
    assert {key for key in seen.keys if ".ever_active" in key} == {"1:vital.ever_active"}


@pytest.mark.parametrize(
    ("module", "saturated"),
    [
        (nn.Sigmoid(), lambda x: np.abs(x) > 5),
        (nn.Tanh(), lambda x: np.abs(x) > 5),
        (nn.Hardtanh(), lambda x: np.abs(x) >= 1),
    ],
)
def test_the_saturated_share_is_that_of_numpy(tmp_path, module, saturated):
    model = nn.Sequential(nn.Linear(4, 8), module)
    x = torch.randn(10, 4) * 10
    seen = train(tmp_path, model, [x])
    expected = saturated(model[0](x).detach().numpy())
    assert seen["1:vital.saturated"][1].count == 80
    assert seen.means("1:vital.saturated") == {1: pytest.approx(expected.mean())}
    assert 0 < expected.mean() < 1


def test_attention_entropy_is_measured_where_a_module_hands_its_weights_out(tmp_path):
    class Model(nn.Module):
        def __init__(self, per_head):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.per_head = per_head

        def forward(self, x):
            out, self.weights = self.attention(x, x, x, average_attn_weights=not self.per_head)
            return out

    model = Model(per_head=True)
    seen = train(tmp_path, model, [torch.randn(3, 5, 8)])
    weights = model.weights.detach().double().numpy()
    entropy = -(weights * np.log(weights)).sum(-1).mean((0, 2)) / math.log(5)
    found = seen["attention:vital.attention_entropy"][1]
    assert found.count == 2
    assert (found.min, found.max) == pytest.approx((entropy.min(), entropy.max()), rel=1e-5)
    (tmp_path / "other").mkdir()
    averaged = train(tmp_path / "other", Model(per_head=False), [torch.randn(3, 5, 8)])
    assert "attention:vital.attention_entropy" not in averaged.keys


# ---------------------------------------------------------------------- rows of weights


def test_rows_that_ever_had_a_gradient_are_those_of_numpy(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 10), nn.Linear(10, 1)
            with torch.no_grad():
                self.fc1.bias[:3] = -100.0

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    seen = train(tmp_path, Functional(), [torch.randn(64, 4) for _ in range(16)])
    assert seen.means("fc1.weight:vital.unit_gradient") == {5: pytest.approx(0.7), 15: pytest.approx(0.7)}
    assert seen["fc1.weight:vital.unit_gradient"][5].count == 10
    assert "fc2.weight:vital.unit_gradient" not in seen.keys, "a single row has nothing to compare"


def test_the_spread_of_rows_is_that_of_numpy_and_zero_for_equal_units(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(1, 4).expand(3, 4))
        model[2].weight.zero_()
    seen = train(tmp_path, model, [torch.randn(2, 6)] * 6)
    weight = model[0].weight.detach().double().numpy()
    expected = math.sqrt(weight.var(0).mean()) / weight.std()
    assert list(seen["0.weight:vital.row_spread"]) == [0, 1, 5]
    assert seen.means("0.weight:vital.row_spread")[0] == pytest.approx(expected, rel=1e-5)
    assert seen.means("1.weight:vital.row_spread")[0] == pytest.approx(0, abs=1e-6)
    assert seen.means("2.weight:vital.row_spread")[0] == 0


# ---------------------------------------------------------------------- inputs and modes


def test_inputs_of_the_model_are_recorded_in_both_phases_by_their_part(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.fc = nn.Embedding(10, 4), nn.Linear(4, 1)

        def forward(self, tokens, extra=None, *, scale=None):
            return self.fc(self.embedding(tokens).mean(1) + extra["x"]) * scale

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, x, scale = torch.randint(10, (3, 5)), torch.randn(3, 4), torch.randn(3, 1)
    x[0, 0] = math.nan
    with Watching(tmp_path, model, optimizer) as seen:
        model(tokens, {"x": x}, scale=scale).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(tokens=tokens, extra={"x": x}, scale=scale)
    assert seen["(model):input[0]"][1].mean == pytest.approx(tokens.double().mean().item())
    assert seen["(model):input[1]['x']"][1].nonfinite == 1
    assert seen["(model):input['scale']"][1].mean == pytest.approx(scale.mean().item(), abs=1e-6)
    assert seen["(model):input['tokens']@eval"][1].count == 15


def test_equal_batches_have_equal_rows(tmp_path):
    x, other = torch.randn(4, 8), torch.randn(4, 8)
    seen = train(tmp_path, tiny_mlp(), [x, other, x])
    rows = [reading.row for reading in seen["(model):input[0]"].values()]
    assert (rows[0] == rows[2]).all()
    assert (rows[0] != rows[1]).any()


def test_columns_of_a_table_are_those_of_numpy_and_sampled(tmp_path):
    batches = [torch.randn(16, 8) * torch.arange(1, 9) * 100 + 5 for _ in range(5)]
    seen = train(tmp_path, tiny_mlp(), batches)
    assert list(seen["(model):vital.column_scale"]) == [1, 2, 3]
    scale, offset = seen["(model):vital.column_scale"][2], seen["(model):vital.column_offset"][2]
    expected = batches[1].double().numpy()
    assert (scale.count, scale.max) == (8, pytest.approx(expected.std(0, ddof=1).max(), rel=1e-5))
    assert offset.min == pytest.approx(expected.mean(0).min(), rel=1e-4)


def test_images_have_no_columns(tmp_path):
    seen = train(tmp_path, nn.Conv2d(1, 2, 1), [torch.randn(2, 1, 3, 3)])
    assert not any("column" in key for key in seen.keys)


def test_modes_are_written_at_first_and_when_they_change(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watching(tmp_path, model, optimizer) as seen:
        for step in range(1, 9):
            if step == 5:
                model.eval()  # and never back
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step == 2:
                model[1].eval()
                with torch.no_grad():
                    model(torch.randn(4, 8))
                model.train()
    expected = {1: 1.0, 2: 1.0, 3: 1.0, 5: 0.0}
    for name in ("(model)", "1", "2"):
        assert seen.means(f"{name}:vital.training") == expected
    assert seen.means("1:vital.training@eval") == {2: 0.0}
    assert seen.means("2:vital.training@eval") == {2: 1.0}
    assert "0:vital.training" not in seen.keys, "a linear layer does not care"


# ---------------------------------------------------------------------- clipping


@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_shows_its_norm_its_limit_and_whether_gradients_were_still_scaled(tmp_path, unscales):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    norms = []
    with Watching(tmp_path, model, optimizer, scaler=scaler) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).square().sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
    assert list(seen.means("optimizer:vital.clip_norm").values()) == pytest.approx(norms)
    assert seen.means("optimizer:vital.clip_max") == {1: 0.5, 2: 0.5}
    assert seen.means("optimizer:vital.scaled_clip") == {1: 1.0 - unscales, 2: 1.0 - unscales}


def test_what_is_not_clipped_or_scaled_is_absent(tmp_path):
    seen = train(tmp_path, tiny_mlp(), [torch.randn(4, 8)])
    assert not any("clip" in key for key in seen.keys)


# ---------------------------------------------------------------------- the session


def test_each_part_that_fails_is_switched_off_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sonde.sensors.activations.Units.on_call", lambda *args: 1 / 0)
    seen = train(tmp_path, tiny_mlp(), [torch.randn(4, 8)] * 3, on_error="isolate")
    assert "ZeroDivisionError" in caplog.text
    assert seen.means("optimizer:vital.leftover") == {2: 0.0, 3: 0.0}
    assert not any("ever_active" in key for key in seen.keys)


def test_a_schedule_holds_for_vital_signs_too(tmp_path):
    seen = train(tmp_path, tiny_mlp(), [torch.randn(4, 8)] * 9, every=4)
    assert list(seen["optimizer:vital.leftover"]) == [4, 8]
    assert list(seen["(loop):vital.forwards"]) == [4, 8]
    assert list(seen["(model):input[0]"]) == [4, 8]
    assert seen.facts.order == ("0", "1", "2")


def test_a_strange_model_is_not_a_problem(tmp_path):
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.LazyLinear(3)
            self.act = nn.ReLU()

        def forward(self, *nothing, text="", number=None):
            return {"out": self.act(self.fc(torch.ones(2, 4))), "text": text, "n": number}

    model = Strange()
    with Watching(tmp_path, model) as seen:
        model(text="a", number=3)["out"].sum().backward()
        seen.session.step()
    assert seen.means("(loop):vital.forwards") == {1: 1.0}
    assert not any(":input" in key for key in seen.keys)


def test_a_transformed_model_is_left_alone(tmp_path):
    model = tiny_mlp()
    parameters = dict(model.named_parameters())

    def loss(values, x, y):
        return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    with Watching(tmp_path, model):
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
            parameters, torch.randn(3, 8), torch.tensor([0, 1, 2])
        )
    assert each["0.weight"].shape == (3, 16, 8)


def test_evaluation_that_stays_in_training_mode_is_reported_however_late_it_comes(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watching(tmp_path, model, optimizer) as seen:
        for step in range(1, 9):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step >= 6:
                with torch.no_grad():
                    model(torch.randn(4, 8))
    for name in ("(model)", "1", "2"):
        assert set(seen.means(f"{name}:vital.training@eval").values()) == {1.0}


def test_a_bias_of_the_shape_of_attention_weights_is_not_taken_for_them(tmp_path):
    class BiasedAttention(nn.Module):
        """Returns its result, a bias of zeros and the weights, as the attention of T5 does."""

        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x):
            parts = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
            bias = torch.zeros(1, 2, x.shape[1], x.shape[1])
            weights = torch.dropout((parts @ parts.mT + bias).softmax(-1), 0.1, True)
            return (weights @ parts).transpose(1, 2).flatten(2), bias, weights

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = BiasedAttention(), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.attention(x)[0])

    seen = train(tmp_path, Model(), [torch.randn(4, 6, 8)])
    assert seen.means("attention:vital.attention_entropy")[1] > 0.3
