"""Checkups: every probe tells an ill program from its healthy twin, and everything is left as it was."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import rich.console
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.errors import OptionError


def loader(classes=3, samples=64):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (samples,), generator=generator)
    x = 2 * F.one_hot(y, 8).float() + torch.randn(samples, 8, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A small classifier with an illness of choice."""

    def __init__(self, illness=""):
        super().__init__()
        torch.manual_seed(0)
        self.illness = illness
        self.passes = 0
        self.first, self.norm = nn.Linear(8, 32), nn.BatchNorm1d(32)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(32, 3)
        if illness == "huge":
            nn.init.normal_(self.last.weight, std=30.0)

    def forward(self, x):
        self.passes += 1
        x = x * 0 if self.illness == "blind" else x
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = F.dropout(x, 0.5) if self.illness == "restless" else x
        x = x - x.mean(0) if self.illness == "mixes" else x
        x = x.detach() * 0 if self.illness == "cut" else x
        return self.last(x)


def check(illness, probe, loss_fn=F.cross_entropy, lr=1e-3):
    model = Net(illness)
    report = sonde.checkup(
        model, loss_fn, loader(), torch.optim.SGD(model.parameters(), lr=lr), probes=[probe], quiet=True
    )
    assert all(outcome.passed is not None for outcome in report.outcomes), report.outcomes
    return [finding.kind for finding in report.findings]


@pytest.mark.parametrize(
    ("illness", "probe", "kind"),
    [
        ("huge", "loss_at_init", "large_initial_loss"),
        ("restless", "eval_twice", "dropout_ignores_mode"),
        ("mixes", "sample_independence", "norm_on_wrong_dim"),
        ("cut", "overfit_one_batch", "not_learning"),
        ("blind", "zeroed_input", "constant_output"),
    ],
)
def test_a_probe_distinguishes_the_ill_from_the_healthy(illness, probe, kind):
    assert check(illness, probe) == [kind]
    assert check("", probe) == []


def test_a_sum_grows_with_the_batch_and_a_mean_does_not():
    def summed(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    assert check("", "tiled_batch", summed) == ["wrong_loss_reduction"]
    assert check("", "tiled_batch") == []


def test_a_step_that_differs_when_repeated_is_found():
    noise = iter(torch.rand(100))

    def restless(output, target):
        return F.cross_entropy(output * next(noise), target)

    assert check("", "repeated_step", restless) == ["nondeterminism"]
    assert check("", "repeated_step") == []


def test_a_rate_is_suggested_and_one_that_bursts_is_found():
    def steep(output, target):
        return 100 * F.mse_loss(output, F.one_hot(target, 3).float())

    assert check("", "rate_range", steep, lr=10.0) == ["lr_too_high"]
    assert check("", "rate_range", steep) == []
    report = sonde.checkup(Net(), F.cross_entropy, loader(), probes=["rate_range"], quiet=True)
    assert 1e-6 < report.suggested_lr < 1


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).tolist() if tensor.dim() else tensor.item()


def test_everything_is_left_as_it_was_bit_for_bit():
    torch.manual_seed(3)
    model = Net()
    model.drop.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = loader()
    x, y = next(iter(data))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    gradients = [each.grad for each in model.parameters()]

    def everything():
        state = optimizer.state_dict()["state"]
        return (
            [bits(each) for each in [*model.parameters(), *model.buffers(), *gradients]],
            [module.training for module in model.modules()],
            [[bits(value) for value in each.values()] for each in state.values()],
            (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
            data.generator.get_state().tolist(),
            model.passes,
        )

    before = everything()
    sonde.checkup(model, F.cross_entropy, data, optimizer, quiet=True)
    assert everything() == before
    assert all(each.grad is grad for each, grad in zip(model.parameters(), gradients, strict=True))


def test_state_is_restored_even_if_the_program_fails():
    model = Net()
    before = [bits(each) for each in model.parameters()]

    def fails(output, target):
        raise RuntimeError("planted")

    report = sonde.checkup(model, fails, loader(), probes=["overfit_one_batch"], quiet=True)
    assert report.outcomes[0].passed is None
    assert "planted" in report.outcomes[0].said
    assert [bits(each) for each in model.parameters()] == before


def test_ids_in_a_dict_are_checked_for_independence_too():
    class Mean(nn.Module):
        def __init__(self, mixes):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.out, self.mixes = nn.Embedding(10, 8), nn.Linear(8, 3), mixes

        def forward(self, ids):
            x = self.embed(ids).mean(1)
            return self.out(x.softmax(0) if self.mixes else x)

    batch = {
        "ids": torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(0)),
        "labels": torch.arange(8) % 3,
    }
    for mixes in (True, False):
        report = sonde.checkup(Mean(mixes), F.cross_entropy, [batch], probes=["sample_independence"], quiet=True)
        assert report.passed is not mixes


def test_the_page_says_what_was_tried_and_what_is_wrong(capsys):
    report = sonde.checkup(Net("restless"), F.cross_entropy, loader(), probes=["eval_twice", "tiled_batch"])
    shown = capsys.readouterr().out
    assert "evaluated twice" in shown
    assert "dropout_ignores_mode" in shown
    assert not report.passed
    page = io.StringIO()
    rich.console.Console(width=80, file=page).print(report)
    assert max(len(line) for line in page.getvalue().splitlines()) <= 80


def test_wrong_arguments_are_named():
    with pytest.raises(OptionError, match="choose from loss_at_init"):
        sonde.checkup(Net(), F.cross_entropy, loader(), probes=["nothing"])
    with pytest.raises(OptionError, match="iterator"):
        sonde.checkup(Net(), F.cross_entropy, iter(loader()))
    with pytest.raises(OptionError, match="form"):
        sonde.checkup(Net(), F.cross_entropy, [torch.zeros(3)])
    with pytest.raises(OptionError, match=r"a model .* first; got NoneType"):
        sonde.checkup(None, F.cross_entropy, loader())
    with pytest.raises(OptionError, match="a loss function second; got list"):
        sonde.checkup(Net(), [], loader())
