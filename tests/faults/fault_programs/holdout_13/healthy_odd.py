"""Thirteenth hold-out: healthy programs that look odd and are right."""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_13.about import healthy
from fault_programs.holdout_13.material import digits, rings, words_as_sound


@healthy(area="sharpness", source="in the style of sharpness-aware minimisation")
def each_step_goes_up_before_it_goes_down(attach):
    """Two backward passes for a step: the weights are moved uphill in place, and set back before the optimizer steps."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    session = attach(model, optimizer)

    @torch.no_grad()
    def first_step(rho=0.05):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
        moves = [p.grad * (rho / norm) for p in model.parameters()]
        for p, e in zip(model.parameters(), moves):
            p.add_(e)
        return moves

    for epoch in range(7):
        for i in torch.randperm(1200).split(40):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            loss.backward()
            moves = first_step()
            optimizer.zero_grad()
            F.cross_entropy(model(xtr[i]), ytr[i]).backward()
            with torch.no_grad():
                for p, e in zip(model.parameters(), moves):
                    p.sub_(e)
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())
    with torch.no_grad():
        return (model(xte).argmax(1) != yte).float().mean().item()


@healthy(area="physics", source="in the style of physics-informed networks for an oscillator")
def spring_is_learned_from_its_equation(attach):
    """The same points in every step, no data but the start, and gradients of gradients with respect to the input."""
    damping, stiffness = 0.4, 4.0
    t = torch.linspace(0, 2.0, 50)[:, None].requires_grad_()
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9975)
    session = attach(model, optimizer)

    def slope(y, x):
        return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]

    for step in range(900):
        u = model(t)
        du = slope(u, t)
        residual = slope(du, t) + damping * du + stiffness * u
        start = (u[0] - 1).square().sum() + du[0].square().sum()
        loss = start + 0.02 * residual.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss.item(), start=start.item())
    rate = math.sqrt(stiffness - damping**2 / 4)
    truth = torch.exp(-damping / 2 * t) * (torch.cos(rate * t) + damping / 2 / rate * torch.sin(rate * t))
    return float((model(t) - truth).abs().mean().detach())


@healthy(area="vq-vae", source="in the style of VQ-VAE with a straight-through estimator")
def codes_are_chosen_with_argmin(attach):
    """argmin has no gradient; quantised + (z - z.detach()) passes it by, and two losses detach one side each."""
    xtr, _, xte, _ = digits()

    class VectorQuantizer(nn.Module):
        def __init__(self, codes=32, dim=8, beta=0.25):
            super().__init__()
            self.codebook, self.beta = nn.Embedding(codes, dim), beta
            nn.init.uniform_(self.codebook.weight, -0.5, 0.5)

        def forward(self, z):
            chosen = torch.cdist(z, self.codebook.weight).argmin(-1)
            q = self.codebook(chosen)
            loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
            return z + (q - z).detach(), loss, chosen

    class VQVAE(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, dim, 1))
            self.quantizer = VectorQuantizer(dim=dim)
            self.decoder = nn.Sequential(nn.Conv2d(dim, 24, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(24, 1, 2, 2))

        def forward(self, x):
            z = self.encoder(x).permute(0, 2, 3, 1)
            q, vq_loss, chosen = self.quantizer(z.reshape(-1, z.shape[-1]))
            return self.decoder(q.view_as(z).permute(0, 3, 1, 2)), vq_loss, chosen

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(10):
        for (x,) in DataLoader(TensorDataset(xtr), batch_size=60, shuffle=True):
            recon, vq_loss, _ = model(x)
            recon_loss = F.mse_loss(recon, x)
            loss = recon_loss + vq_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), recon=recon_loss.item())
    with torch.no_grad():
        return float(F.mse_loss(model(xte)[0], xte) / xte.var(0).mean())


@healthy(area="uncertainty", source="in the style of Monte Carlo dropout")
def dropout_stays_on_to_ask_thirty_times(attach):
    """After model.eval() the dropouts are set to training again on purpose, and the answers are averaged."""
    xtr, ytr, xte, yte = digits(700)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 64), nn.ReLU()
    )
    model.extend([nn.Dropout(0.3), nn.Linear(64, 10)])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    @torch.no_grad()
    def ask(x, times=30):
        model.eval()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        return torch.stack([model(x).softmax(1) for _ in range(times)]).mean(0)

    for epoch in range(12):
        model.train()
        for i in torch.randperm(700).split(35):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        if epoch % 4 == 3:
            session.log(val_nll=F.nll_loss(ask(xte, 5).log(), yte).item())
    return (ask(xte).argmax(1) != yte).float().mean().item()


@healthy(area="adversarial training", source="in the style of training on FGSM examples")
def attack_comes_before_each_step(attach):
    """A backward pass for the gradient of the picture, whose gradients of the weights are thrown away."""
    xtr, ytr, xte, yte = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU()
    )
    net.append(nn.Linear(64, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, opt)

    def attack(x, y, eps=0.1):
        net.eval()
        x = x.clone().requires_grad_()
        F.cross_entropy(net(x), y).backward()
        net.train()
        return (x + eps * x.grad.sign()).clamp(0, 1).detach()

    for epoch in range(8):
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True):
            attacked = attack(x, y)
            opt.zero_grad()
            loss = F.cross_entropy(net(attacked), y)
            loss.backward()
            opt.step()
            session.log(loss=loss.item())
    attacked = attack(xte, yte)
    with torch.no_grad():
        return (net(attacked).argmax(1) != yte).float().mean().item()


@healthy(area="averaging", source="in the style of stochastic weight averaging in torch.optim.swa_utils")
def average_of_the_last_epochs_with_new_statistics(attach):
    """A high constant rate at the end; the loss rises a little; the average gets its batch norms from one more pass."""
    xtr, ytr, xte, yte = digits()
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=40, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    model.append(nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    swa_model = AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    session = attach(model, optimizer)
    for epoch in range(10):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        if epoch >= 5:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model)
    swa_model.eval()
    with torch.no_grad():
        return (swa_model(xte).argmax(1) != yte).float().mean().item()


@healthy(area="normalising flow", source="in the style of RealNVP for points in the plane")
def flow_whose_loss_falls_below_zero(attach):
    """Affine couplings that start as the identity (zero init of the last layer); the loss is a density and may be negative."""

    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))
            nn.init.zeros_(self.net[-1].weight)
            nn.init.zeros_(self.net[-1].bias)

        def forward(self, x):
            a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
            s, t = self.net(a).chunk(2, 1)
            s = 2 * torch.tanh(s / 2)
            return torch.cat([a, b * s.exp() + t], 1), s.squeeze(1)

    class RealNVP(nn.Module):
        def __init__(self, layers=6):
            super().__init__()
            self.layers = nn.ModuleList(Coupling(i > 0) for i in range(layers))

        def log_prob(self, x):
            total = 0.0
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            return total - 0.5 * x.square().sum(1) - math.log(2 * math.pi)

    def arcs(count):
        x = 0.35 * rings(count)
        return torch.stack([x[:, 0].abs(), x[:, 1]], 1)

    flow = RealNVP()
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
    session = attach(flow, optimizer)
    for step in range(300):
        loss = -flow.log_prob(arcs(128)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        session.log(nll=loss.item())
    with torch.no_grad():
        return math.exp(-flow.log_prob(arcs(1000)).mean().item())


@healthy(area="domain adaptation", source="in the style of domain-adversarial training with a gradient reversal layer")
def gradient_turns_round_between_two_heads(attach):
    """A Function multiplies the gradient by minus one, and the loss of the domain stays near that of guessing."""

    class ReverseGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lamb):
            ctx.lamb = lamb
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.lamb * grad, None

    def recordings(count, room):
        sound, label = words_as_sound(count)
        return (sound if room == 0 else sound + 0.8 * torch.linspace(-1, 1, 10)), label

    class DANN(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature = nn.Sequential(
                nn.Conv1d(10, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()
            )
            self.label_head, self.room_head = (
                nn.Linear(32, 6),
                nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2)),
            )

        def forward(self, sound, lamb):
            h = self.feature(sound.transpose(1, 2))
            return self.label_head(h), self.room_head(ReverseGrad.apply(h, lamb))

    model = DANN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    source, label = recordings(800, 0)
    target, _ = recordings(800, 1)
    steps = 260
    for step in range(steps):
        lamb = 2 / (1 + math.exp(-6 * step / steps)) - 1
        i, j = torch.randint(0, 800, (2, 32))
        words, rooms = model(torch.cat([source[i], target[j]]), 0.5 * lamb)
        room = torch.cat([torch.zeros(32), torch.ones(32)]).long()
        label_loss, room_loss = F.cross_entropy(words[:32], label[i]), F.cross_entropy(rooms, room)
        optimizer.zero_grad()
        (label_loss + room_loss).backward()
        optimizer.step()
        session.log(label_loss=label_loss.item(), room_loss=room_loss.item())
    sound, label = recordings(400, 1)
    with torch.no_grad():
        return (model(sound, 0.0)[0].argmax(1) != label).float().mean().item()


@healthy(area="curriculum", source="in the style of a curriculum from short to long sequences")
def short_rows_come_first(attach):
    """The data are sorted by length and not shuffled in the first passes, so batches differ much and the loss rises."""

    def rows_of_digits(count):
        made = []
        for _ in range(count):
            digits_of = torch.randint(0, 4, (random.randint(2, 14),))
            made.append((digits_of, min(int((digits_of == 3).sum()), 3)))
        return made

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(5, 16, padding_idx=4), nn.GRU(16, 48, batch_first=True)
            self.out = nn.Linear(48, 4)

        def forward(self, ids, lengths):
            packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
            return self.out(self.gru(packed)[1][0])

    def collate(rows):
        ids, label = zip(*rows)
        lengths = torch.tensor([len(i) for i in ids])
        return pad_sequence(ids, batch_first=True, padding_value=4), lengths, torch.tensor(label)

    data = sorted(rows_of_digits(900), key=lambda row: len(row[0]))
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    session = attach(model, optimizer)
    for epoch in range(16):
        share = min(1.0, 0.3 + 0.1 * epoch)
        seen = data[: int(share * len(data))]
        for ids, lengths, label in DataLoader(seen, batch_size=45, shuffle=epoch >= 3, collate_fn=collate):
            loss = F.cross_entropy(model(ids, lengths), label)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item(), longest=int(lengths.max()))
    ids, lengths, label = collate(rows_of_digits(300))
    with torch.no_grad():
        return (model(ids, lengths).argmax(1) != label).float().mean().item()


@healthy(area="autoencoder", source="in the style of tied autoencoders with ReZero branches")
def decoder_borrows_the_weights_of_the_encoder(attach):
    """F.linear with weight.t() of the encoder, residual branches behind a scale that starts at zero."""
    xtr, _, xte, _ = digits()
    xtr, xte = xtr.flatten(1), xte.flatten(1)

    class ReZero(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.branch = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
            self.alpha = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + self.alpha * self.branch(x)

    class TiedAutoencoder(nn.Module):
        def __init__(self, dim=48, code=12):
            super().__init__()
            self.first, self.second = nn.Linear(64, dim), nn.Linear(dim, code)
            self.blocks = nn.ModuleList(ReZero(dim) for _ in range(3))
            self.bias_second, self.bias_first = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(64))

        def forward(self, x):
            h = F.elu(self.first(x))
            for block in self.blocks:
                h = block(h)
            h = F.elu(F.linear(self.second(h), self.second.weight.t(), self.bias_second))
            return F.linear(h, self.first.weight.t(), self.bias_first)

    model = TiedAutoencoder()
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(18):
        for i in torch.randperm(1200).split(60):
            noisy = xtr[i] + 0.15 * torch.randn_like(xtr[i])
            loss = (model(noisy) - xtr[i]).square().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float(F.mse_loss(model(xte), xte) / xte.var(0).mean())
