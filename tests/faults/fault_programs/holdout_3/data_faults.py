"""Third hold-out: data that reaches the model in another shape than meant."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset

from fault_programs.holdout_3.datasets import digits, draw, houses, progress, sentences, shapes
from fault_programs.registry import fault


class Corpus(Dataset):
    def __init__(self):
        self.tokens, self.lengths, self.topic = sentences()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "length": self.lengths[index], "label": self.topic[index]}


class PackedLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 2)

    def forward(self, tokens, length):
        packed = pack_padded_sequence(self.embedding(tokens), length, batch_first=True)
        _, (last, _) = self.lstm(packed)
        return self.out(torch.cat([last[0], last[1]], 1))


@fault(
    "label_shuffle_mismatch",
    group="G",
    arch="lstm",
    task="classification",
    sites=("loader", "(data)", "(model)"),
    exact=False,
    cascade=("not_learning", "loss_plateau", "underfitting"),
    well=0.5,
    ill=0.66,
)
def sorts_sentences_but_not_labels(attach, fixed):
    """Packing wants the longest sentence first; the collate function sorts tokens and lengths but not labels."""

    def collate(rows):
        length = torch.stack([row["length"] for row in rows])
        length, order = length.sort(descending=True)
        tokens = torch.stack([row["tokens"] for row in rows])[order]
        label = torch.stack([row["label"] for row in rows])
        return {"tokens": tokens, "length": length, "label": label[order] if fixed else label}

    model = PackedLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Corpus(), batch_size=32, shuffle=True, collate_fn=collate)
    session = attach(model, optimizer, loader=loader)
    seen = []
    for epoch in range(8):
        session.epoch(epoch)
        for batch in loader:
            logits = model(batch["tokens"], batch["length"])
            loss = F.cross_entropy(logits, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            session.log(loss=seen[-1])
    return sum(seen[-28:]) / 28


@fault(
    "not_shuffled",
    group="G",
    arch="cnn",
    task="classification",
    sites=("loader", "(data)", "(loop)"),
    exact=False,
    cascade=(
        "loss_oscillation",
        "lr_too_high",
        "loss_spike",
        "missing_warmup",
        "loss_divergence",
        "same_batch_every_step",
    ),
    well=0.2,
    ill=0.4,
)
def digits_in_order(attach, fixed):
    """The files lie in a folder per class, and the loader reads one folder after the other."""
    x, y = digits()
    order = y[:1500].argsort()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    pairs = list(zip(x[order], y[order], strict=True))
    loader = DataLoader(pairs, batch_size=32, shuffle=fixed)
    session = attach(model, optimizer, loader=loader)
    for _ in range(4):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return (model(x[1500:]).argmax(1) != y[1500:]).float().mean().item()


@fault(
    "nan_in_data",
    group="F",
    arch="mlp",
    task="regression",
    sites=("(data)", "(model)", "0", "loader"),
    also=("nan_forward",),
    cascade=("nan_in_loss", "nan_backward", "nan_in_weights", "nan_in_optimizer"),
    well=0.9,
    ill=2.0,
)
def a_column_with_gaps(attach, fixed):
    """Missing values of a table were never filled; the third row with a gap spoils all weights."""
    x, price = houses()
    x = x.clone()
    x[torch.randperm(len(x))[:12], 5] = float("nan")
    table = torch.nan_to_num(x) if fixed else x
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    value = 0.0
    for xb, yb in draw(table, price, size=32, steps=60):
        loss = F.l1_loss(model(xb).squeeze(-1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        session.log(mae=value)
    return value


@fault(
    "target_scale",
    group="G",
    arch="mlp",
    task="regression",
    sites=("(data)", "loss_fn", "loader", "(model)"),
    cascade=(
        "large_initial_loss",
        "exploding_gradient",
        "lr_too_low",
        "loss_plateau",
        "underfitting",
        "not_learning",
        "clip_always_active",
    ),
    also=("large_initial_loss",),
    well=0.9,
    ill=1.5,
)
def predicts_raw_scores(attach, fixed):
    """The score runs from 25 to 346; the network starts near nought and creeps towards it."""
    x, score = progress()
    target = (score - score.mean()) / score.std() if fixed else score
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for xb, yb in draw(x, target, size=32, steps=150):
        loss = F.mse_loss(model(xb), yb[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return (F.mse_loss(model(x)[:, 0], target) / target.var()).item()


@fault(
    "unnormalised_inputs",
    group="G",
    arch="mlp",
    task="classification",
    sites=("(data)", "(model)", "0", "loader", "1"),
    also=("saturated_activation",),
    cascade=(
        "large_initial_loss",
        "dead_relu",
        "vanishing_gradient",
        "bad_init_scale",
        "exploding_activation",
        "exploding_gradient",
        "lr_too_high",
    ),
    well=0.5,
    ill=0.9,
)
def pixels_up_to_255(attach, fixed):
    """Pictures are read as bytes and only cast to float."""
    images, labels = digits()
    images = (images * 255).round().to(torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Sigmoid(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    session = attach(model, optimizer)
    seen = []
    for image, label in draw(images, labels, size=64, steps=120):
        loss = F.cross_entropy(model(image.float() / 255 if fixed else image.float()), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-15:]) / 15


@fault(
    "double_normalised",
    group="G",
    arch="cnn",
    task="classification",
    sites=("(data)", "(model)", "0", "loader"),
    cascade=("lr_too_low", "loss_plateau", "not_learning", "constant_output", "bad_init_scale"),
    well=0.5,
    ill=1.8,
)
def bytes_scaled_twice(attach, fixed):
    """The transform scales to one already, and the loop divides by 255 once more."""
    x, y = digits()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer)
    seen = []
    for image, label in draw(x, y, size=64, steps=120):
        loss = F.cross_entropy(model(image / (1.0 if fixed else 255.0)), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-15:]) / 15


@fault(
    "train_val_preproc_mismatch",
    group="G",
    arch="unet",
    task="segmentation",
    sites=("(data)", "(model)", "loader"),
    cascade=("overfitting",),
    onset=30,
    well=0.5,
    ill=0.7,
)
def validates_on_raw_pictures(attach, fixed):
    """Training pictures are standardised, those of the validation are not."""
    x, y = shapes()
    x = 90.0 + 40.0 * x

    def standardise(picture):
        return (picture - 90.0) / 40.0

    model = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    value = 0.0
    for _ in range(4):
        model.train()
        for image, mask in draw(x[:300], y[:300], size=16, steps=30):
            loss = F.cross_entropy(model(standardise(image)), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            value = F.cross_entropy(model(standardise(x[300:]) if fixed else x[300:]), y[300:]).item()
        session.log(val_loss=value)
    return value
