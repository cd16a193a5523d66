"""Second hold-out: numbers that are not finite, data that is not right, and runs that are resumed."""

from __future__ import annotations

import io
from itertools import islice

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_2.datasets import Records, forever, pixels, series, tumours
from fault_programs.registry import fault


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.classify = nn.Linear(8 * 36, 10)

    def forward(self, x):
        return self.classify(F.leaky_relu(self.norm(self.conv(x))).flatten(1))


@fault(
    "nan_forward",
    group="F",
    arch="cnn",
    task="classification",
    sites=("loss_fn",),
    also=("nan_in_loss",),
    cascade=("nan_backward", "nan_in_weights", "nan_in_optimizer"),
    well=0.2,
    ill=0.5,
)
def divergence_from_a_one_hot_teacher(attach, fixed):
    """A Kullback-Leibler divergence by hand; the teacher's probabilities are one-hot, and 0 log 0 is not a number."""
    x, y, x_test, y_test = pixels()
    student = Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(student, optimizer)

    def divergence(teacher, logits):
        if fixed:
            teacher = teacher.clamp_min(1e-8)
        return (teacher * (teacher / logits.softmax(-1)).log()).sum(-1).mean()

    for images, labels in islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True)), 80):
        teacher = F.one_hot(labels, 10).float()
        loss = divergence(teacher, student(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(kl=loss)
    if any(not p.isfinite().all() for p in student.parameters()):
        return float("nan")
    return (student(x_test).argmax(1) != y_test).float().mean().item()


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16))
        self.paint = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 64))

    def forward(self, x):
        return self.paint(self.squeeze(x))


@fault(
    "nan_backward",
    group="F",
    arch="autoencoder",
    task="reconstruction",
    sites=("loss_fn", "paint"),
    also=("nan_in_loss",),
    cascade=("nan_forward", "nan_in_weights", "nan_in_optimizer", "dead_relu"),
    well=0.09,
    ill=0.2,
)
def contrast_of_a_black_pixel(attach, fixed):
    """The loss compares each inked pixel's deviation over the batch; one that is black throughout has none."""
    x = pixels()[0].flatten(1)
    model = Painter()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    epsilon = 1e-6 if fixed else 0.0
    session = attach(model, optimizer)
    for (images,) in islice(forever(DataLoader(TensorDataset(x), batch_size=50, shuffle=True)), 110):
        painted = model(images) * (images > 0)
        contrast = torch.sqrt(painted.var(0) + epsilon) - images.std(0)
        loss = mse_loss(painted, images) + 0.1 * contrast.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return mse_loss(model(x) * (x > 0), x).item()


@fault(
    "nan_in_data",
    group="F",
    arch="mlp",
    task="classification",
    sites=("loader", "(loop)", "(data)", "0"),
    cascade=("nan_forward", "nan_backward", "nan_in_loss", "nan_in_weights", "nan_in_optimizer"),
    well=0.12,
    ill=0.3,
)
def logarithm_of_a_measured_zero(attach, fixed):
    """Measurements are skewed, so their logarithm is taken; some tumours measure zero."""
    raw, benign = tumours()
    features = (np.log1p if fixed else np.log)(raw)
    features = (features - features.mean(0)) / features.std(0)
    x, y = torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(benign, dtype=torch.float32)
    net = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 1))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(net, opt, loss_fn=criterion)
    for epoch in range(6):
        session.epoch(epoch)
        for xb, yb in DataLoader(TensorDataset(x[:450], y[:450]), batch_size=32, shuffle=True):
            opt.zero_grad()
            loss = criterion(net(xb).flatten(), yb)
            loss.backward()
            opt.step()
            session.log(loss=loss)
    net.eval()
    with torch.no_grad():
        return ((net(x[450:]).flatten() > 0) != y[450:].bool()).float().mean().item()


