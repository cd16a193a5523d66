"""Group D: initialisation, activations and the flow of gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, rings, sentences, waves
from fault_programs.dev.models import Perceptron, SmallCNN
from fault_programs.registry import fault


@fault(
    "dead_relu",
    group="D",
    arch="cnn",
    task="classification",
    sites=("features", "classifier"),
    exact=False,
    cascade=("vanishing_gradient", "constant_output", "not_learning", "graph_break_detach"),
    well=0.3,
    ill=0.7,
)
def kills_rectifiers_with_a_bias(attach, fixed):
    """The biases before the second rectifier start so low that no unit ever fires."""
    x, y, test_x, test_y = images()
    model = SmallCNN()
    nn.init.constant_(model.features[3].bias, 0.0 if fixed else -20.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(3):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "saturated_activation",
    also=("bad_init_scale",),
    group="D",
    arch="mlp",
    task="classification",
    sites=("net.1", "net.3", "net.0", "net.2"),
    exact=False,
    cascade=("vanishing_gradient",),
    well=0.08,
    ill=0.12,
)
def saturates_tanh(attach, fixed):
    """Weights start so large that tanh sits at its ends."""
    x, y, test_x, test_y = digits()
    model = nn.Module()
    model.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    for layer in (model.net[0], model.net[2]):
        nn.init.normal_(layer.weight, std=0.12 if fixed else 5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(4):
        for xb, yb in batches(x, y):
            loss = criterion(model.net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model.net, test_x, test_y)


@fault(
    "vanishing_gradient",
    group="D",
    arch="mlp",
    task="classification",
    sites=("0", "2", "4", "6"),
    exact=False,
    cascade=("not_learning", "loss_plateau", "constant_output"),
    well=0.3,
    ill=0.6,
)
def ten_sigmoids_deep(attach, fixed):
    """Ten sigmoid layers: next to nothing reaches the first."""
    x, y, test_x, test_y = digits()
    layers = [nn.Linear(64, 32)]
    for _ in range(9):
        layers += [nn.ReLU() if fixed else nn.Sigmoid(), nn.Linear(32, 32)]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session = attach(model, optimizer)
    for _ in range(6):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return error_rate(model, test_x, test_y)


class Unrolled(nn.Module):
    """A recurrent net written out by hand."""

    def __init__(self, gain):
        super().__init__()
        self.input, self.hidden, self.head = nn.Linear(1, 24), nn.Linear(24, 24, bias=False), nn.Linear(24, 4)
        nn.init.orthogonal_(self.hidden.weight, gain=gain)

    def forward(self, x):
        h = total = x.new_zeros(len(x), 24)
        for t in range(x.shape[1]):
            h = F.relu(self.input(x[:, t]) + self.hidden(h))
            total = total + h
        return self.head(total / x.shape[1])


@fault(
    "exploding_gradient",
    also=("bad_init_scale",),
    group="D",
    arch="rnn",
    task="classification",
    sites=("hidden", "input"),
    exact=False,
    well=0.1,
    ill=0.25,
    cascade=(
        "lr_too_high",
        "exploding_activation",
        "large_initial_loss",
        "nan_forward",
        "nan_backward",
        "dead_relu",
        "loss_divergence",
    ),
)
def explodes_through_time(attach, fixed):
    """The recurrent matrix doubles what passes through it, over twenty steps of time."""
    x, y = waves()
    model = Unrolled(1.0 if fixed else 2.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(10):
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, x, y)


@fault(
    "symmetric_init",
    group="D",
    arch="mlp",
    task="classification",
    sites=("fc",),
    well=0.15,
    ill=0.4,
    cascade=("not_learning", "bad_init_scale"),
)
def starts_all_units_alike(attach, fixed):
    """Every weight starts at 0.02, so all units of a layer stay the same."""
    x, y, test_x, test_y = digits()
    model = Perceptron()
    for layer in (model.fc1, model.fc2, model.fc3):
        nn.init.xavier_uniform_(layer.weight) if fixed else nn.init.constant_(layer.weight, 0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


class Adapter(nn.Module):
    """A low-rank correction beside a frozen layer."""

    def __init__(self, base, rank, random_down):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1 * random_down)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2 * x @ self.down.T @ self.up.T


@fault(
    "zero_init_blocked",
    group="D",
    arch="mlp",
    task="classification",
    sites=("adapter1", "adapter2"),
    cascade=("not_learning", "loss_plateau", "optimizer_step_noop", "lr_too_low"),
    well=0.3,
    ill=0.5,
)
def both_adapter_factors_zero(attach, fixed):
    """Both factors of an adapter start at zero, so neither gets a gradient."""
    x, y, test_x, test_y = digits()
    model = nn.Sequential()
    model.add_module("adapter1", Adapter(nn.Linear(64, 64), 8, float(fixed)))
    model.add_module("relu", nn.ReLU())
    model.add_module("adapter2", Adapter(nn.Linear(64, 10), 8, 0.0 if model.adapter1.down.abs().sum() == 0 else 1.0))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@fault(
    "linear_stack",
    group="D",
    arch="mlp",
    task="classification",
    sites=("0", "1", "2", "3", "4"),
    well=0.15,
    ill=0.3,
    cascade=("not_learning", "loss_plateau", "underfitting"),
)
def forgets_the_activations(attach, fixed):
    """Three linear layers with nothing between them cannot tell rings apart."""
    x, y = rings()

    def between():
        return nn.ReLU() if fixed else nn.Identity()

    model = nn.Sequential(nn.Linear(2, 32), between(), nn.Linear(32, 32), between(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            out = model(xb)
            loss = criterion(out, yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss, accuracy=(out.argmax(1) == yb).float().mean().item())
    return error_rate(model, x, y)


@fault(
    "constant_output",
    also=("norm_on_wrong_dim",),
    group="D",
    arch="mlp",
    task="regression",
    sites=("norm", "out"),
    cascade=("vanishing_gradient", "not_learning", "loss_plateau"),
    well=0.4,
    ill=0.8,
)
def normalises_a_single_number(attach, fixed):
    """A layer norm over one feature makes every output the same."""
    x, y = houses()
    model = nn.Sequential()
    model.add_module("inp", nn.Linear(8, 32))
    model.add_module("act", nn.SiLU())
    model.add_module("out", nn.Linear(32, 1))
    model.add_module("norm", nn.Identity() if fixed else nn.LayerNorm(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    criterion = nn.MSELoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb).squeeze(-1), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(x).squeeze(-1), y).item()


class Pooled(nn.Module):
    """Self-attention that keeps its weights, then a mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, ids):
        x = self.embed(ids)
        out, self.weights = self.attn(x, x, x, average_attn_weights=False)
        return self.mlp(out.mean(1))


@fault(
    "attention_entropy_collapse",
    also=("bad_init_scale",),
    group="D",
    arch="transformer",
    task="classification",
    sites=("attn",),
    exact=False,
    cascade=("exploding_gradient", "vanishing_gradient"),
    well=0.5,
    ill=0.7,
)
def sharpens_attention_to_one_token(attach, fixed):
    """Query and key weights start so large that each position looks at one other only."""
    ids, _, y = sentences()
    model = Pooled()
    with torch.no_grad():
        model.attn.in_proj_weight[:64] *= 1.0 if fixed else 20.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _ in range(6):
        for xb, yb in batches(ids, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    entropy = -(model.weights * model.weights.clamp_min(1e-9).log()).sum(-1).mean() / torch.tensor(12.0).log()
    return 1 - entropy.item()
