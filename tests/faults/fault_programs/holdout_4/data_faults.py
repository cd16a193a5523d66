"""Fourth hold-out: samples, labels and loaders that are not what was meant."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from fault_programs.holdout_4.datasets import (
    batches,
    late,
    melodies,
    moons,
    pictures,
    power,
    raw_pictures,
    reviews,
    tumours,
)
from fault_programs.registry import fault


@fault(
    "unnormalised_inputs",
    group="G",
    arch="lstm",
    task="regression",
    sites=("rnn", "loader", "(data)", "(model)"),
    cascade=("saturated_activation", "underfitting", "loss_plateau", "not_learning", "vanishing_gradient"),
    exact=False,
    well=0.4,
    ill=0.6,
)
def pressure_in_pascal(attach, fixed):
    """A recurrent network reads a pressure of about 100,000 with swings of 800."""
    x, _ = melodies()
    goal = (x[..., 0].cumsum(1)[:, -1] + x[..., 1][:, -1]) / 4
    seen = x if fixed else 101_325 + 800 * x
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 24, batch_first=True), "out": nn.Linear(24, 1)})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for series, value in batches(seen, goal, size=32, epochs=6):
        loss = F.mse_loss(net["out"](net["rnn"](series)[0][:, -1]).squeeze(1), value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "label_shuffle_mismatch",
    group="G",
    arch="mlp",
    task="classification",
    sites=("loader", "(data)"),
    cascade=("not_learning", "loss_plateau", "underfitting", "overfitting"),
    exact=False,
    well=0.7,
    ill=2.0,
)
def two_permutations(attach, fixed):
    """Pictures and labels are shuffled by a permutation each, anew every epoch."""
    x, y = pictures()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    losses = []
    for epoch in range(5):
        session.epoch(epoch)
        order = torch.randperm(len(x))
        images, labels = x[order], y[order if fixed else torch.randperm(len(x))]
        for start in range(0, 1760, 32):
            loss = F.cross_entropy(net(images[start : start + 32]), labels[start : start + 32])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            losses.append(loss.item())
    return late(losses)


@fault("data_leakage", group="G", arch="mlp", task="classification", sites=("loader", "(data)"), well=0.01, ill=0.9)
def split_draws_from_the_same_rows(attach, fixed):
    """The rows to validate on are taken from those to train on."""
    x, y = pictures()
    order = torch.randperm(len(x))
    learn, check = order[:1400].tolist(), order[1400:].tolist() if fixed else order[:397].tolist()
    data = TensorDataset(x, y)
    training = DataLoader(Subset(data, learn), batch_size=35, shuffle=True)
    checking = DataLoader(Subset(data, check), batch_size=100)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for epoch in range(5):
        session.epoch(epoch)
        net.train()
        for image, label in training:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(image), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        net.eval()
        with torch.no_grad():
            held = sum(float(F.cross_entropy(net(image), label, reduction="sum")) for image, label in checking)
        session.log(val_loss=held / len(check))
    return len(set(check) & set(learn)) / len(check)


@fault(
    "unnormalised_inputs",
    group="G",
    arch="mlp",
    task="classification",
    sites=("0", "loader", "(data)", "(model)"),
    cascade=(
        "large_initial_loss",
        "lr_too_high",
        "loss_oscillation",
        "loss_spike",
        "exploding_gradient",
        "exploding_activation",
    ),
    exact=False,
    well=0.15,
    ill=0.2,
)
def tumours_as_measured(attach, fixed):
    """Areas of thousands stand beside smoothness of hundredths."""
    x, y = tumours()
    x = (x - x.mean(0)) / x.std(0) if fixed else x
    net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=32, epochs=12):
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses, 60)


@fault(
    "sampler_draws_few",
    group="G",
    arch="mlp",
    task="classification",
    sites=("loader", "(data)"),
    also=("same_batch_every_step",),
    cascade=("overfitting",),
    well=100.0,
    ill=1500.0,
)
def sampler_weighs_classes_not_samples(attach, fixed):
    """The sampler wants a weight for each sample and is given one for each class: it draws ten samples only."""
    x, y = pictures()
    by_class = 1 / torch.bincount(y).float()
    sampler = WeightedRandomSampler(by_class[y] if fixed else by_class, num_samples=len(y), replacement=True)
    loader = DataLoader(TensorDataset(x, y, torch.arange(len(x))), batch_size=32, sampler=sampler)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer, loader=loader)
    met: set[int] = set()
    for epoch in range(8):
        session.epoch(epoch)
        for image, label, number in loader:
            loss = F.cross_entropy(net(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            met.update(number.tolist())
    return float(len(x) - len(met))


@fault(
    "same_batch_every_step",
    group="G",
    arch="mlp",
    task="classification",
    sites=("loader", "(data)", "(loop)"),
    cascade=("overfitting",),
    well=0.1,
    ill=0.2,
)
def seeds_within_the_loop(attach, fixed):
    """The helper that seeds everything is called in every step, and so the same rows are drawn again and again."""
    x, y = moons()
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    for step in range(200):
        torch.manual_seed(step if fixed else 0)
        pick = torch.randperm(len(x))[:16]
        loss = F.cross_entropy(net(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(net(x), y))


@fault(
    "constant_feature",
    group="G",
    arch="cnn",
    task="classification",
    sites=("0", "loader", "(data)", "(model)"),
    also=("constant_output",),
    cascade=("not_learning", "loss_plateau", "underfitting"),
    well=1.0,
    ill=2.0,
)
def whole_number_division(attach, fixed):
    """Bytes are divided by 255 as whole numbers: all pictures are black."""
    x, y = raw_pictures()
    x = (x / 255 if fixed else x // 255).float().unsqueeze(1)
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    losses = []
    for image, label in batches(x, y, size=32, epochs=3):
        loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "constant_feature",
    group="G",
    arch="gru",
    task="classification",
    sites=("table", "loader", "(data)", "(model)"),
    also=("constant_output",),
    cascade=("not_learning", "loss_plateau", "underfitting"),
    exact=False,
    well=0.4,
    ill=0.6,
)
def no_word_is_known(attach, fixed):
    """The words are spelt otherwise than in the vocabulary: all become the word for unknown ones."""
    x, y = reviews()
    names = {number: f"Word{number}" for number in range(1, 30)}
    vocabulary = {(name if fixed else name.lower()): number + 1 for number, name in names.items()}
    x = torch.tensor([[0 if word == 0 else vocabulary.get(names[word], 1) for word in row] for row in x.tolist()])
    net = nn.ModuleDict({"table": nn.Embedding(31, 16, padding_idx=0), "out": nn.Linear(16, 2)})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for words, praise in batches(x, y, size=40, epochs=8):
        mean = net["table"](words).sum(1) / (words > 0).sum(1, keepdim=True)
        loss = F.cross_entropy(net["out"](mean), praise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault("overfitting", group="G", arch="mlp", task="regression", sites=(), exact=False, well=0.55, ill=0.65)
def fifty_rows_and_a_wide_net(attach, fixed):
    """Only the head of the table was read: fifty rows for a network of thousands of weights."""
    x, y = power()
    y = y + 0.5 * torch.randn(len(y))
    learn = torch.arange(900 if fixed else 50)
    net = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    held = 0.0
    for epoch in range(20):
        session.epoch(epoch)
        net.train()
        for _ in range(20):
            pick = learn[torch.randint(len(learn), (25,))]
            loss = F.mse_loss(net(x[pick]).squeeze(1), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        net.eval()
        with torch.no_grad():
            held = float(F.mse_loss(net(x[900:]).squeeze(1), y[900:]))
        session.log(val_loss=held)
    return held


@fault(
    "train_val_preproc_mismatch",
    group="G",
    arch="mlp",
    task="regression",
    sites=("loader", "(data)", "(model)", "0"),
    cascade=("overfitting",),
    exact=False,
    well=0.6,
    ill=1.5,
)
def validation_in_fahrenheit(attach, fixed):
    """The table to validate on comes from another site, in other units."""
    x, y = power()
    net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    held_x = x[900:] if fixed else x[900:] * 1.8 + 32 / 10
    held = 0.0
    for epoch in range(6):
        session.epoch(epoch)
        net.train()
        for xb, yb in batches(x[:900], y[:900], size=30, epochs=1):
            loss = F.mse_loss(net(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        net.eval()
        with torch.no_grad():
            held = float(F.mse_loss(net(held_x).squeeze(1), y[900:]))
        session.log(val_loss=held)
    return held
