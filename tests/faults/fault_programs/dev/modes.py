"""Group E: normalisation, dropout and the train and eval modes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fault_programs.dev.datasets import batches, digits, error_rate, images
from fault_programs.dev.models import TinyResNet
from fault_programs.registry import fault


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


@fault(
    "eval_mode_in_training",
    group="E",
    arch="resnet",
    task="classification",
    onset=24,
    well=0.0,
    ill=1.0,
    sites=("stem", "layer1", "layer2", "drop", "(loop)", "(model)"),
)
def stays_in_eval_after_validation(attach, fixed):
    """Validation calls eval() and nobody calls train() again."""
    x, y, test_x, test_y = images()
    model = TinyResNet(dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    session = attach(model, optimizer)
    model.train()
    in_eval = False
    for _ in range(4):
        for xb, yb in batches(x, y):
            in_eval |= not model.training
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        val_loss = validate(model, test_x, test_y)
        model.train(fixed)
        session.log(val_loss=val_loss)
    return float(in_eval)


@fault(
    "train_mode_in_eval",
    group="E",
    arch="resnet",
    task="classification",
    onset=24,
    well=0.0,
    ill=0.001,
    sites=("stem", "layer1", "layer2", "drop", "(loop)", "(model)"),
)
def validates_in_train_mode(attach, fixed):
    """eval() is never called, so validation moves the batch norm's statistics and drops units."""
    x, y, test_x, test_y = images()
    model = TinyResNet(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    moved = 0.0
    for epoch in range(4):
        session.epoch(epoch)
        model.train()
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        before = model.stem[1].running_mean.clone()
        model.train(not fixed)
        with torch.no_grad():
            for xb, yb in batches(test_x, test_y, shuffle=False):
                session.log(val_loss=criterion(model(xb), yb))
        moved += (model.stem[1].running_mean - before).abs().sum().item()
    return moved


class AlwaysDropping(nn.Module):
    def __init__(self, knows_mode):
        super().__init__()
        self.knows_mode = knows_mode
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        training = self.training if self.knows_mode else True
        x = F.dropout(F.relu(self.fc1(x)), 0.5, training=training)
        x = F.dropout(F.relu(self.fc2(x)), 0.5, training=training)
        return self.fc3(x)


@fault(
    "dropout_ignores_mode",
    also=("train_mode_in_eval",),
    group="E",
    arch="mlp",
    task="classification",
    onset=24,
    sites=("fc", "(loop)", "(model)"),
    well=0.0,
    ill=0.02,
)
def drops_in_eval_too(attach, fixed):
    """F.dropout is called without the module's mode and drops in evaluation as well."""
    x, y, test_x, test_y = digits()
    model = AlwaysDropping(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        model.train()
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(test_x), test_y)
        session.log(val_loss=val_loss)
    model.eval()
    return (model(test_x).argmax(1) != model(test_x).argmax(1)).float().mean().item()


@fault(
    "batchnorm_small_batch",
    group="E",
    arch="mlp",
    task="classification",
    sites=("1", "4"),
    well=0.2,
    ill=0.25,
    cascade=("loss_oscillation", "lr_too_high"),
)
def normalises_pairs(attach, fixed):
    """Batch norm over batches of two: each sample is told apart by its neighbour."""
    x, y, test_x, test_y = digits()
    first = (nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    second = (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())
    model = nn.Sequential(*first, *second, nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    loader = batches(x, y, size=64 if fixed else 2)
    step = 0
    while step < 120:
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            step += 1
            if step == 120:
                break
        session.log(val_loss=validate(model, test_x, test_y))
    return error_rate(model, test_x, test_y)


@fault(
    "batchnorm_stats_stale",
    group="E",
    arch="resnet",
    task="classification",
    sites=("stem", "layer1", "layer2"),
    well=0.08,
    ill=0.15,
)
def batch_norm_without_momentum(attach, fixed):
    """momentum=0 keeps the running statistics where they started."""
    x, y, test_x, test_y = images()
    model = TinyResNet(momentum=0.1 if fixed else 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    session = attach(model, optimizer)
    for _ in range(4):
        model.train()
        for xb, yb in batches(x, y):
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        session.log(val_loss=validate(model, test_x, test_y))
    return error_rate(model, test_x, test_y)
