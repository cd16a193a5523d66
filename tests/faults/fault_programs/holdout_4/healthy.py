"""Fourth hold-out: programs in which nothing is wrong, most of which look as if something were."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_4.datasets import batches, late, moons, pictures, power, text, windows, wines
from fault_programs.registry import healthy


@healthy(group="healthy", arch="gan", task="adversarial", well=0.9, deceptive=True)
def hinge_gan_of_moons(attach):
    """A GAN with a hinge loss: the losses say nothing, and neither side wins."""
    x, _ = moons()
    net = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)),
            "critic": nn.Sequential(
                nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
            ),
        }
    )
    make = torch.optim.Adam(net["generator"].parameters(), lr=1e-3, betas=(0.5, 0.9))
    judge = torch.optim.Adam(net["critic"].parameters(), lr=2e-3, betas=(0.5, 0.9))
    session = attach(net, [make, judge])
    for (real,) in batches(x, size=50, epochs=15):
        with torch.no_grad():
            fake = net["generator"](torch.randn(50, 4))
        critic_loss = F.relu(1 - net["critic"](real)).mean() + F.relu(1 + net["critic"](fake)).mean()
        judge.zero_grad()
        critic_loss.backward()
        judge.step()
        generator_loss = -net["critic"](net["generator"](torch.randn(50, 4))).mean()
        make.zero_grad()
        generator_loss.backward()
        make.step()
        session.log(critic_loss=critic_loss, generator_loss=generator_loss)
    with torch.no_grad():
        made = net["generator"](torch.randn(500, 4))
    return float((made.mean(0) - x.mean(0)).abs().max())


@healthy(group="healthy", arch="mlp", task="rl", well=0.2, deceptive=True)
def policy_with_rare_rewards(attach):
    """REINFORCE in a corridor: most episodes bring nothing, so most losses and gradients are zero."""
    places = torch.eye(5)
    policy = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    session = attach(policy, optimizer)
    arrived = []
    for _ in range(150):
        at, terms, reward = torch.zeros(8, dtype=torch.long), [], torch.zeros(8)
        for _ in range(6):
            odds = torch.distributions.Categorical(logits=policy(places[at]))
            move = odds.sample()
            terms.append(odds.log_prob(move))
            at = (at + 2 * move - 1).clamp(0, 4)
            reward = torch.maximum(reward, (at == 4).float())
        loss = -(torch.stack(terms).sum(0) * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        arrived.append(float(reward.mean()))
        session.log(loss=loss, reward=arrived[-1])
    return 1 - late(arrived, 30)


@healthy(group="healthy", arch="cnn", task="contrastive", well=1.2, deceptive=True)
def contrast_at_a_low_temperature(attach):
    """Two noisy views of a picture are matched at a temperature of 0.05: logits are large, labels a diagonal."""
    x, _ = pictures()
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 32))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    losses = []
    for (image,) in batches(x, size=48, epochs=4):
        one, two = (F.normalize(net(image + 0.3 * torch.randn_like(image)), dim=1) for _ in range(2))
        logits = one @ two.T / 0.05
        truth = torch.arange(48)
        loss = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@healthy(group="healthy", arch="cnn", task="classification", well=0.6, deceptive=True)
def tunes_a_head_on_a_frozen_trunk(attach):
    """The trunk, with its batch norm, is frozen and in evaluation mode on purpose; only a new head learns."""
    x, y = pictures()
    trunk = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    old = nn.Sequential(trunk, nn.Linear(576, 2))
    before = torch.optim.Adam(old.parameters(), lr=3e-3)
    for image, label in batches(x, (y > 4).long(), size=64, epochs=2):
        before.zero_grad()
        F.cross_entropy(old(image), label).backward()
        before.step()
    trunk.requires_grad_(False)
    net = nn.Sequential(trunk, nn.Linear(576, 10))
    optimizer = torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=3e-3)
    session = attach(net, optimizer)
    losses = []
    for image, label in batches(x, y, size=32, epochs=2):
        net.train()
        trunk.eval()
        loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@healthy(group="healthy", arch="mlp", task="classification", well=0.15, deceptive=True)
def a_third_of_the_labels_are_wrong(attach):
    """A third of the labels are noise, so the loss stays high, and the model is right all the same."""
    x, y = moons()
    torn = torch.where(torch.rand(len(y)) < 0.3, 1 - y, y)
    net = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session = attach(net, optimizer)
    for epoch in range(10):
        session.epoch(epoch)
        for xb, yb in batches(x, torn, size=50, epochs=1):
            loss = F.cross_entropy(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        with torch.no_grad():
            session.log(accuracy=float((net(x).argmax(1) == y).float().mean()))
    with torch.no_grad():
        return float((net(x).argmax(1) != y).float().mean())


@healthy(group="healthy", arch="transformer", task="lm", well=1.6, deceptive=True)
def linear_warm_up_and_decay_to_nothing(attach):
    """The rate starts at exactly zero, rises for 40 steps and falls to zero again by the end."""
    series = text()
    table, out = nn.Embedding(20, 32), nn.Linear(32, 20)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    net = nn.ModuleDict({"table": table, "layer": layer, "out": out})
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 40, max(0.0, (200 - step) / 160)))
    session = attach(net, optimizer, scheduler=scheduler)
    losses = []
    for now, following in windows(series, 12, 24, 200):
        loss = F.cross_entropy(out(layer(table(now), src_mask=mask, is_causal=True)).transpose(1, 2), following)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@healthy(group="healthy", arch="mlp", task="regression", well=0.2, deceptive=True)
def lbfgs_on_the_whole_table(attach):
    """L-BFGS on the whole table: each step runs its closure many times, and every batch is the same."""
    x, y = power()
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.8, max_iter=8, line_search_fn="strong_wolfe")
    session = attach(net, optimizer)
    loss = torch.zeros(())

    def closure():
        optimizer.zero_grad()
        error = F.mse_loss(net(x).squeeze(1), y)
        error.backward()
        return error

    for _ in range(40):
        loss = optimizer.step(closure)
        session.log(loss=loss)
    return float(loss)


@healthy(group="healthy", arch="cnn", task="classification", well=0.4, deceptive=True)
def climbs_before_it_descends(attach):
    """Sharpness-aware minimisation: two passes a step, with the weights moved uphill in between and back again."""
    x, y = pictures()
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(108, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session = attach(net, optimizer)
    losses = []
    for image, label in batches(x, y, size=32, epochs=3):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(image), label)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in net.parameters()]
            for p, move in zip(net.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(net(image), label).backward()
        with torch.no_grad():
            for p, move in zip(net.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@healthy(group="healthy", arch="mlp", task="semi-supervised", well=0.2, deceptive=True)
def mean_teacher_with_few_labels(attach):
    """A teacher, the moving average of its student, sets targets for pictures without labels."""
    x, y = pictures()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(nn.ModuleDict({"student": student, "teacher": teacher}), optimizer)
    for step in range(220):
        few, all_of = torch.randint(200, (16,)), torch.randint(len(x), (48,))
        known = F.cross_entropy(student(x[few]), y[few])
        with torch.no_grad():
            goal = teacher(x[all_of] + 0.2 * torch.randn(48, 1, 8, 8)).softmax(1)
        agree = F.mse_loss(student(x[all_of] + 0.2 * torch.randn(48, 1, 8, 8)).softmax(1), goal)
        loss = known + min(1.0, step / 100) * 5 * agree
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.lerp_(new, 0.03)
        session.log(loss=loss, supervised=known, consistency=agree)
    teacher.eval()
    with torch.no_grad():
        return float((teacher(x).argmax(1) != y).float().mean())


class Experts(nn.Module):
    """Six experts, of which a gate picks one for each row; rows of other experts do not pass through it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)) for _ in range(6))

    def forward(self, x):
        odds = self.gate(x).softmax(1)
        best, which = odds.max(1)
        out = x.new_zeros(len(x))
        for number, expert in enumerate(self.experts):
            mine = which == number
            if mine.any():
                out[mine] = expert(x[mine]).squeeze(1)
        share = F.one_hot(which, 6).float().mean(0)
        return out * best * 2, 6 * (share * odds.mean(0)).sum()


