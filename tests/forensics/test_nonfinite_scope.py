"""Where NaN and infinities come from is told with module, operation and line."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from sonde.forensics.nonfinite_scope import NonFiniteScope
from sonde.testing import assert_no_taps


@contextlib.contextmanager
def looking():
    found = []
    scope = NonFiniteScope(found.append).open()
    try:
        yield found
    finally:
        scope.close()


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if text in line)


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - 100)  # the culprit


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.new_tensor(float("nan")).expand_as(x).clone()

    @staticmethod
    def backward(context, gradient):
        return gradient


class Hidden(nn.Module):
    def forward(self, x):
        return Custom.apply(x)


def test_nan_in_the_forward_pass_is_reported_by_module_operation_and_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Log()), nn.Linear(4, 1))
    with looking() as found:
        model(torch.randn(2, 4)).sum().backward()
    assert [(each.place, each.name, each.kind, each.operation) for each in found] == [("forward", "1.1", "Log", "log")]
    assert found[0].nan == 8
    assert f"{__file__}:{line_of(Log, 'the culprit')} in Log.forward" == found[0].source
    assert_no_taps(model)


def test_an_fp16_overflow_in_the_forward_pass_is_reported():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(200.0)
        model[2].weight.fill_(200.0)
    with looking() as found:
        model(torch.full((2, 4), 50.0).half())
    assert [(each.name, each.operation, each.what) for each in found] == [("2", "linear", "Inf")]
    assert "in test_an_fp16_overflow" in found[0].source


def test_what_python_does_not_see_is_reported_by_its_module():
    model = nn.Sequential(nn.Linear(4, 4), Hidden())
    with looking() as found:
        model(torch.randn(2, 4))
    assert [(each.name, each.operation) for each in found] == [("1", "")]
    assert "in test_what_python_does_not_see" in found[0].source


def test_an_infinite_gradient_is_reported_though_torch_anomaly_mode_does_not_see_it():
    model = nn.Linear(3, 1)
    with torch.autograd.set_detect_anomaly(True), looking() as found:
        model(torch.ones(1, 3)).sum().backward(torch.tensor(float("inf")))
    assert [(each.place, each.what) for each in found] == [("gradient", "Inf")]
    assert found[0].name in ("weight", "bias")
    assert "in test_an_infinite_gradient" in found[0].source


def test_what_the_optimizer_writes_is_reported_once_with_the_line_of_the_step():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with looking() as found:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert [(each.place, each.kind, each.name, each.also) for each in found] == [
        ("optimizer", "SGD", "weight", ("bias",))
    ]
    assert "in test_what_the_optimizer_writes" in found[0].source


def test_parameters_that_were_bad_before_are_not_blamed_on_the_optimizer():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with looking() as found:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert found == []


@pytest.mark.parametrize("training", [True, False])
def test_masks_made_of_infinities_on_purpose_are_not_reported(training):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).train(training)
    mask = torch.full((3, 3), float("-inf")).triu(1)
    with looking() as found:
        layer(torch.randn(2, 3, 8), src_mask=mask)
        torch.randn(3, 3).masked_fill(mask == 0, float("-inf")).softmax(-1)
    assert [each for each in found if each.what == "Inf"] == []


def test_a_row_that_is_masked_completely_is_reported():
    with looking() as found:
        torch.randn(2, 3).masked_fill(torch.ones(2, 3, dtype=torch.bool), float("-inf")).softmax(-1)
    assert [(each.operation, each.what) for each in found] == [("softmax", "NaN")]


def test_training_is_bit_identical_inside_the_scope():
    def train(inside):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        with inside:
            for _ in range(5):
                loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return model.state_dict()

    plain, seen = train(contextlib.nullcontext()), train(looking())
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def test_a_forward_that_raises_leaves_the_scope_in_order():
    model = nn.Sequential(nn.Linear(4, 4), Log())
    with looking() as found:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
        model(torch.randn(2, 4))
    assert [each.name for each in found] == ["1"]


def test_nothing_is_left_in_torch_after_the_scope():
    def state():
        return {name: dict(value) for name, value in vars(torch_module).items() if name.startswith("_global") and value}

    before = state()
    with looking():
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert state() == before


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_is_looked_at_from_outside_and_trains_the_same():
    def train(inside):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        model = torch.compile(plain, backend="eager")
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        with inside:
            for _ in range(3):
                model(torch.randn(2, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return plain.state_dict()

    expected, found = train(contextlib.nullcontext()), train(looking())
    torch._dynamo.reset()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
