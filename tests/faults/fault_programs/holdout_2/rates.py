"""Second hold-out: learning rates, clipping, signals that die on their way, and modes."""

from __future__ import annotations

from itertools import islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_2.datasets import Records, forever, moons, pixels, series, wines
from fault_programs.registry import fault


class RowReader(nn.Module):
    """Reads the rows of a digit like words."""

    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 9, dim) * 0.1)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True), depth
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 10))

    def forward(self, rows):
        x = torch.cat([self.cls.expand(len(rows), -1, -1), self.inp(rows)], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


@fault(
    "lr_too_high",
    group="C",
    arch="transformer",
    task="classification",
    sites=("optimizer",),
    exact=False,
    cascade=(
        "loss_oscillation",
        "not_learning",
        "constant_output",
        "loss_plateau",
        "dead_relu",
        "exploding_activation",
    ),
    well=0.3,
    ill=0.6,
)
def adam_with_the_rate_of_sgd(attach, fixed):
    """The optimizer was changed from SGD to Adam and the rate of 0.1 was kept."""
    x, y, x_test, y_test = pixels()
    model = RowReader(depth=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3 if fixed else 0.1)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    model.train()
    for images, labels in islice(forever(DataLoader(TensorDataset(x.squeeze(1), y), 64, shuffle=True)), 120):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return (model(x_test.squeeze(1)).argmax(1) != y_test).float().mean().item()


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(96, 10),
    )


@torch.no_grad()
def errors(model, x, y):
    model.eval()
    wrong = (model(x).argmax(1) != y).float().mean().item()
    model.train()
    return wrong


@fault(
    "lr_too_low",
    group="C",
    arch="cnn",
    task="classification",
    sites=("optimizer",),
    exact=False,
    cascade=("not_learning", "loss_plateau", "underfitting"),
    well=0.2,
    ill=0.6,
)
def rate_copied_from_fine_tuning(attach, fixed):
    """A rate made for fine-tuning a large model trains a small one from scratch."""
    x, y, x_test, y_test = pixels()
    model = small_cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if fixed else 5e-7, weight_decay=0.01)
    session = attach(model, optimizer)
    for epoch in range(5):
        session.epoch(epoch)
        for images, labels in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss)
        session.log(val_error=errors(model, x_test, y_test))
    return errors(model, x_test, y_test)


@fault(
    "lr_schedule_collapse",
    group="C",
    arch="lstm",
    task="regression",
    sites=("scheduler", "optimizer"),
    cascade=("lr_too_low", "not_learning", "loss_plateau"),
    onset=6,
    well=0.08,
    ill=0.15,
)
def counts_epochs_where_steps_are_meant(attach, fixed):
    """The linear decay is told the number of epochs as its number of steps."""
    past, target = series()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(1, 20, num_layers=2, batch_first=True)
            self.linear = nn.Linear(20, 1)

        def forward(self, x):
            return self.linear(self.rnn(x)[0][:, -1])

    net, epochs = Net(), 6
    loader = DataLoader(Records(inputs=past, labels=target), batch_size=45, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    total = epochs * (len(loader) if fixed else 1)
    scheduler = LambdaLR(optimizer, lambda done: max(0.0, 1.0 - done / total))
    session = attach(net, optimizer, scheduler=scheduler)
    for _ in range(epochs):
        for batch in loader:
            loss = F.mse_loss(net(batch["inputs"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss, lr=scheduler.get_last_lr()[0])
    with torch.no_grad():
        return F.mse_loss(net(past), target).item()


@fault(
    "clip_always_active",
    group="C",
    arch="mlp",
    task="classification",
    sites=("optimizer", "(loop)"),
    exact=False,
    cascade=("lr_too_low", "not_learning", "underfitting"),
    well=0.4,
    ill=0.7,
)
def clips_to_a_hundredth(attach, fixed):
    """A clip of 0.01 on gradients of norm one: SGD crawls."""
    x, y = wines()
    model = nn.Sequential(nn.Linear(13, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer)
    losses = []
    for xb, yb in islice(forever(DataLoader(TensorDataset(x, y), 32, shuffle=True)), 160):
        optimizer.zero_grad()
        loss = cross_entropy(model(xb), yb)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=5.0 if fixed else 0.01)
        optimizer.step()
        losses.append(loss.item())
        session.log(loss=loss, grad_norm=norm)
    return sum(losses[-20:]) / 20


@fault(
    "dead_relu",
    group="D",
    arch="cnn",
    task="classification",
    sites=("conv1", "conv2", "act1", "act2", "relu", "(model)"),
    also=("bad_init_scale",),
    exact=False,
    cascade=("constant_output", "not_learning", "vanishing_gradient", "loss_plateau", "graph_break_detach"),
    well=0.2,
    ill=0.6,
)
def mean_and_deviation_swapped(attach, fixed):
    """`normal_(weight, mean, std)` with a negative mean: pixels are never negative, so nothing ever fires."""
    x, y, x_test, y_test = pixels()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.act1 = nn.ReLU()
            self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
            self.act2 = nn.ReLU()
            self.fc = nn.Linear(256, 10)
            nn.init.normal_(self.conv1.weight, 0.0 if fixed else -0.5, 0.1)
            nn.init.constant_(self.conv1.bias, -0.01)

        def forward(self, x):
            return self.fc(self.act2(self.conv2(self.act1(self.conv1(x)))).flatten(1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for images, labels in islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True)), 90):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return errors(model, x_test, y_test)


class Deep(nn.Module):
    def __init__(self, depth, reset):
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(depth)])
        self.head = nn.Linear(32, 10)
        for layer in self.layers:
            reset(layer.weight)

    def forward(self, x):
        h = torch.tanh(self.stem(x.flatten(1)))
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.head(h)