@healthy(group="healthy", arch="moe", task="regression", well=0.45, deceptive=True)
def one_expert_for_each_row(attach):
    """Top-1 routing: an expert may get no row of a batch, and then no gradient."""
    x, y = power()
    net = Experts()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=24, epochs=8):
        out, balance = net(xb)
        loss = F.mse_loss(out, yb) + 0.01 * balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


class TiedReader(nn.Module):
    """A recurrent language model whose last layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(20, 32), nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, 20, bias=False)
        self.out.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, words):
        return self.out(self.rnn(self.table(words))[0])


@healthy(group="healthy", arch="gru", task="lm", well=1.7, deceptive=True)
def gathers_with_tied_weights(attach):
    """Four small batches make a step, each loss is divided by four, and one tensor is both embedding and last layer."""
    series = text()
    net = TiedReader()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for number, (now, following) in enumerate(windows(series, 12, 8, 480)):
        loss = F.cross_entropy(net(now).flatten(0, 1), following.flatten())
        (loss / 4).backward()
        losses.append(loss.item())
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=late(losses, 4))
    return late(losses, 60)


@healthy(group="healthy", arch="mlp", task="classification", well=0.3, deceptive=True)
def weights_as_length_and_direction(attach):
    """Weight normalisation: the weight that is used is no parameter, and its two factors are."""
    x, y = wines()
    normed = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(normed(nn.Linear(13, 32)), nn.ReLU(), normed(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=16, epochs=15):
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@healthy(group="healthy", arch="cnn", task="classification", well=0.6, deceptive=True)
def log_softmax_into_cross_entropy(attach):
    """The model ends in `log_softmax` and the loss is cross entropy: superfluous, and exactly as good."""
    x, y = pictures()
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10), nn.LogSoftmax(dim=1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(net, optimizer)
    losses = []
    for image, label in batches(x, y, size=32, epochs=3):
        optimizer.zero_grad()
        loss = criterion(net(image), label)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@healthy(group="healthy", arch="mlp", task="diffusion", well=0.6, deceptive=True)
def foretells_the_noise(attach):
    """A small diffusion model: the loss falls at once and then stays, as the noise cannot be known better."""
    x, _ = moons()
    net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    losses = []
    for (clean,) in batches((x - x.mean(0)) / x.std(0), size=100, epochs=25):
        when = torch.rand(100, 1)
        noise = torch.randn_like(clean)
        torn = torch.cos(when * 1.57) * clean + torch.sin(when * 1.57) * noise
        loss = F.mse_loss(net(torch.cat([torn, when], 1)), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses, 60)
