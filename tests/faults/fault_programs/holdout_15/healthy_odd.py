"""Fifteenth hold-out: healthy programs that look odd and are right."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fault_programs.holdout_15.about import healthy
from fault_programs.holdout_15.material import (
    Tightrope,
    digits,
    falls_short,
    loans,
    motions,
    rings,
    sentences,
    spread,
    wrong,
)


@healthy(
    area="gradient penalty",
    source="in the style of WGAN-GP, whose critic loss is negative and needs second derivatives",
)
def critic_with_a_penalty_on_its_slope(attach):
    """autograd.grad(create_graph=True) between mixed points, betas of (0, 0.9), losses below zero."""
    real = rings(1200)
    netG = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    netD = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.0, 0.9))
    session = attach(nn.ModuleDict({"netG": netG, "netD": netD}), [optD, optG])
    for step in range(400):
        for _ in range(4):
            x = real[torch.randint(0, 1200, (64,))]
            with torch.no_grad():
                made = netG(torch.randn(64, 4))
            mixed = torch.lerp(made, x, torch.rand(64, 1)).requires_grad_(True)
            slope = torch.autograd.grad(netD(mixed).sum(), mixed, create_graph=True)[0]
            penalty = (slope.norm(2, dim=1) - 1).square().mean()
            errD = netD(made).mean() - netD(x).mean() + penalty
            optD.zero_grad()
            errD.backward()
            optD.step()
        errG = -netD(netG(torch.randn(64, 4))).mean()
        optG.zero_grad()
        errG.backward()
        optG.step()
        session.log(errD=errD.item(), errG=errG.item())
    with torch.no_grad():
        return spread(netG(torch.randn(500, 4)), rings(500))


@healthy(
    area="self-training",
    source="in the style of BYOL and the mean teacher: the target network gets no gradient and follows slowly",
)
def mean_teacher_follows_its_student(attach):
    """Eighty labels, a teacher that is a running mean of the student, and a consistency loss that is ramped up."""
    xtr, ytr, xte, yte = digits()
    known = torch.cat([(ytr == c).nonzero().squeeze(1)[:8] for c in range(10)])

    def network():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    student, teacher = network(), network()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    session = attach(student, optimizer)

    def noisy(x):
        return x + 0.15 * torch.randn_like(x)

    for step in range(300):
        i, j = known[torch.randint(0, len(known), (32,))], torch.randint(0, 1200, (64,))
        loss = F.cross_entropy(student(noisy(xtr[i])), ytr[i])
        agreement = F.mse_loss(student(noisy(xtr[j])).softmax(1), teacher(noisy(xtr[j])).softmax(1))
        total = loss + min(1.0, step / 150) * 8 * agreement
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.lerp_(s, 0.05)
        session.log(loss=loss.item(), agreement=agreement.item())
    return wrong(teacher, xte, yte)


@healthy(area="cyclic rate", source="in the style of warm restarts (SGDR), where the loss jumps with each restart")
def rate_restarts_and_the_loss_jumps(attach):
    """CosineAnnealingWarmRestarts, stepped with every batch, from a high rate."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=60, T_mult=2)
    session = attach(model, optimizer)
    for epoch in range(7):
        model.train()
        for i in torch.randperm(1200).split(40):
            loss = F.cross_entropy(model(xtr[i]), ytr[i], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
    model.eval()
    return wrong(model, xte, yte)


@healthy(area="rare class", source="in the style of WeightedRandomSampler for classes of very different size")
def rare_faults_are_drawn_more_often(attach):
    """Some rows are seen dozens of times in an epoch and some never; five in a hundred are faults."""
    x, y = loans(2400)
    label = (y > y.quantile(0.95)).long()
    train_x, train_y = x[:1800], label[:1800]
    weight = (1.0 / torch.bincount(train_y).float())[train_y]
    sampler = WeightedRandomSampler(weight, num_samples=1800, replacement=True)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=60, sampler=sampler)
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        score = model(x[1800:]).diff(dim=1).squeeze(1)
    rare, common = score[label[1800:] == 1], score[label[1800:] == 0]
    return 1 - float((rare[:, None] > common).float().mean())


