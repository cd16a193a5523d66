"""Faults that were written last, in other hands' style: not to be looked at while rules are made."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy, log_softmax, relu, softmax

from fault_programs.dev.datasets import (
    batches,
    digits,
    error_rate,
    houses,
    images,
    language,
    rings,
    sentences,
    waves,
    windows,
)
from fault_programs.dev.models import SentenceEncoder, SmallCNN, TinyLM, TinyResNet
from fault_programs.registry import fault

ANY = ("optimizer", "(loop)")


@dataclass
class Trainer:
    """A little trainer, as everybody writes one."""

    model: nn.Module
    opt: optim.Optimizer
    loss_fn: object
    session: object
    sched: object = None

    def fit(self, loader, steps):
        self.model.train()
        for batch in islice(cycle(loader), steps):
            self.training_step(*batch)
        return self

    def training_step(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        if self.sched is not None:
            self.sched.step()
        self.session.log(loss=loss.detach())


@fault(
    "missing_zero_grad",
    group="A",
    arch="gru",
    task="regression",
    sites=ANY,
    cascade=("exploding_gradient", "lr_too_high"),
    well=0.2,
    ill=0.3,
)
def trainer_overrides_the_step(attach, fixed):
    """A subclass writes its own step and leaves the clearing out."""
    x, _ = waves()

    class NextValue(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(1, 16, batch_first=True)
            self.readout = nn.Linear(16, 1)

        def forward(self, seq):
            states, _ = self.cell(seq)
            return self.readout(states)

    class Own(Trainer):
        def training_step(self, seq, _):
            loss = (self.model(seq[:, :-1]) - seq[:, 1:]).square().mean()
            loss.backward()
            self.opt.step()
            for p in self.model.parameters() if fixed else ():
                p.grad = None
            self.session.log(train_loss=loss.item())

    net = NextValue()
    opt = optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    Own(net, opt, None, attach(net, opt)).fit(batches(x, x), 100)
    return (net(x[:, :-1]) - x[:, 1:]).square().mean().item()


@fault(
    "step_not_called",
    group="A",
    arch="cnn",
    task="classification",
    sites=ANY,
    cascade=("not_learning", "missing_zero_grad", "accumulation_not_scaled"),
    well=0.3,
    ill=0.5,
)
def steps_after_the_inner_loop(attach, fixed):
    """step() is indented one level too little: it runs once an epoch."""
    x, y, vx, vy = images()
    cnn = SmallCNN()
    opt = optim.Adam(cnn.parameters(), lr=4e-3)
    sess = attach(cnn, opt)
    for _epoch in range(4):
        data = batches(x, y)
        for i, (a, b) in enumerate(data, start=1):
            opt.zero_grad()
            err = cross_entropy(cnn(a), b)
            err.backward()
            if fixed or i == len(data):
                opt.step()
            sess.log(loss=float(err))
    return error_rate(cnn, vx, vy)


class Ensemble(nn.Module):
    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x):
        return sum(member(x) for member in self.members) / len(self.members)


@fault(
    "identical_layer_init",
    also=("symmetric_init",),
    group="A",
    arch="mlp",
    task="classification",
    sites=("members",),
    well=0.2,
    ill=1.0,
)
def copies_ensemble_members(attach, fixed):
    """The members of an ensemble are copies of one another, and stay so."""
    x, y, *_ = digits()

    def member():
        return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))

    first = member()
    net = Ensemble([member() if fixed else copy.deepcopy(first) for _ in range(3)])
    opt = optim.SGD(net.parameters(), lr=0.2, momentum=0.8)
    Trainer(net, opt, cross_entropy, attach(net, opt)).fit(batches(x, y), 92)
    same = torch.equal(net.members[0](x), net.members[1](x))
    return float(same) + error_rate(net, x, y)


@fault(
    "graph_break_detach",
    group="A",
    arch="autoencoder",
    task="reconstruction",
    sites=("enc",),
    cascade=("not_learning",),
    well=0.2,
    ill=0.23,
)
def encodes_without_gradients(attach, fixed):
    """The encoder runs under no_grad, as it did when its codes were precomputed."""
    x, _, held, _ = digits()

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(64, 40), nn.ELU(), nn.Linear(40, 10))
            self.dec = nn.Sequential(nn.Linear(10, 40), nn.ELU(), nn.Linear(40, 64))

        def forward(self, v):
            with torch.set_grad_enabled(fixed):
                code = self.enc(v)
            return self.dec(code)

    pair = Pair()
    opt = optim.NAdam(pair.parameters(), lr=1e-2)
    Trainer(pair, opt, nn.L1Loss(), attach(pair, opt)).fit(batches(x, x), 120)
    return (pair(held) - held).square().mean().item()


@fault(
    "double_softmax",
    group="B",
    arch="transformer",
    task="classification",
    sites=("loss_fn", "head"),
    cascade=("loss_plateau", "not_learning"),
    well=0.2,
    ill=0.28,
)
def returns_probabilities(attach, fixed):
    """The forward returns softmax(logits) "so that outputs can be read", and the loss is cross entropy."""
    ids, padded, y = sentences()

    class Readable(SentenceEncoder):
        def forward(self, ids, padded=None):
            logits = super().forward(ids, padded)
            return {"scores": logits if fixed else softmax(logits, -1)}

    net = Readable(dropout=0.0)
    opt = optim.AdamW(net.parameters(), lr=5e-3)
    sess = attach(net, opt)
    loss = None
    for _ in range(10):
        for a, m, b in batches(ids, padded, y):
            out = net(a, m)
            loss = cross_entropy(out["scores"], b)
            loss.backward()
            opt.step()
            opt.zero_grad()
            sess.log(loss=loss)
    return loss.item()


@fault(
    "relu_before_logits",
    group="B",
    arch="cnn",
    task="classification",
    sites=("loss_fn", "head"),
    cascade=("dead_relu", "graph_break_detach"),
    well=0.3,
    ill=0.5,
)
def rectifies_the_logits(attach, fixed):
    """A rectifier after the last layer too."""
    x, y, *_ = images()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
            self.head = nn.Linear(64, 10)

        def forward(self, v):
            v = relu(self.c2(relu(self.c1(v)))).flatten(1)
            v = self.head(v)
            return v if fixed else relu(v)

    net = Net()
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    Trainer(net, opt, cross_entropy, attach(net, opt, loss_fn=cross_entropy)).fit(batches(x, y), 110)
    return cross_entropy(net(x), y).item()


@fault(
    "broadcast_loss",
    group="B",
    arch="mlp",
    task="regression",
    sites=("loss_fn", "(loop)"),
    cascade=("constant_output", "not_learning", "loss_plateau"),
    well=0.4,
    ill=0.8,
)
def subtracts_a_row_from_a_column(attach, fixed):
    """A hand-written squared error of (N, 1) and (N,)."""
    x, y = houses()
    net = nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 1))
    opt = optim.Adam(net.parameters(), lr=1e-2)
    sess = attach(net, opt)
    for step in range(120):
        pick = torch.randperm(len(x))[:64]
        pred = net(x[pick])
        pred = pred[:, 0] if fixed else pred
        mse = torch.mean((pred - y[pick]) ** 2)
        opt.zero_grad()
        mse.backward()
        opt.step()
        sess.log(loss=mse.item(), step=step)
    return torch.mean((net(x)[:, 0] - y) ** 2).item()


@fault(
    "loss_sign_flipped",
    group="B",
    arch="mlp",
    task="classification",
    sites=("loss_fn", "(loop)"),
    exact=False,
    cascade=("loss_divergence", "exploding_gradient", "logit_drift", "exploding_activation"),
    well=0.3,
    ill=0.7,
)
def maximises_cross_entropy(attach, fixed):
    """The picked log-probability is minimised instead of its negative."""
    x, y, vx, vy = digits()
    net = nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(), nn.Linear(48, 10))
    opt = optim.SGD(net.parameters(), lr=0.05)
    sess = attach(net, opt)
    for a, b in islice(cycle(batches(x, y)), 100):
        picked = log_softmax(net(a), 1).gather(1, b[:, None]).mean()
        objective = picked * (-1.0 if fixed else 1.0)
        opt.zero_grad()
        objective.backward()
        opt.step()
        accuracy = (net(a).argmax(1) == b).float().mean()
        sess.log(loss=objective, accuracy=accuracy)
    return error_rate(net, vx, vy)


@fault(
    "lr_too_high",
    group="C",
    arch="resnet",
    task="classification",
    sites=("optimizer",),
    exact=False,
    cascade=(
        "dead_relu",
        "exploding_activation",
        "exploding_gradient",
        "loss_divergence",
        "loss_oscillation",
        "nan_forward",
        "nan_backward",
    ),
    well=0.2,
    ill=0.5,
)
def plain_sgd_at_fifty(attach, fixed):
    """SGD at a learning rate of 50."""
    x, y, vx, vy = images()
    net = TinyResNet()
    opt = optim.SGD([{"params": net.parameters(), "lr": 0.1 if fixed else 50.0}])
    Trainer(net, opt, nn.CrossEntropyLoss(), attach(net, opt)).fit(batches(x, y), 92)
    return error_rate(net, vx, vy)


@fault(
    "lr_schedule_collapse",
    group="C",
    arch="mlp",
    task="classification",
    sites=("scheduler", "optimizer"),
    cascade=("lr_too_low", "loss_plateau"),
    onset=6,
    well=0.15,
    ill=0.3,
)
def decays_by_a_third_each_batch(attach, fixed):
    """An exponential decay meant for epochs runs at each batch; nobody tells the watcher of the schedule."""
    x, y, vx, vy = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = optim.Adam(net.parameters(), lr=2e-3)
    sched = optim.lr_scheduler.ExponentialLR(opt, gamma=0.999 if fixed else 0.3)
    Trainer(net, opt, nn.CrossEntropyLoss(), attach(net, opt), sched).fit(batches(x, y), 115)
    return error_rate(net, vx, vy)


@fault(
    "adam_eps_too_large",
    also=("lr_too_low",),
    group="C",
    arch="transformer",
    task="lm",
    sites=("optimizer",),
    exact=False,
    cascade=("not_learning", "loss_plateau"),
    well=1.9,
    ill=2.3,
)
def adam_with_a_huge_eps(attach, fixed):
    """eps=10 drowns Adam's own scale: steps are a thousandth of what they should be."""
    a, b = windows(language())
    lm = TinyLM(depth=1)
    opt = optim.Adam(lm.parameters(), lr=5e-3, eps=1e-8 if fixed else 10.0)
    sess = attach(lm, opt)
    loss = None
    for inp, out in islice(cycle(batches(a, b, size=32)), 110):
        loss = cross_entropy(lm(inp).flatten(0, 1), out.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sess.log(loss=loss)
    return loss.item()


@fault(
    "bad_init_scale",
    also=("vanishing_gradient", "exploding_activation", "large_initial_loss"),
    group="D",
    arch="mlp",
    task="classification",
    sites=("layers",),
    exact=False,
    cascade=("not_learning", "constant_output", "loss_plateau"),
    well=0.3,
    ill=0.7,
)
def shrinks_by_the_layer(attach, fixed):
    """Eight layers, each of which passes on a tenth of what it gets."""
    x, y, vx, vy = digits()

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
            self.out = nn.Linear(64, 10)
            for layer in self.layers:
                nn.init.normal_(layer.weight, std=math.sqrt(2 / 64) if fixed else 0.01)
                nn.init.zeros_(layer.bias)

        def forward(self, v):
            for layer in self.layers:
                v = relu(layer(v))
            return self.out(v)

    deep = Deep()
    opt = optim.SGD(deep.parameters(), lr=0.02, momentum=0.9)
    Trainer(deep, opt, cross_entropy, attach(deep, opt)).fit(batches(x, y), 100)
    return error_rate(deep, vx, vy)


@fault(
    "dead_relu",
    group="D",
    arch="mlp",
    task="regression",
    sites=("b", "a"),
    exact=False,
    cascade=("constant_output", "graph_break_detach", "vanishing_gradient", "not_learning"),
    well=0.5,
    ill=0.8,
)
def functional_rectifier_dies(attach, fixed):
    """A shift in front of a functional rectifier keeps all of its units off."""
    x, y = houses()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)
            self.b.bias.data -= 0.0 if fixed else 15.0

        def forward(self, v):
            return self.c(relu(self.b(torch.tanh(self.a(v)))))[..., 0]

    net = Net()
    opt = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    Trainer(net, opt, nn.MSELoss(), attach(net, opt)).fit(batches(x, y), 110)
    return (net(x) - y).square().mean().item()


