"""Group G: data and loaders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, waves
from fault_programs.dev.models import Perceptron, Recurrent, SmallCNN, TinyResNet
from fault_programs.registry import fault

DATA = ("loader", "(loop)", "loss_fn", "(model)")


@fault(
    "label_shuffle_mismatch",
    group="G",
    arch="cnn",
    task="classification",
    sites=DATA,
    exact=False,
    cascade=("not_learning", "loss_plateau"),
    well=0.2,
    ill=0.7,
)
def shuffles_labels_apart(attach, fixed):
    """Inputs and labels are shuffled by two different permutations."""
    x, y, test_x, test_y = images()
    order = torch.randperm(len(x))
    x, y = x[order], y[order if fixed else torch.randperm(len(y))]
    model = SmallCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    loader = batches(x, y)
    session = attach(model, optimizer, loss_fn=criterion, loader=loader)
    for _ in range(8):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "unnormalised_inputs",
    group="G",
    arch="mlp",
    task="regression",
    sites=DATA,
    cascade=(
        "lr_too_high",
        "dead_relu",
        "exploding_gradient",
        "saturated_activation",
        "loss_divergence",
        "exploding_activation",
        "large_initial_loss",
        "not_learning",
    ),
    well=0.4,
    ill=0.6,
)
def mixes_euros_and_metres(attach, fixed):
    """One column is in the ten thousands, another below one."""
    x, y = houses()
    units = torch.tensor([1.0, 2.0, 0.5, 1.0, 3e4, 10.0, 1.0, 500.0])
    x = x if fixed else x * units + units * 2
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(x).squeeze(1), y).item()


@fault(
    "sorted_labels",
    also=("not_shuffled",),
    group="G",
    arch="resnet",
    task="classification",
    sites=DATA,
    onset=5,
    cascade=("loss_oscillation", "loss_spike"),
    well=0.2,
    ill=0.4,
)
def reads_classes_in_order(attach, fixed):
    """The files are sorted by class and the loader does not shuffle."""
    x, y, test_x, test_y = images()
    order = y.argsort()
    loader = batches(x[order], y[order], shuffle=fixed)
    model = TinyResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session = attach(model, optimizer, loader=loader)
    for _ in range(4):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "same_batch_every_step",
    group="G",
    arch="mlp",
    task="classification",
    sites=DATA,
    onset=2,
    well=0.08,
    ill=0.1,
    cascade=("overfitting",),
)
def starts_the_loader_anew(attach, fixed):
    """next(iter(loader)) in the loop returns the first batch for ever."""
    x, y, test_x, test_y = digits()
    loader = batches(x, y, shuffle=False)
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer, loader=loader)
    stream = iter([])
    for _ in range(92):
        xb, yb = next(stream, (None, None)) if fixed else next(iter(loader))
        if xb is None:
            stream = iter(loader)
            xb, yb = next(stream)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return error_rate(model, test_x, test_y)


class Stream(IterableDataset):
    """Reads batches one after the other."""

    def __init__(self, x, y, shares):
        self.x, self.y, self.shares = x, y, shares

    def __iter__(self):
        worker = get_worker_info()
        start, stride = (worker.id, worker.num_workers) if worker and self.shares else (0, 1)
        for number in range(start, len(self.x) // 32, stride):
            yield self.x[number * 32 : number * 32 + 32], self.y[number * 32 : number * 32 + 32]


@fault("duplicate_data_workers", group="G", arch="mlp", task="classification", sites=DATA, onset=2, well=1.0, ill=1.9)
def workers_read_the_same(attach, fixed):
    """Each of two workers streams the whole dataset."""
    x, y, *_ = digits()
    loader = DataLoader(Stream(x, y, fixed), batch_size=None, num_workers=2, multiprocessing_context="fork")
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = attach(model, optimizer, loader=loader)
    seen = set()
    count = 0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        seen.add(xb.numpy().tobytes())
        count += 1
    return count / len(seen)


@fault(
    "target_scale",
    group="G",
    arch="mlp",
    task="regression",
    sites=DATA,
    well=0.4,
    ill=0.8,
    cascade=("lr_too_low", "not_learning", "large_initial_loss", "exploding_gradient"),
)
def prices_in_cents(attach, fixed):
    """Targets in the hundred thousands, with outputs that start near zero."""
    x, y = houses()
    target = y if fixed else y * 8e4 + 3e5
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = nn.MSELoss()
    session = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(8):
        for xb, yb in batches(x, target):
            optimizer.zero_grad()
            loss = loss_fn(model(xb).squeeze(1), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return (F.mse_loss(model(x).squeeze(1), target) / target.var()).item()


@fault(
    "train_val_preproc_mismatch",
    group="G",
    arch="resnet",
    task="classification",
    sites=DATA,
    onset=24,
    cascade=("overfitting",),
    well=0.2,
    ill=0.4,
)
def forgets_to_scale_validation(attach, fixed):
    """Training images are standardised, validation images are 0 to 16."""
    x, y, test_x, test_y = images()
    test_x = test_x if fixed else test_x * 6.017 + 4.884
    model = TinyResNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    val_loss = None
    for _ in range(4):
        model.train()
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            val_loss = criterion(model(test_x), test_y)
        session.log(val_loss=val_loss)
    return val_loss.item()


@fault(
    "double_normalised",
    also=("constant_feature", "unnormalised_inputs"),
    group="G",
    arch="lstm",
    task="classification",
    sites=DATA,
    cascade=("not_learning", "vanishing_gradient", "lr_too_low", "constant_output"),
    well=0.35,
    ill=0.5,
)
def divides_by_255_twice(attach, fixed):
    """Inputs are scaled twice and hardly vary any more."""
    x, y = waves()
    x = x if fixed else x / 255 / 255
    model = Recurrent(nn.LSTM)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, x, y)