@healthy(
    area="frozen part",
    source="in the style of random features: most of the network is random on purpose and never trained",
)
def only_the_readout_of_a_reservoir_is_trained(attach):
    """An echo state network: the recurrent part is random, frozen and run under no_grad."""
    size = 120
    w_in, w = torch.randn(size, 3) * 0.6, torch.randn(size, size)
    w = 0.9 * w / torch.linalg.eigvals(w).abs().max()

    class Reservoir(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_in, self.w = nn.Parameter(w_in, requires_grad=False), nn.Parameter(w, requires_grad=False)
            self.readout = nn.Linear(2 * size, 6)

        def forward(self, x):
            h, seen = x.new_zeros(len(x), size), []
            with torch.no_grad():
                for t in range(x.shape[2]):
                    h = torch.tanh(x[:, :, t] @ self.w_in.t() + h @ self.w.t())
                    seen.append(h)
                seen = torch.stack(seen, 1)
            return self.readout(torch.cat([seen.std(1), (seen[:, 4:] * seen[:, :-4]).mean(1)], 1))

    model = Reservoir()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    session = attach(model, optimizer)
    x, y = motions(600)
    for epoch in range(16):
        for i in torch.randperm(600).split(50):
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong(model, *motions(300))


@healthy(area="two rates", source="in the style of fine-tuning with one rate per layer, from very small to large")
def rates_fall_from_layer_to_layer(attach):
    """Layer-wise decay of the rate: the first layer moves a hundredth as fast as the head."""
    ids, topic = sentences(1000)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(60, 32)
            self.convs = nn.ModuleList(nn.Conv1d(32, 32, 3, padding=1) for _ in range(2))
            self.head = nn.Linear(32, 6)

        def forward(self, ids):
            x = self.emb(ids).transpose(1, 2)
            for conv in self.convs:
                x = x + F.relu(conv(x))
            return self.head(x.amax(2))

    model = Net()
    order = [model.emb, *model.convs, model.head]
    groups = [
        {"params": list(part.parameters()), "lr": 1e-2 * 0.25 ** (len(order) - 1 - k)} for k, part in enumerate(order)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    session = attach(model, optimizer)
    for epoch in range(6):
        for i in torch.randperm(1000).split(40):
            loss = F.cross_entropy(model(ids[i]), topic[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return wrong(model, *sentences(300))


@healthy(
    area="robust training", source="in the style of projected gradient descent on the input (adversarial training)"
)
def pictures_are_attacked_before_each_step(attach):
    """The gradient of the input is taken first, for a worse picture; the loss stays high and the mode changes twice a step."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def attack(x, y, size=0.08):
        model.eval()
        delta = torch.zeros_like(x).uniform_(-size, size).requires_grad_(True)
        grad = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)[0]
        model.train()
        return (x + (delta + size * grad.sign()).clamp(-size, size)).clamp(0, 1).detach()

    for epoch in range(6):
        for i in torch.randperm(1200).split(40):
            loss = F.cross_entropy(model(attack(xtr[i], ytr[i])), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    return wrong(model, xte, yte)


@healthy(
    area="memory of the past",
    source="in the style of truncated backpropagation with a state that is carried over on purpose",
)
def state_is_carried_through_one_long_signal(attach):
    """One long signal is cut into pieces, in order, without shuffling; the state is detached and kept."""
    t = torch.arange(6400.0)
    signal = torch.sin(t * 0.2) + 0.5 * torch.sin(t * 0.031) + 0.05 * torch.randn(6400)
    columns = signal.view(16, 400).t()

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(1, 32), nn.Linear(32, 1)

        def forward(self, x, h=None):
            y, h = self.gru(x[..., None], h)
            return self.out(y).squeeze(-1), h

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(12):
        h = None
        for i in range(0, 380, 20):
            pred, h = model(columns[i : i + 20], h)
            loss = F.mse_loss(pred, columns[i + 1 : i + 21])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            h = h.detach()
            session.log(loss=loss.item())
    with torch.no_grad():
        pred, _ = model(columns[:-1])
    return float(F.mse_loss(pred[50:], columns[51:]) / signal.var())


@healthy(area="experts", source="in the style of a small mixture of experts with a balancing term")
def each_expert_sees_a_part_of_the_batch(attach):
    """Top-1 routing: in any step some experts get few rows or none, and their gradients are zero."""
    x, y = loans(1600)

    class Mixture(nn.Module):
        def __init__(self, experts=4):
            super().__init__()
            self.gate = nn.Linear(8, experts)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(experts)
            )

        def forward(self, x):
            share = self.gate(x).softmax(1)
            weight, chosen = share.max(1)
            out = x.new_zeros(len(x))
            for k, expert in enumerate(self.experts):
                mine = (chosen == k).nonzero().squeeze(1)
                if len(mine):
                    out = out.index_add(0, mine, weight[mine] * expert(x[mine]).squeeze(1))
            used = F.one_hot(chosen, len(self.experts)).float().mean(0)
            return out, len(self.experts) * (used * share.mean(0)).sum()

    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(16):
        for i in torch.randperm(1200).split(60):
            pred, balance = model(x[i])
            loss = F.mse_loss(pred, y[i])
            optimizer.zero_grad()
            (loss + 0.01 * balance).backward()
            optimizer.step()
            session.log(loss=loss.item(), balance=balance.item())
    with torch.no_grad():
        return float(F.mse_loss(model(x[1200:])[0], y[1200:]) / y.var())


@healthy(area="policy gradient", source="in the style of REINFORCE with a moving baseline, whose loss says nothing")
def walker_learns_while_its_loss_wanders(attach):
    """One update per four walks of different length; the loss swings about zero from beginning to end."""
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    env = Tightrope()
    for update in range(90):
        logps, returns, length = [], [], []
        for _ in range(4):
            seen, over, rewards = env.reset(), False, []
            while not over:
                dist = torch.distributions.Categorical(logits=policy(seen))
                action = dist.sample()
                logps.append(dist.log_prob(action))
                seen, reward, over = env.step(int(action))
                rewards.append(reward)
            total, back = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.9 * total
                back.insert(0, total)
            returns += back
            length.append(len(rewards))
        returns = torch.tensor(returns)
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(logps) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), length=sum(length) / 4)
    return falls_short(lambda s: policy(s).argmax())


@healthy(
    area="averaged weights", source="in the style of stochastic weight averaging, with a copy that is used in the end"
)
def averaged_weights_from_a_constant_rate(attach):
    """The last third runs with a constant, rather high rate; an average of its weights is what is used."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=1e-4)
    session = attach(model, optimizer)
    for epoch in range(15):
        for i in torch.randperm(1200).split(40):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        if epoch >= 10:
            averaged.update_parameters(model)
        session.log(val_error=wrong(model, xte[:300], yte[:300]))
    return wrong(averaged, xte, yte)


@healthy(area="distillation", source="in the style of born-again networks: a student of the same form that starts anew")
def second_generation_learns_from_the_first(attach):
    """The soft targets of an earlier copy, under no_grad and at a temperature on both sides; the labels are used little."""
    xtr, ytr, xte, yte = digits()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    student = copy.deepcopy(teacher)
    first = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(6):
        for i in torch.randperm(1200).split(40):
            first.zero_grad()
            F.cross_entropy(teacher(xtr[i]), ytr[i]).backward()
            first.step()
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(student, optimizer)
    temperature = 4.0
    for epoch in range(8):
        student.train()
        for i in torch.randperm(1200).split(40):
            logits, soft = student(xtr[i]), teacher(xtr[i])
            kd = F.kl_div(
                F.log_softmax(logits / temperature, 1), F.softmax(soft / temperature, 1), reduction="batchmean"
            )
            loss = 0.1 * F.cross_entropy(logits, ytr[i]) + 0.9 * temperature**2 * kd
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), kd=kd.item())
    student.eval()
    return wrong(student, xte, yte)
