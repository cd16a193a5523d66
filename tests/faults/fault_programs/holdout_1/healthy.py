"""Healthy programs that were written last, in other hands' style: not to be looked at while rules are made."""

from __future__ import annotations

import math
from itertools import cycle, islice

import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy, gelu, mse_loss

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, language, sentences, waves, windows
from fault_programs.dev.models import VAE, SmallCNN, TinyLM
from fault_programs.holdout_1.faults import Trainer
from fault_programs.registry import healthy


@healthy(arch="mlp", task="classification", well=0.12)
def adagrad_in_a_trainer(attach):
    x, y, vx, vy = digits()
    net = nn.Sequential(nn.Linear(64, 80), nn.Mish(), nn.Dropout(0.2), nn.Linear(80, 10))
    opt = optim.Adagrad(net.parameters(), lr=0.03)
    Trainer(net, opt, nn.CrossEntropyLoss(), attach(net, opt)).fit(batches(x, y), 100)
    return error_rate(net, vx, vy)


@healthy(arch="cnn", task="regression", well=0.35)
def counts_ink_with_huber(attach):
    x, *_ = images()
    ink = x.mean((1, 2, 3))
    target = (ink - ink.mean()) / ink.std()

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3)
            self.out = nn.Linear(6, 1)

        def forward(self, v):
            return self.out(gelu(self.conv(v)).mean((2, 3))).squeeze(-1)

    net = Regressor()
    opt = optim.Adadelta(net.parameters(), lr=3.0)
    Trainer(net, opt, nn.HuberLoss(), attach(net, opt, loss_fn=nn.HuberLoss())).fit(batches(x, target), 120)
    return mse_loss(net(x), target).item()


@healthy(arch="mlp", task="regression", well=0.15)
def lbfgs_with_a_closure(attach):
    x, y = houses(256)
    net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    sess = attach(net, opt)

    def closure():
        opt.zero_grad()
        loss = mse_loss(net(x)[:, 0], y)
        loss.backward()
        return loss

    for _ in range(40):
        sess.log(loss=opt.step(closure))
    return mse_loss(net(x)[:, 0], y).item()


