"""Healthy programs that look ill to a careless rule: none may raise a warning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde

STEPS = 16


def batch(size=32):
    x = torch.randn(size, 12)
    return x, x[:, :4].argmax(1)


def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))


def pair():
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))
    critic = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    return generator, critic


def game_with_two_backward_passes(watch):
    generator, critic = pair()
    first, second = (torch.optim.Adam(each.parameters(), 2e-3) for each in (generator, critic))
    watch({"generator": generator, "critic": critic}, [first, second])
    for _ in range(STEPS):
        second.zero_grad()
        F.binary_cross_entropy_with_logits(critic(torch.randn(16, 12) + 2), torch.ones(16, 1)).backward()
        made = generator(torch.randn(16, 4))
        F.binary_cross_entropy_with_logits(critic(made.detach()), torch.zeros(16, 1)).backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(made), torch.ones(16, 1)).backward()
        first.step()


def slow_game(watch):
    """Small nets move by the rate for a while, all elements alike, and the critic's answers stay between 0 and 1."""
    torch.manual_seed(6)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    first, second = (torch.optim.Adam(each.parameters(), 2e-4) for each in (generator, critic))
    watch({"g": generator, "d": critic}, [first, second])
    for _ in range(40):
        made = generator(torch.randn(64, 8))
        true, false = torch.ones(64, 1), torch.zeros(64, 1)
        loss = F.binary_cross_entropy_with_logits(critic(torch.randn(64, 2) * 0.5 + 1), true)
        loss = loss + F.binary_cross_entropy_with_logits(critic(made.detach()), false)
        second.zero_grad()
        loss.backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(made), true).backward()
        first.step()


def game_of_which_one_optimizer_is_handed_in(watch):
    generator, critic = pair()
    first, second = (torch.optim.SGD(each.parameters(), 1e-2) for each in (generator, critic))
    watch({"generator": generator, "critic": critic}, first)
    for _ in range(STEPS):
        made = generator(torch.randn(16, 4))
        second.zero_grad()
        (F.softplus(critic(made.detach())).mean() + F.softplus(-critic(torch.randn(16, 12) + 2)).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        first.step()


def closures(watch):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    session = watch(model, optimizer)
    x = torch.randn(64, 5)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(64, 1)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(10):
        session.log(loss=optimizer.step(closure))


def looks_ahead_before_each_step(watch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        session.log(loss=loss)


def policy_gradient(watch):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        log_p = F.log_softmax(model(x), 1)
        action = torch.distributions.Categorical(logits=log_p).sample()
        loss = -(log_p.gather(1, action[:, None]).squeeze(1) * ((action == y).float() - 0.25)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


class Encoder(nn.Module):
    """Copies of a block, a fixed encoding, and a small layer that this task does not use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.places = nn.Parameter(torch.randn(1, 8, 16) * 0.02, requires_grad=False)
        self.head, self.pooler = nn.Linear(16, 20), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x) + self.places))


def encoder_with_evaluation(watch):
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for step in range(STEPS):
        model.train()
        x = torch.randint(0, 20, (16, 8))
        loss = F.cross_entropy(model(x).flatten(0, 1), ((x + 1) % 20).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if step % 6 == 5:
            model.eval()
            with torch.no_grad():
                model(x), model(x)


def accumulates_and_evaluates_with_gradients(watch):
    model = nn.Sequential(
        nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    session = watch(model, optimizer)
    for _ in range(STEPS // 2):
        model.train()
        optimizer.zero_grad()
        for _ in range(4):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            (loss / 4).backward()
        optimizer.step()
        session.log(loss=loss)
        model.eval()
        F.cross_entropy(model(x), y)


def one_backward_pass_per_loss(watch):
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        z = model["body"](x)
        first = F.cross_entropy(z, y)
        first.backward(retain_graph=True)
        second = F.mse_loss(model["head"](z), x[:, :1])
        second.backward()
        optimizer.step()
        session.log(loss=first.detach() + second.detach())


def tasks_in_turns(watch):
    model = nn.ModuleDict({"body": nn.Linear(12, 32), "heads": nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 1)])})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        x, y = batch()
        h = F.relu(model["body"](x))
        second = step % 15 == 14
        loss = F.mse_loss(model["heads"][1](h), 9 * x[:, :1]) if second else F.cross_entropy(model["heads"][0](h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clears_gradients_behind_autograd(watch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


PROGRAMS = [
    game_with_two_backward_passes,
    slow_game,
    game_of_which_one_optimizer_is_handed_in,
    closures,
    looks_ahead_before_each_step,
    policy_gradient,
    encoder_with_evaluation,
    accumulates_and_evaluates_with_gradients,
    one_backward_pass_per_loss,
    tasks_in_turns,
    clears_gradients_behind_autograd,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_healthy_program_raises_no_warning(program, tmp_path):
    torch.manual_seed(0)
    sessions = []

    def watch(model, optimizer):
        sessions.append(sonde.watch(model, optimizer, run=tmp_path / "run"))
        return sessions[0]

    program(watch)
    sessions[0].close()
    told = [*sessions[0].findings, *sonde.diagnose(tmp_path / "run").findings]
    assert [(finding.kind, finding.cause) for finding in told if finding.severity != "info"] == []
