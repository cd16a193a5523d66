"""Group H: checkpoints and copies."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from fault_programs.dev.datasets import batches, digits, language, windows
from fault_programs.dev.models import Perceptron, TinyLM
from fault_programs.registry import fault


@fault(
    "resume_incomplete",
    also=("momentum_state_stale",),
    group="H",
    arch="transformer",
    task="lm",
    sites=("optimizer",),
    onset=48,
    cascade=("loss_spike", "lr_too_high"),
    well=10.0,
    ill=30.0,
)
def resumes_without_the_optimizer(attach, fixed):
    """The checkpoint's weights are loaded, its optimizer state is not."""
    x, y = windows(language())

    def train(model, optimizer, session, epochs):
        loss = None
        for _ in range(epochs):
            for xb, yb in batches(x, y, size=32):
                loss = F.cross_entropy(model(xb).transpose(1, 2), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
        return loss.item()

    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, optimizer, attach(model, optimizer), 2)
    checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    model = TinyLM()
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer.load_state_dict(checkpoint["optimizer"]) if fixed else None
    loss = train(model, optimizer, attach(model, optimizer, resume=True), 2)
    taken = optimizer.state[model.head.weight]["step"].item()
    return loss + (96 - taken)


@fault(
    "ema_not_updated",
    group="H",
    arch="mlp",
    task="classification",
    sites=("ema", "(loop)"),
    onset=1,
    exact=False,
    well=0.9,
    ill=1.0,
)
def averages_with_decay_one(attach, fixed):
    """A moving average of the weights with a decay of 1 never moves."""
    x, y, *_ = digits()
    model = Perceptron()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach({"model": model, "ema": ema}, optimizer)
    start = ema.fc1.weight.clone()
    decay = 0.95 if fixed else 1.0
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, current in zip(ema.parameters(), model.parameters(), strict=True):
                    mean.lerp_(current, 1 - decay)
            session.log(loss=loss)
    return 1.0 if torch.equal(start, ema.fc1.weight) else F.cross_entropy(ema(x), y).item()
