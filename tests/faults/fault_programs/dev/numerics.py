"""Group F: what is not finite, and what is lost in low precision."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from fault_programs.dev.datasets import batches, digits, error_rate, houses, sentences
from fault_programs.dev.models import Perceptron
from fault_programs.registry import fault

NAN = ("nan_forward", "nan_backward")


class Mixing(nn.Module):
    """Mixes two predictions in log space."""

    def __init__(self, safe):
        super().__init__()
        self.eps = 1e-6 if safe else 0.0
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.gate, self.head = LogGate(self.eps), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.gate(self.body(x)))


class LogGate(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, h):
        share = h / (h.sum(1, keepdim=True) + 1e-6)
        return torch.log(share + self.eps).clamp(min=-12.0) if self.eps else share * torch.log(share)


@fault(
    "nan_forward",
    group="F",
    arch="mlp",
    task="classification",
    sites=("gate",),
    well=0.4,
    ill=0.8,
    cascade=("nan_backward",),
)
def takes_the_log_of_zero(attach, fixed):
    """0 * log 0 behind a rectifier."""
    x, y, test_x, test_y = digits()
    model = Mixing(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "nan_backward",
    group="F",
    arch="siamese",
    task="metric",
    sites=("loss_fn", "(loop)"),
    onset=1,
    well=1.0,
    ill=1.1,
    cascade=("nan_forward",),
)
def square_root_of_a_zero_distance(attach, fixed):
    """The distance of a sample to itself is 0, and the slope of its root is infinite."""
    x, y, *_ = digits()
    model = Perceptron(64, 32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    session = attach(model, optimizer)
    first = loss = None
    for step in range(80):
        rows = torch.randint(0, len(x), (32,))
        rows[0], rows[1] = rows[1], rows[1]
        z = model(x[rows])
        square = ((z[:, None] - z[None]) ** 2).sum(-1)
        distance = torch.sqrt(square + (1e-8 if fixed else 0.0))
        same = (y[rows][:, None] == y[rows][None]).float()
        loss = (same * distance**2 + (1 - same) * F.relu(1 - distance) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if step == 0 else first
        session.log(loss=loss.item())
    return loss.item() / first


@fault(
    "nan_in_data",
    group="F",
    arch="mlp",
    task="regression",
    sites=("loader", "(model)", "loss_fn"),
    cascade=NAN,
    onset=10,
    well=0.5,
    ill=0.9,
)
def reads_a_missing_value(attach, fixed):
    """One row of the table has no value."""
    x, y = houses()
    x = x.clone()
    x[9 * 64 + 5, 3] = 0.0 if fixed else math.nan
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    loader = batches(x, y, shuffle=False)
    session = attach(model, optimizer, loss_fn=criterion, loader=loader)
    for _ in range(5):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(model(xb).squeeze(1), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(x).squeeze(1), y).item()


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32, padding_idx=0)
        self.attn = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, ids, padded):
        x = self.embed(ids)
        x = x + self.attn(x, x, x, key_padding_mask=padded)[0]
        return self.head(x.mean(1))


@fault(
    "fully_masked_attention",
    also=("nan_forward",),
    group="F",
    arch="transformer",
    task="classification",
    sites=("attn", "loader"),
    cascade=NAN,
    onset=20,
    well=0.6,
    ill=1.0,
)
def attends_to_an_empty_sentence(attach, fixed):
    """A sentence of padding only: attention has nowhere to look."""
    ids, padded, y = sentences()
    model = Attentive()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    loss = None
    for step in range(1, 81):
        rows = torch.randint(0, len(ids), (32,))
        batch = {"ids": ids[rows].clone(), "padded": padded[rows].clone(), "label": y[rows]}
        if step == 20:
            batch["ids"][3] = 0
            batch["padded"] = batch["padded"] if fixed else batch["ids"] == 0
        loss = F.cross_entropy(model(batch["ids"], batch["padded"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return loss.item()


class Product(nn.Module):
    """A layer that multiplies and sums many numbers."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.left, self.right = nn.Linear(64, 256), nn.Linear(64, 256)
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        return self.out(self.left(x) * self.right(x) * self.scale)


@fault(
    "fp16_overflow",
    also=("nan_forward",),
    group="F",
    arch="mlp",
    task="classification",
    sites=("out", "(model)"),
    cascade=NAN,
    well=0.3,
    ill=0.5,
)
def overflows_half_precision(attach, fixed):
    """Products of activations outgrow what float16 can hold."""
    x, y, test_x, test_y = digits()
    model = Product(1.0 if fixed else 3e5).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x.half(), y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb).float(), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x.half(), test_y)


@fault(
    "loss_scale_collapse",
    also=("fp16_overflow", "nan_backward"),
    group="F",
    arch="mlp",
    task="classification",
    sites=("scaler", "optimizer", "(loop)", "loss_fn"),
    cascade=("nan_forward", "lr_too_low"),
    exact=False,
    well=0.3,
    ill=0.6,
)
def scaler_never_finds_a_scale(attach, fixed):
    """A loss a thousand million times too large: step after step overflows and the scale is halved."""
    x, y, test_x, test_y = digits()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    session = attach(model, optimizer, scaler=scaler)
    for _ in range(3):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(xb)
            loss = F.cross_entropy(logits.float(), yb) * (1.0 if fixed else 1e9)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            session.log(loss=loss.item())
    return error_rate(model, test_x, test_y)


@fault(
    "low_precision_stall",
    group="F",
    arch="mlp",
    task="classification",
    sites=("fc", "optimizer"),
    exact=False,
    cascade=("optimizer_step_noop", "lr_too_low", "not_learning"),
    well=0.55,
    ill=0.62,
)
def stalls_in_bfloat16(attach, fixed):
    """bfloat16 weights round a small update away."""
    x, y, test_x, test_y = digits()
    dtype = torch.float32 if fixed else torch.bfloat16
    model = Perceptron()
    for layer in (model.fc1, model.fc2, model.fc3):
        nn.init.kaiming_normal_(layer.weight)
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _ in range(8):
        for xb, yb in batches(x.to(dtype), y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x.to(dtype), test_y)