@fault(
    "eval_mode_in_training",
    group="E",
    arch="cnn",
    task="classification",
    well=0.0,
    ill=1.0,
    sites=("body", "(loop)", "(model)"),
)
def never_leaves_eval(attach, fixed):
    """A model built for inference is trained as it is."""
    x, y, *_ = images()
    net = nn.Sequential()
    net.add_module(
        "body", nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3))
    )
    net.add_module("head", nn.Linear(288, 10))
    net.eval()
    net.requires_grad_(True).train(fixed)
    opt = optim.Adamax(net.parameters(), lr=5e-3)
    sess = attach(net, opt)
    for a, b in islice(cycle(batches(x, y)), 80):
        opt.zero_grad()
        loss = cross_entropy(net(a), b)
        loss.backward()
        opt.step()
        sess.log(loss=loss)
    return float(torch.equal(net.body[1].running_mean, torch.zeros(8)))


@fault(
    "nan_forward",
    group="F",
    arch="mlp",
    task="classification",
    sites=("scale",),
    onset=15,
    cascade=("nan_backward",),
    well=0.3,
    ill=0.8,
)
def divides_by_a_deviation_of_zero(attach, fixed):
    """A home-made norm divides by the deviation of a row, and one row is blank."""
    x, y, vx, vy = digits()
    x = x.clone()
    x[14 * 64 + 3] = 0.0

    class Standard(nn.Module):
        def forward(self, v):
            centred = v - v.mean(1, keepdim=True)
            return centred / (centred.std(1, keepdim=True) + (1e-3 if fixed else 0.0))

    net = nn.Sequential()
    net.add_module("scale", Standard())
    net.add_module("hidden", nn.Linear(64, 32))
    net.add_module("act", nn.Hardswish())
    net.add_module("out", nn.Linear(32, 10))
    opt = optim.Adam(net.parameters(), lr=1e-2)
    Trainer(net, opt, cross_entropy, attach(net, opt)).fit(batches(x, y, shuffle=False), 70)
    return error_rate(net, vx, vy)


