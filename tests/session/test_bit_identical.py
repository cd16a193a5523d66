"""Losses and weights are the same bits with and without Sonde, over 110 steps of seven kinds of program."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.testing import tiny_mlp

STEPS = 110
EVERYTHING = ("parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.unsqueeze(-1))).mean(1))


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def supervised(make, session_for, *, accumulate=1, autocast=False):
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with session_for(model, optimizer) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            for _ in range(accumulate):
                x = torch.randn(8, 8)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(model(x).float(), x[:, :4].argmax(1)) / accumulate
                loss.backward()
            optimizer.step()
            session.log(loss=loss)
            losses.append(loss.detach())
            if step % 50 == 0:
                model.eval()
                with torch.no_grad():
                    losses.append(model(torch.randn(8, 8)).sum())
                model.train()
    return losses, list(model.state_dict().values())


def adversarial(session_for):
    torch.manual_seed(1)
    g, d = tiny_mlp(4, 16, 8), tiny_mlp(8, 16, 1)
    g_opt, d_opt = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.RMSprop(d.parameters(), 1e-3)
    losses = []
    with session_for({"g": g, "d": d}, [g_opt, d_opt]) as session:
        for _ in range(STEPS):
            real, fake = torch.randn(8, 8) + 2, g(torch.randn(8, 4))
            d_loss = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
            g_loss = F.softplus(-d(fake)).mean()
            g_opt.zero_grad()
            g_loss.backward()
            g_opt.step()
            session.log(g=g_loss, d=d_loss)
            losses += [g_loss.detach(), d_loss.detach()]
    return losses, [*g.state_dict().values(), *d.state_dict().values()]


PROGRAMS = {
    "mlp": lambda s: supervised(tiny_mlp, s),
    "cnn, batch norm, dropout": lambda s: supervised(convolutional, s),
    "lstm": lambda s: supervised(Recurrent, s),
    "transformer": lambda s: supervised(Attention, s),
    "gan": adversarial,
    "bf16 autocast": lambda s: supervised(convolutional, s, autocast=True),
    "accumulation": lambda s: supervised(tiny_mlp, s, accumulate=3),
}


class Unwatched:
    def log(self, **scalars):
        pass


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_is_bit_identical(program, tmp_path):
    bare = PROGRAMS[program](lambda model, optimizer: contextlib.nullcontext(Unwatched()))
    watched = PROGRAMS[program](
        lambda model, optimizer: sonde.watch(model, optimizer, run=tmp_path / "run", what=EVERYTHING, on_error="raise")
    )
    for left, right in zip(bare, watched, strict=True):
        assert len(left) == len(right) > 0
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    run = sonde.open_run(tmp_path / "run")
    assert len(run.steps) == STEPS + 1
    assert run.dropped == 0


def test_training_is_bit_identical_when_sonde_fails(tmp_path, monkeypatch, caplog):
    from sonde.record.packer import Packer

    def broken(self, site, tensor):
        raise RuntimeError("planted")

    bare = supervised(convolutional, lambda model, optimizer: contextlib.nullcontext(Unwatched()))
    monkeypatch.setattr(Packer, "see", broken)
    monkeypatch.setattr(Unwatched, "log", lambda self, **scalars: None)

    @contextlib.contextmanager
    def session_for(model, optimizer):
        with sonde.watch(model, optimizer, run=tmp_path / "run"):
            yield Unwatched()

    broken_run = supervised(convolutional, session_for)
    assert all(torch.equal(a, b) for a, b in zip(bare[1], broken_run[1], strict=True))
    assert caplog.text.count("module outputs failed and is switched off") == 1
    faults = [event for event in sonde.open_run(tmp_path / "run").events if event.event_type == "fault"]
    assert "planted" in faults[0].data["traceback"]


def test_the_random_state_is_left_alone(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    with sonde.watch(model, optimizer, run=tmp_path / "run", what=EVERYTHING):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert torch.equal(before, torch.get_rng_state())