class Energies(nn.Module):
    """Adds up squares, as a poor man's power spectrum does."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Linear(24, 48)
        self.norm = nn.BatchNorm1d(48)
        self.classify = nn.Linear(48, 1)

    def forward(self, x):
        spectrum = self.filters(x)
        return self.classify(self.norm((spectrum * spectrum + 1).log()))


@fault(
    "fp16_overflow",
    group="F",
    arch="mlp",
    task="regression",
    sites=("filters", "norm", "classify", "(model)"),
    also=("loss_scale_collapse",),
    cascade=("nan_forward", "nan_backward", "nan_in_loss", "optimizer_step_noop"),
    well=0.6,
    ill=0.8,
)
def squares_loud_samples_in_half_precision(attach, fixed):
    """Sixteen-bit audio is squared inside a float16 autocast; bfloat16 would hold the squares."""
    past, _ = series()
    loudness = torch.rand(len(past), 1) * 3 + 5
    x = past.squeeze(-1) * loudness.exp()
    y = (loudness - 6.5) / 0.87
    model = Energies()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    dtype = torch.bfloat16 if fixed else torch.float16
    session = attach(model, optimizer, scaler=scaler)
    for inputs, targets in islice(forever(DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True)), 120):
        with torch.autocast("cpu", dtype=dtype):
            loss = mse_loss(model(inputs).float(), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return mse_loss(model(x), y).item()


@fault(
    "unnormalised_inputs",
    group="G",
    arch="mlp",
    task="classification",
    sites=("loader", "(data)", "(loop)", "0"),
    exact=False,
    cascade=("dead_relu", "lr_too_high", "exploding_gradient", "large_initial_loss", "constant_output", "not_learning"),
    well=0.12,
    ill=0.2,
)
def measures_areas_beside_fractions(attach, fixed):
    """Areas in the thousands stand beside fractions below one, and plain SGD sees them as they are."""
    raw, benign = tumours()
    table = torch.as_tensor((raw - raw.mean(0)) / raw.std(0) if fixed else raw, dtype=torch.float32)
    label = torch.as_tensor(benign)
    net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(TensorDataset(table[:450], label[:450]), batch_size=32, shuffle=True)
    session = attach(net, optimizer, loader=loader)
    for _ in range(6):
        for xb, yb in loader:
            loss = cross_entropy(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return (net(table[450:]).argmax(1) != label[450:]).float().mean().item()


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


@fault(
    "label_shuffle_mismatch",
    group="G",
    arch="resnet",
    task="classification",
    sites=("loader", "(data)", "(loop)"),
    exact=False,
    cascade=("not_learning", "loss_plateau", "underfitting"),
    well=0.2,
    ill=0.7,
)
def images_and_labels_from_two_loaders(attach, fixed):
    """Images come from one loader and labels from another, each shuffled by itself."""
    x, y, x_test, y_test = pixels()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), Residual(8), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images = DataLoader(x, 64, shuffle=True, generator=torch.Generator().manual_seed(5))
    labels = DataLoader(y, 64, shuffle=True, generator=torch.Generator().manual_seed(5 if fixed else 6))
    session = attach(model, optimizer)
    model.train()
    for _ in range(8):
        for xb, yb in zip(images, labels, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return (model(x_test).argmax(1) != y_test).float().mean().item()


@fault(
    "not_shuffled",
    group="G",
    arch="cnn",
    task="classification",
    sites=("loader", "(data)", "(loop)"),
    cascade=("loss_oscillation", "loss_spike"),
    well=0.15,
    ill=0.3,
)
def folders_one_after_another(attach, fixed):
    """Images are listed folder by folder, a folder per class, and are read in the order of the list."""
    x, y, x_test, y_test = pixels()
    folders = [(digit, index) for digit in range(10) for index in (y == digit).nonzero().flatten().tolist()]
    model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(108, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    loader = DataLoader(
        folders,
        batch_size=40,
        shuffle=fixed,
        collate_fn=lambda rows: (torch.stack([x[i] for _, i in rows]), torch.tensor([digit for digit, _ in rows])),
    )
    session = attach(model, optimizer)
    for _ in range(4):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return (model(x_test).argmax(1) != y_test).float().mean().item()


@fault(
    "class_imbalance_collapse",
    group="G",
    arch="mlp",
    task="classification",
    sites=("loader", "loss_fn", "(data)", "(model)"),
    exact=False,
    cascade=("constant_output",),
    well=0.3,
    ill=0.45,
)
def one_fraud_in_thirty(attach, fixed):
    """One payment in thirty is a fraud; without weights the network calls none of them one."""
    made = torch.Generator().manual_seed(21)
    y = (torch.rand(3000, generator=made) < 1 / 30).float()
    x = torch.randn(3000, 12, generator=made) + 0.45 * y[:, None]
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    weight = torch.tensor([29.0 if fixed else 1.0])
    session = attach(model, optimizer)
    for xb, yb in islice(forever(DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)), 180):
        scores = model(xb).squeeze(1)
        loss = binary_cross_entropy_with_logits(scores, yb, pos_weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        missed, suspected = (model(x[y == 1]) <= 0).float().mean(), (model(x[y == 0]) > 0).float().mean()
    return (missed + suspected).item() / 2


@fault(
    "resume_incomplete",
    group="H",
    arch="gru",
    task="regression",
    sites=("optimizer", "(loop)", "scheduler"),
    also=("momentum_state_stale",),
    cascade=("loss_spike",),
    onset=51,
    well=0.5,
    ill=20,
)
def checkpoint_with_the_weights_only(attach, fixed):
    """A job is cut off and starts again from its checkpoint, in which only the weights are restored."""
    past, target = series()
    loader = forever(DataLoader(Records(past=past, target=target), batch_size=45, shuffle=True))

    def build():
        net = nn.ModuleDict({"gru": nn.GRU(1, 16, batch_first=True), "out": nn.Linear(16, 1)})
        return net, torch.optim.Adam(net.parameters(), lr=5e-3)

    def train(net, optimizer, session, steps):
        for batch in islice(loader, steps):
            loss = mse_loss(net["out"](net["gru"](batch["past"])[1][-1]), batch["target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)

    net, optimizer = build()
    train(net, optimizer, attach(net, optimizer), 50)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    saved = torch.load(file)
    net, optimizer = build()
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"]) if fixed else None
    train(net, optimizer, attach(net, optimizer, resume=True), 50)
    counted = max(state["step"].item() for state in optimizer.state.values())
    return 100 - counted
