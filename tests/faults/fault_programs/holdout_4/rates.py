"""Fourth hold-out: rates, schedules, regularisers, first weights and numbers that are too large or too small."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_4.datasets import batches, late, moons, pictures, power, text, windows, wines
from fault_programs.registry import fault


@fault(
    "lr_too_low",
    group="C",
    arch="mlp",
    task="classification",
    sites=("optimizer", "scheduler"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    exact=False,
    well=1.0,
    ill=1.5,
)
def warms_up_for_epochs_not_steps(attach, fixed):
    """A warm-up is counted in steps, 2,000 of them, and stepped once an epoch: the rate never gets off the ground."""
    x, y = pictures()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    warm = 2 if fixed else 2000
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: min(1.0, (count + 1) / warm))
    session = attach(net, optimizer, scheduler=scheduler)
    losses = []
    for epoch in range(5):
        session.epoch(epoch)
        for image, label in batches(x, y, size=36, epochs=1):
            loss = F.cross_entropy(net(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            losses.append(loss.item())
        scheduler.step()
    return late(losses)


@fault(
    "lr_schedule_collapse",
    group="C",
    arch="cnn",
    task="classification",
    sites=("optimizer", "scheduler"),
    cascade=("underfitting", "loss_plateau", "lr_too_low", "optimizer_step_noop"),
    exact=False,
    well=0.5,
    ill=0.8,
)
def plateau_is_asked_every_batch(attach, fixed):
    """`ReduceLROnPlateau` is stepped with the noisy loss of every batch and gives up within an epoch."""
    x, y = pictures()
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=2)
    session = attach(net, optimizer, scheduler=scheduler)
    losses = []
    for epoch in range(5):
        session.epoch(epoch)
        for number, (image, label) in enumerate(batches(x, y, size=16, epochs=1)):
            loss = F.cross_entropy(net(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            losses.append(loss.item())
            if number == 111 if fixed else True:
                scheduler.step(late(losses, 100) if number == 111 else losses[-1])
    return late(losses)


@fault(
    "lr_too_low",
    group="C",
    arch="gru",
    task="lm",
    sites=("optimizer", "scheduler"),
    also=("lr_schedule_collapse",),
    cascade=("underfitting", "loss_plateau", "not_learning", "optimizer_step_noop"),
    exact=False,
    well=2.0,
    ill=2.6,
)
def factor_is_taken_for_the_rate(attach, fixed):
    """`LambdaLR` multiplies the rate by what the function returns; this one returns the rate itself."""
    series = text()
    table, gru, out = nn.Embedding(20, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 20)
    net = nn.ModuleList([table, gru, out])
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    peak = 1.0 if fixed else 5e-3
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: peak * (1 - step / 400))
    session = attach(net, optimizer, scheduler=scheduler)
    losses = []
    for now, following in windows(series, 12, 24, 200):
        loss = F.cross_entropy(out(gru(table(now))[0]).transpose(1, 2), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "lr_too_high",
    group="C",
    arch="mlp",
    task="regression",
    sites=("optimizer",),
    also=("loss_divergence",),
    cascade=(
        "loss_oscillation",
        "exploding_gradient",
        "exploding_activation",
        "dead_relu",
        "not_learning",
        "constant_output",
    ),
    exact=False,
    well=0.3,
    ill=0.6,
)
def momentum_with_a_nine_too_many(attach, fixed):
    """Momentum of 0.999 makes each step a thousand times as long as the gradient says."""
    x, y = power()
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9 if fixed else 0.999)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=40, epochs=10):
        loss = F.mse_loss(net(xb).squeeze(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses, 60)


@fault(
    "weight_decay_too_large",
    group="C",
    arch="cnn",
    task="classification",
    sites=("optimizer",),
    cascade=(
        "underfitting",
        "loss_plateau",
        "constant_output",
        "weight_decay_on_norm_bias",
        "vanishing_gradient",
        "not_learning",
    ),
    exact=False,
    well=0.5,
    ill=1.5,
)
def decays_by_a_half(attach, fixed):
    """A weight decay of 0.5, meant as 0.0005, pulls everything to zero."""
    x, y = pictures()
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4 if fixed else 0.5)
    session = attach(net, optimizer)
    losses = []
    for image, label in batches(x, y, size=32, epochs=4):
        loss = F.cross_entropy(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "clip_before_unscale",
    group="F",
    arch="mlp",
    task="classification",
    sites=("optimizer", "scaler", "(loop)"),
    cascade=("clip_always_active", "lr_too_low", "underfitting", "loss_plateau", "not_learning", "grad_underflow"),
    well=0.7,
    ill=1.5,
)
def clips_what_is_still_scaled(attach, fixed):
    """Gradients are clipped to 1 while they are multiplied by 65,536."""
    x, y = pictures()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    session = attach(net, optimizer, scaler=scaler)
    losses = []
    for image, label in batches(x, y, size=32, epochs=3):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(image), label)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer) if fixed else None
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "grad_underflow",
    group="F",
    arch="mlp",
    task="classification",
    sites=("(model)", "1", "3", "5", "loss_fn", "optimizer"),
    cascade=(
        "optimizer_step_noop",
        "not_learning",
        "loss_plateau",
        "vanishing_gradient",
        "lr_too_low",
        "low_precision_stall",
    ),
    well=0.1,
    ill=0.6,
)
def half_precision_without_a_scaler(attach, fixed):
    """The model is cast to half precision and the loss, divided by all pixels of many batches, is not scaled up."""
    x, y = pictures()
    kind = torch.float32 if fixed else torch.float16
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)).to(
        kind
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=500.0)
    session = attach(net, optimizer)
    gone = []
    for image, label in batches(x, y, size=64, epochs=4):
        logits = net(image.to(kind))
        loss = F.cross_entropy(logits.float(), label, reduction="sum") / (64 * 64 * 4096)
        optimizer.zero_grad()
        loss.backward()
        gone.append(float((net[1].weight.grad == 0).float().mean()))
        optimizer.step()
        session.log(loss=loss)
    return late(gone)


class Tower(nn.Module):
    """Blocks that add what they find to what they were given."""

    def __init__(self, depth, scale):
        super().__init__()
        self.first, self.out = nn.Linear(13, 32), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=(2 / 32) ** 0.5)
        self.scale = scale

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + self.scale * torch.relu(block(x))
        return self.out(x)


@fault(
    "exploding_activation",
    group="D",
    arch="resnet",
    task="classification",
    sites=("blocks", "(model)", "out", "first"),
    also=("bad_init_scale",),
    cascade=(
        "large_initial_loss",
        "exploding_gradient",
        "lr_too_high",
        "loss_oscillation",
        "loss_spike",
        "loss_divergence",
    ),
    exact=False,
    well=3.0,
    ill=50.0,
)
def thirty_blocks_that_only_add(attach, fixed):
    """Thirty residual blocks without a norm or a factor: what comes out is a thousand times what went in."""
    x, y = wines()
    net = Tower(30, scale=0.05 if fixed else 1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=16, epochs=8):
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return losses[0]


class Tied(nn.Module):
    """A language model whose logits are products with its own embedding."""

    def __init__(self, std):
        super().__init__()
        self.table = nn.Embedding(20, 128)
        nn.init.normal_(self.table.weight, std=std)
        self.mix = nn.Linear(128, 128)

    def forward(self, words):
        x = self.table(words)
        return (x + torch.tanh(self.mix(x))) @ self.table.weight.T


@fault(
    "bad_init_scale",
    group="D",
    arch="embedding",
    task="lm",
    sites=("table", "(model)"),
    also=("large_initial_loss",),
    cascade=("logit_drift", "lr_too_high", "loss_spike", "exploding_gradient"),
    exact=False,
    well=5.0,
    ill=30.0,
)
def ties_logits_to_a_loud_embedding(attach, fixed):
    """The embedding keeps torch's deviation of 1 and is also the matrix of the logits: they start in the hundreds."""
    series = text()
    net = Tied(0.02 if fixed else 1.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    losses = []
    for now, following in windows(series, 10, 24, 150):
        loss = F.cross_entropy(net(now).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return losses[0]


def fill(module):
    """Start layers with one number everywhere."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.constant_(module.weight, 0.02)
        nn.init.zeros_(module.bias)


@fault(
    "symmetric_init",
    group="D",
    arch="cnn",
    task="classification",
    sites=("0", "2", "5", "(model)"),
    cascade=("underfitting", "loss_plateau", "identical_layer_init", "dormant_units", "constant_output"),
    well=0.9,
    ill=1.4,
)
def constant_filters(attach, fixed):
    """All filters start with the same number and so learn the same."""
    x, y = pictures()
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    None if fixed else net.apply(fill)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
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
    "dropout_too_high",
    group="C",
    arch="mlp",
    task="classification",
    sites=("2", "5", "(model)"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    exact=False,
    well=0.2,
    ill=0.42,
)
def share_to_keep_is_the_share_to_drop(attach, fixed):
    """Another library's dropout took the share to keep; here 0.9 of all units are dropped, twice."""
    x, y = moons()
    p = 0.1 if fixed else 0.9
    net = nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=40, epochs=8):
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "batchnorm_small_batch",
    group="E",
    arch="cnn",
    task="classification",
    sites=("5", "1", "(model)", "loader"),
    cascade=("loss_oscillation", "underfitting", "not_learning", "lr_too_high"),
    well=0.5,
    ill=0.8,
)
def picture_by_picture(attach, fixed):
    """Pictures are fed one at a time through batch norms that see four values a channel at the end."""
    x, y = pictures()
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 2), nn.BatchNorm2d(16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    session = attach(net, optimizer)
    size = 32 if fixed else 1
    losses = []
    for _ in range(250):
        pick = torch.randint(1500, (size,))
        loss = F.cross_entropy(net(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses, 60)


@fault(
    "vanishing_gradient",
    group="D",
    arch="cnn",
    task="classification",
    sites=("layers", "(model)"),
    also=("saturated_activation", "bad_init_scale"),
    cascade=("not_learning", "loss_plateau", "constant_output", "underfitting"),
    exact=False,
    well=1.0,
    ill=2.0,
)
def six_convolutions_of_sigmoids(attach, fixed):
    """Six convolutions with sigmoids between them: hardly anything comes back to the first."""
    x, y = pictures()
    bend = nn.ReLU if fixed else nn.Sigmoid
    layers, seen = [], 1
    for _ in range(6):
        layers += [nn.Conv2d(seen, 12, 3, padding=1), bend()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
        seen = 12
    net = nn.ModuleDict({"layers": nn.Sequential(*layers), "out": nn.Linear(12 * 64, 10)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    session = attach(net, optimizer)
    losses = []
    for image, label in batches(x, y, size=32, epochs=3):
        loss = F.cross_entropy(net["out"](net["layers"](image).flatten(1)), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)