@fault(
    "class_imbalance_collapse",
    group="G",
    arch="mlp",
    task="classification",
    exact=False,
    sites=("loader", "loss_fn", "(loop)"),
    cascade=("constant_output", "not_learning"),
    well=0.4,
    ill=0.9,
)
def drowns_the_rare_class(attach, fixed):
    """One sample in fifty is of the second class, and the model never predicts it."""
    x, y = rings(2048)
    x = x + torch.randn_like(x) * 0.4
    rare = torch.cat([torch.where(y == 0)[0], torch.where(y == 1)[0][: len(y) if fixed else 20]])
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = optim.Adam(net.parameters(), lr=1e-2)
    Trainer(net, opt, cross_entropy, attach(net, opt)).fit(batches(x[rare], y[rare]), 130)
    return (net(x[y == 1]).argmax(1) != 1).float().mean().item()


@fault(
    "unnormalised_inputs",
    group="G",
    arch="cnn",
    task="classification",
    sites=("loader", "(loop)", "loss_fn", "(model)"),
    well=0.25,
    ill=0.4,
    cascade=(
        "lr_too_high",
        "dead_relu",
        "exploding_gradient",
        "large_initial_loss",
        "exploding_activation",
        "loss_spike",
        "loss_divergence",
        "graph_break_detach",
    ),
)
def feeds_raw_pixels(attach, fixed):
    """Pixels from 0 to 255 go in as they are."""
    x, y, vx, vy = images()
    if not fixed:
        x, vx = ((v * 6.017 + 4.884) / 16 * 255 for v in (x, vx))
    net = SmallCNN()
    opt = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    Trainer(net, opt, cross_entropy, attach(net, opt)).fit(batches(x, y), 92)
    return error_rate(net, vx, vy)


@fault(
    "load_missing_keys",
    group="H",
    arch="cnn",
    task="classification",
    sites=("features",),
    exact=True,
    well=0.1,
    ill=0.11,
)
def loads_nothing(attach, fixed):
    """A checkpoint with another prefix is loaded with strict=False: no weight matches, and nobody hears of it."""
    x, y, vx, vy = images()
    old = SmallCNN()
    opt = optim.Adam(old.parameters(), lr=5e-3)
    for a, b in islice(cycle(batches(x, y)), 92):
        opt.zero_grad()
        cross_entropy(old(a), b).backward()
        opt.step()
    saved = {("" if fixed else "module.") + name: value for name, value in old.state_dict().items()}
    net = SmallCNN()
    for p in net.features.parameters():
        p.requires_grad_(False)
    opt = optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.02)
    trainer = Trainer(net, opt, cross_entropy, attach(net, opt))
    net.load_state_dict(saved, strict=False)
    trainer.fit(batches(x, y), 40)
    return error_rate(net, vx, vy)