@fault(
    "vanishing_gradient",
    group="D",
    arch="mlp",
    task="classification",
    sites=("stem", "layers", "(model)"),
    exact=False,
    also=("bad_init_scale",),
    cascade=("constant_output", "not_learning", "loss_plateau", "dead_relu"),
    well=0.2,
    ill=0.6,
)
def twelve_layers_of_small_weights(attach, fixed):
    """Each of twelve layers starts with weights of 0.02, as large transformers do, and has no shortcut to carry it."""
    x, y, x_test, y_test = pixels()
    model = Deep(12, nn.init.orthogonal_ if fixed else lambda weight: nn.init.normal_(weight, std=0.02))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    session = attach(model, optimizer)
    for xb, yb in islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True)), 110):
        loss = cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return errors(model, x_test, y_test)


class HandMade(nn.Module):
    """Matrices by hand, as in a course."""

    def __init__(self, first):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(first), nn.Parameter(torch.zeros(24))
        self.w2, self.b2 = nn.Parameter(torch.full((24, 2), 0.1)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return torch.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


@fault(
    "symmetric_init",
    group="D",
    arch="mlp",
    task="classification",
    sites=("w1", "w2", "(model)"),
    well=0.06,
    ill=0.09,
)
def fills_the_first_matrix(attach, fixed):
    """By hand: the first matrix is filled with one number, and so all hidden units stay one unit."""
    x, y = moons()
    model = HandMade(torch.randn(2, 24) if fixed else torch.full((2, 24), 0.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    session = attach(model, optimizer)
    for _ in range(180):
        rows = torch.randint(0, len(x), (100,))
        loss = cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return errors(model, x, y)


class Experts(nn.Module):
    """A mixture of experts whose matrices are stacked by hand."""

    def __init__(self, count, inputs, hidden, scale):
        super().__init__()
        self.gate = nn.Linear(inputs, count)
        self.up = nn.Parameter(torch.randn(count, inputs, hidden) * scale)
        self.act = nn.Tanh()
        self.down = nn.Linear(hidden, 10)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        hidden = self.act(torch.einsum("bi,eih->beh", x, self.up))
        return self.down((weights[..., None] * hidden).sum(1)), weights


@fault(
    "saturated_activation",
    group="D",
    arch="moe",
    task="classification",
    sites=("act", "up", "(model)"),
    also=("bad_init_scale",),
    exact=False,
    cascade=("vanishing_gradient", "not_learning"),
    well=0.12,
    ill=0.2,
)
def experts_without_a_fan_in(attach, fixed):
    """The experts' matrices are drawn by hand, far too large for the number of their inputs."""
    x, y, x_test, y_test = pixels()
    mean, deviation = x.flatten(1).mean(), x.flatten(1).std()
    x, x_test = ((images.flatten(1) - mean) / deviation for images in (x, x_test))
    model = Experts(3, 64, 24, scale=0.125 if fixed else 2.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for xb, yb in islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True)), 110):
        logits, weights = model(xb)
        balance = 3 * weights.mean(0).square().sum()
        loss = cross_entropy(logits, yb) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, balance=balance)
    with torch.no_grad():
        return (model(x_test)[0].argmax(1) != y_test).float().mean().item()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 24, nonlinearity="relu", batch_first=True)
        self.last = nn.Linear(24, 1)
        nn.init.eye_(self.rnn.weight_hh_l0)

    def forward(self, x):
        return self.last(self.rnn(x)[0][:, -1])