@healthy(arch="lstm", task="lm", well=1.9)
def stateful_lstm_lm(attach):
    text = language()
    stream = text[: 16 * 740].view(16, -1)

    class CharLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.lstm, self.out = nn.Embedding(16, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)

        def forward(self, ids, state=None):
            hidden, state = self.lstm(self.emb(ids), state)
            return self.out(hidden), state

    net = CharLSTM()
    opt = optim.Adam(net.parameters(), lr=1e-2)
    sess = attach(net, opt)
    loss = state = None
    for start in islice(cycle(range(0, 720, 18)), 110):
        state = None if start == 0 or state is None else tuple(s.detach() for s in state)
        logits, state = net(stream[:, start : start + 18], state)
        loss = cross_entropy(logits.flatten(0, 1), stream[:, start + 1 : start + 19].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sess.log(loss=loss.item(), perplexity=math.exp(loss.item()))
    return loss.item()


@healthy(arch="vae", task="reconstruction", well=0.5)
def vae_with_kl_warm_up(attach):
    x, _, held, _ = digits()
    vae = VAE(code=6)
    opt = optim.RAdam(vae.parameters(), lr=5e-3)
    sess = attach(vae, opt)
    for step, (a,) in enumerate(islice(cycle(batches(x)), 130)):
        out, mean, log_var = vae(a)
        beta = min(1.0, step / 100) * 0.02
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        objective = (out - a).square().mean() + beta * kl
        opt.zero_grad()
        objective.backward()
        opt.step()
        sess.log(objective=objective)
    return (vae(held)[0] - held).square().mean().item()


@healthy(deceptive=True, arch="cnn", task="classification", well=0.3)
def accumulates_four_batches(attach):
    """Four small batches are added up, each divided by four."""
    x, y, vx, vy = images()
    net = SmallCNN()
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sess = attach(net, opt)
    for number, (a, b) in enumerate(islice(cycle(batches(x, y, size=16)), 280), start=1):
        loss = cross_entropy(net(a), b) / 4
        loss.backward()
        if number % 4 == 0:
            opt.step()
            opt.zero_grad()
            sess.log(loss=loss * 4)
    return error_rate(net, vx, vy)


@healthy(deceptive=True, arch="transformer", task="lm", well=1.9)
def warm_up_from_zero(attach):
    """The learning rate starts at 0 and rises for a third of the run."""
    a, b = windows(language())
    lm = TinyLM(depth=1)
    opt = optim.AdamW(lm.parameters(), lr=8e-3)
    warm = optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, k / 40))
    sess = attach(lm, opt, scheduler=warm)
    loss = None
    for inp, out in islice(cycle(batches(a, b, size=32)), 120):
        loss = cross_entropy(lm(inp).flatten(0, 1), out.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        warm.step()
        sess.log(loss=loss)
    return loss.item()


@healthy(deceptive=True, arch="transformer", task="lm", well=5.0)
def huge_vocabulary(attach):
    """Two thousand words of which few are frequent: the loss starts above ln 2000 and most rows get no gradient."""
    ranks = torch.arange(1, 2001, dtype=torch.float)
    text = torch.multinomial(1 / ranks**1.4, 8001, replacement=True)
    a, b = windows(text)
    lm = TinyLM(vocab=2000, depth=1)
    nn.init.normal_(lm.head.weight, std=0.3)
    opt = optim.AdamW(lm.parameters(), lr=5e-3)
    sess = attach(lm, opt)
    loss = None
    for inp, out in islice(cycle(batches(a, b, size=16)), 70):
        loss = cross_entropy(lm(inp).flatten(0, 1), out.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sess.log(loss=loss)
    return loss.item()


@healthy(deceptive=True, arch="mlp", task="classification", well=0.12)
def smoothed_labels(attach):
    """With labels smoothed by 0.3 the loss cannot fall below 1.3, however well all goes."""
    x, y, vx, vy = digits()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = optim.Adam(net.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.3)
    Trainer(net, opt, loss_fn, attach(net, opt, loss_fn=loss_fn)).fit(batches(x, y), 110)
    return error_rate(net, vx, vy)


@healthy(deceptive=True, arch="gru", task="multitask", well=0.2)
def heads_take_turns(attach):
    """Two heads over one body, trained on alternate steps: each has no gradient half of the time."""
    x, y = waves()

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.GRU(1, 24, batch_first=True)
            self.classify, self.next = nn.Linear(24, 4), nn.Linear(24, 1)

        def forward(self, seq, task):
            out = self.body(seq)[0]
            return self.classify(out.mean(1)) if task == "class" else self.next(out)

    net = TwoHeads()
    opt = optim.Adam(net.parameters(), lr=1e-2)
    sess = attach(net, opt)
    for number, (a, b) in enumerate(islice(cycle(batches(x, y)), 140)):
        opt.zero_grad()
        if number % 2:
            loss = mse_loss(net(a[:, :-1], "next"), a[:, 1:])
        else:
            loss = cross_entropy(net(a, "class"), b)
            sess.log(class_loss=loss)
        loss.backward()
        opt.step()
    return (net(x, "class").argmax(1) != y).float().mean().item()


@healthy(deceptive=True, arch="mlp", task="overfit", well=0.05)
def overfits_one_batch(attach):
    """The same batch at every step, on purpose, as a first test of a new model."""
    ids, _, y = sentences()
    emb = nn.Embedding(20, 16)
    net = nn.Sequential(emb, nn.Flatten(), nn.Linear(12 * 16, 32), nn.ReLU(), nn.Linear(32, 2))
    opt = optim.Adam(net.parameters(), lr=5e-3)
    sess = attach(net, opt)
    batch, labels = ids[:32], y[:32]
    loss = None
    for _ in range(80):
        loss = cross_entropy(net(batch), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sess.log(loss=loss)
    return loss.item()
