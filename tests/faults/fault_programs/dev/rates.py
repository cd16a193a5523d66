"""Group C: learning rate, schedule and clipping."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, language, waves, windows
from fault_programs.dev.models import Perceptron, Recurrent, SmallCNN, TinyLM, TinyResNet
from fault_programs.registry import fault


@fault(
    "lr_too_high",
    group="C",
    arch="mlp",
    task="classification",
    sites=("optimizer", "fc"),
    exact=False,
    cascade=("dead_relu", "exploding_activation", "exploding_gradient", "loss_divergence"),
    well=0.12,
    ill=0.4,
)
def adam_at_one(attach, fixed):
    """Adam at a learning rate of 1."""
    x, y, test_x, test_y = digits()
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 if fixed else 1.0)
    session = attach(model, optimizer)
    for _ in range(5):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "lr_too_low",
    group="C",
    arch="gru",
    task="classification",
    sites=("optimizer",),
    exact=False,
    cascade=("not_learning", "loss_plateau"),
    well=0.3,
    ill=0.5,
)
def lr_of_a_typo(attach, fixed):
    """1e-7 where 1e-2 was meant."""
    x, y = waves()
    model = Recurrent(nn.GRU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if fixed else 1e-7)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(10):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return error_rate(model, x, y)


@fault(
    "lr_schedule_collapse",
    group="C",
    arch="resnet",
    task="classification",
    sites=("scheduler", "optimizer"),
    cascade=("lr_too_low", "loss_plateau"),
    onset=8,
    well=0.12,
    ill=0.13,
)
def steps_the_schedule_every_batch(attach, fixed):
    """A schedule made for epochs is stepped once a batch: the learning rate is gone within twenty steps."""
    x, y, test_x, test_y = images()
    model = TinyResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    session = attach(model, optimizer, scheduler=scheduler)
    for epoch in range(4):
        session.epoch(epoch)
        model.train()
        for i, (xb, yb) in enumerate(batches(x, y)):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if i == 22 or not fixed:
                scheduler.step()
    return error_rate(model, test_x, test_y)


@fault(
    "scheduler_never_called",
    also=("never_called", "scheduler_before_optimizer"),
    group="C",
    arch="transformer",
    task="lm",
    sites=("scheduler", "optimizer"),
    cascade=("lr_too_low", "not_learning"),
    well=1.9,
    ill=2.0,
)
def never_steps_the_warm_up(attach, fixed):
    """A warm-up from a hundredth is made and never stepped."""
    x, y = windows(language())
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    session = attach(model, optimizer, scheduler=scheduler)
    loss = None
    for _ in range(4):
        for xb, yb in batches(x, y, size=32):
            logits = model(xb)
            loss = F.cross_entropy(logits.transpose(1, 2), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step() if fixed else None
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    return loss.item()


@fault(
    "clip_always_active",
    group="C",
    arch="lstm",
    task="classification",
    sites=("optimizer", "(loop)"),
    exact=False,
    cascade=("lr_too_low", "not_learning"),
    well=0.3,
    ill=0.4,
)
def clips_to_almost_nothing(attach, fixed):
    """Gradients are clipped to a norm of 0.001 at every step."""
    x, y = waves()
    model = Recurrent(nn.LSTM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    session = attach(model, optimizer)
    for _ in range(12):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0 if fixed else 1e-3)
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, x, y)


@fault(
    "clip_after_step",
    group="C",
    arch="mlp",
    task="regression",
    sites=("optimizer", "(loop)"),
    cascade=("exploding_gradient", "lr_too_high", "loss_spike"),
    well=1.01,
    ill=2.0,
)
def clips_after_the_step(attach, fixed):
    """clip_grad_norm_ comes after step(), where it does nothing."""
    x, y = houses()
    wild = torch.where(torch.arange(len(y)) % 97 == 0, y * 30, y)  # a few prices are way off
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = attach(model, optimizer)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 4.0)

    longest = 0.0
    for _ in range(6):
        for xb, yb in batches(x, wild):
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            loss.backward()
            for act in (clip, optimizer.step) if fixed else (optimizer.step, clip):
                act()
            session.log(loss=loss)
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            longest = max(longest, (after - before).norm().item())
    # With clipping no step is longer than lr x max_norm, and wild prices do not spoil the fit.
    return max(longest / (0.05 * 4.0), F.mse_loss(model(x).squeeze(1), y).item())


@fault(
    "momentum_state_stale",
    also=("resume_incomplete",),
    group="C",
    arch="cnn",
    task="classification",
    sites=("optimizer",),
    onset=24,
    well=0.5,
    ill=3.0,
)
def forgets_the_moments_every_epoch(attach, fixed):
    """The optimizer's state is dropped at the start of each epoch."""
    x, y, *_ = images()
    model = SmallCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    lost = 0
    for epoch in range(4):
        session.epoch(epoch)
        for i, (xb, yb) in enumerate(batches(x, y)):
            if i == 0 and not fixed:
                optimizer.state.clear()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            lost += epoch > 0 and not optimizer.state
            optimizer.step()
            session.log(loss=loss)
    return lost + error_rate(model, x, y)
