"""Groups A and B in generators and mixtures: GAN, VAE and mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fault_programs.dev.datasets import batches, digits, error_rate
from fault_programs.dev.models import VAE, Mixture
from fault_programs.registry import fault

CENTRE = torch.tensor([2.0, -1.0])


def gan():
    generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return generator, critic


def real_points():
    return torch.randn(64, 2) * 0.5 + CENTRE


def distance(generator):
    return (generator(torch.randn(512, 4)).mean(0) - CENTRE).norm().item()


@fault(
    "graph_break_detach",
    group="A",
    arch="gan",
    task="adversarial",
    sites=("generator",),
    cascade=("missing_zero_grad", "zero_grad_misplaced", "unused_parameters"),
    well=1.2,
    ill=1.5,
)
def generator_never_hears_back(attach, fixed):
    """The fake samples are detached in the generator's own step too."""
    generator, critic = gan()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    session = attach({"generator": generator, "critic": critic}, [opt_g, opt_d])
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(160):
        fake = generator(torch.randn(64, 4))
        loss_d = bce(critic(real_points()), ones) + bce(critic(fake.detach()), zeros)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = bce(critic(fake if fixed else fake.detach()), ones)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        session.log(loss_d=loss_d.item(), loss_g=loss_g.item())
    return distance(generator)


@fault(
    "missing_zero_grad",
    group="A",
    arch="gan",
    task="adversarial",
    sites=("optimizer", "(loop)"),
    cascade=("lr_too_high", "exploding_gradient", "loss_divergence", "exploding_activation"),
    well=1.2,
    ill=1.4,
)
def critic_keeps_its_gradients(attach, fixed):
    """The critic's gradients are never cleared, so they also hold what the generator's backward left there."""
    generator, critic = gan()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    session = attach({"generator": generator, "critic": critic}, [opt_g, opt_d])
    bce = F.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(160):
        fake = generator(torch.randn(64, 4))
        loss_d = bce(critic(real_points()), ones) + bce(critic(fake.detach()), zeros)
        opt_d.zero_grad() if fixed else None
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = bce(critic(fake), ones)
        loss_g.backward()
        opt_g.step()
        session.log(loss_d=loss_d, loss_g=loss_g)
    return distance(generator)


@fault(
    "loss_sign_flipped",
    group="B",
    arch="vae",
    task="reconstruction",
    sites=("loss_fn", "(loop)"),
    exact=False,
    cascade=("loss_divergence", "exploding_activation", "exploding_gradient", "nan_forward", "nan_backward"),
    well=0.4,
    ill=0.6,
)
def pushes_the_posterior_away(attach, fixed):
    """The sign of the KL term is wrong: the loss falls without end while nothing is rebuilt."""
    x, _, test, _ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(5):
        for (xb,) in batches(x):
            out, mean, log_var = model(xb)
            rebuilt = F.mse_loss(out, xb)
            kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).mean()
            loss = rebuilt + 0.1 * (kl if fixed else -kl)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 20.0)
            optimizer.step()
            session.log(loss=loss, rebuilt=rebuilt)
    return F.mse_loss(model(test)[0], test).item()


class HardMixture(Mixture):
    """Sends each sample to its best expert."""

    def __init__(self, weighted):
        super().__init__()
        nn.init.normal_(self.gate.weight, std=0.5)  # all experts are picked from the start
        self.weighted = weighted

    def forward(self, x):
        weight, picked = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            rows = torch.where(picked == number)[0]
            if len(rows):
                told = expert(x[rows])
                out = out.index_add(0, rows, weight[rows, None] * told if self.weighted else told)
        return out


@fault(
    "graph_break_detach",
    group="A",
    arch="moe",
    task="classification",
    sites=("gate",),
    well=0.2,
    ill=1.0,
)
def gate_learns_nothing(attach, fixed):
    """The experts' outputs are not weighted by the gate, and an argmax passes no gradient."""
    x, y, test_x, test_y = digits()
    model = HardMixture(fixed)
    start = model.gate.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(5):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y) + float(torch.equal(start, model.gate.weight))