@fault(
    "exploding_gradient",
    group="D",
    arch="rnn",
    task="regression",
    sites=("rnn", "optimizer", "(model)", "(loop)"),
    also=("lr_too_high",),
    exact=False,
    cascade=("loss_spike", "loss_divergence", "exploding_activation", "nan_forward", "dead_relu"),
    well=0.3,
    ill=0.4,
)
def recurrent_rectifiers_without_a_clip(attach, fixed):
    """A rectified recurrent network that adds up over time, without the clip that such networks need."""
    past, target = series()
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    limit = 0.5 if fixed else float("inf")
    session = attach(model, optimizer)
    for inputs, wanted in islice(forever(DataLoader(TensorDataset(past, target), batch_size=30, shuffle=True)), 140):
        loss = F.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        session.log(loss=loss, grad_norm=norm)
    with torch.no_grad():
        return F.mse_loss(model(past), target).item()


@fault(
    "eval_mode_in_training",
    group="E",
    arch="cnn",
    task="classification",
    sites=("(model)", "1", "0", "4", "5", "9", "(loop)"),
    cascade=("unnormalised_inputs", "batchnorm_stats_stale", "lr_too_high", "exploding_activation"),
    well=0.15,
    ill=0.2,
)
def phases_by_another_name(attach, fixed):
    """The loop over phases asks whether the phase is called "training"; it is called "train"."""
    x, y, x_test, y_test = pixels()
    data = {
        "train": DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True),
        "val": DataLoader(TensorDataset(x_test, y_test), batch_size=64),
    }
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(3):
        for phase in ("train", "val"):
            model.train(phase == ("train" if fixed else "training"))
            wrong = 0
            for inputs, labels in data[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        session.log(loss=loss)
                wrong += (outputs.argmax(1) != labels).sum().item()
            session.log(**{f"{phase}_error": wrong / len(data[phase].dataset)})
    return wrong / len(x_test)


@fault(
    "train_mode_in_eval",
    group="E",
    arch="mlp",
    task="classification",
    sites=("(model)", "(loop)", "norm", "drop", "net"),
    onset=22,
    well=0.12,
    ill=0.15,
)
def tests_with_dropout_on(attach, fixed):
    """The test loop turns gradients off, and dropout not."""
    x, y, x_test, y_test = pixels()

    class Learner:
        def __init__(self):
            self.net = nn.Sequential(
                nn.Flatten(),
                nn.Linear(64, 96),
                nn.BatchNorm1d(96),
                nn.ReLU(),
                nn.Dropout(0.6),
                nn.Linear(96, 96),
                nn.ReLU(),
                nn.Dropout(0.6),
                nn.Linear(96, 10),
            )
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
            self.session = attach({"net": self.net}, self.optimizer)

        def fit(self, epochs):
            for _ in range(epochs):
                self.net.train()
                for images, labels in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
                    loss = cross_entropy(self.net(images), labels)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(loss=loss)
                self.session.log(test_error=self.test())
            return self.test()

        def test(self):
            self.net.train(not fixed)
            with torch.no_grad():
                batches = zip(x_test.split(8), y_test.split(8), strict=True)
                wrong = sum((self.net(images).argmax(1) != labels).sum().item() for images, labels in batches)
            return wrong / len(x_test)

    return Learner().fit(5)
