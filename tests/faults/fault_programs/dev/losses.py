"""Group B: mistakes in the loss and in what is handed to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, rings, sentences, waves
from fault_programs.dev.models import AutoEncoder, Perceptron, SmallCNN
from fault_programs.registry import fault

LOSS = ("loss_fn", "(loop)")


@fault("double_softmax", group="B", arch="cnn", task="classification", sites=("loss_fn", "2"), well=0.6, ill=1.4)
def softmax_before_cross_entropy(attach, fixed):
    """The model ends in a softmax, and cross entropy takes another."""
    x, y, test_x, test_y = images()
    model = nn.Sequential(SmallCNN(), nn.Flatten(), nn.Identity() if fixed else nn.Softmax(dim=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return criterion(model(test_x), test_y).item()


@fault("double_sigmoid", group="B", arch="mlp", task="classification", sites=("loss_fn", "4"), well=0.25, ill=0.32)
def sigmoid_before_bce_with_logits(attach, fixed):
    """The outputs are probabilities already, and the loss takes a sigmoid of them again."""
    x, y = rings()
    model = nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0)
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    loss = None
    for _ in range(8):
        for xb, yb in batches(x, y):
            out = model(xb)
            out = out if fixed else out.sigmoid()
            loss = F.binary_cross_entropy_with_logits(out, yb.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return loss.item()


@fault(
    "logits_into_prob_loss",
    also=("loss_sign_flipped",),
    group="B",
    arch="lstm",
    task="classification",
    sites=LOSS,
    cascade=("exploding_activation", "logit_drift", "loss_divergence"),
    well=0.5,
    ill=5.0,
)
def logits_into_nll(attach, fixed):
    """NLLLoss is given logits where it wants log-probabilities, and falls for ever."""
    x, y = waves()
    rnn, head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 4)
    net = nn.ModuleDict({"rnn": rnn, "head": head})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    criterion = nn.NLLLoss()
    session = attach(net, optimizer, loss_fn=criterion)
    wrong = 1.0
    for _ in range(8):
        for xb, yb in batches(x, y):
            logits = head(rnn(xb)[0].mean(1))
            scores = F.log_softmax(logits, dim=1) if fixed else logits
            loss = criterion(scores, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
            wrong = (logits.argmax(1) != yb).float().mean().item() + max(0.0, -loss.item())
    return wrong


@fault(
    "wrong_loss_reduction",
    group="B",
    arch="mlp",
    task="regression",
    sites=LOSS,
    cascade=("lr_too_high", "exploding_gradient", "loss_divergence", "nan_forward", "nan_backward", "dead_relu"),
    well=0.4,
    ill=0.7,
)
def sums_the_loss(attach, fixed):
    """The loss is summed over the batch, so the step is 64 times as long as meant."""
    x, y = houses()
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.MSELoss(reduction="mean" if fixed else "sum")
    session = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(xb), yb[:, None])
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return F.mse_loss(model(x), y[:, None]).item()


@fault(
    "accumulation_not_scaled",
    group="B",
    arch="cnn",
    task="classification",
    sites=LOSS,
    cascade=("lr_too_high", "dead_relu", "exploding_gradient"),
    well=0.25,
    ill=0.5,
)
def accumulates_without_dividing(attach, fixed):
    """Eight losses are added up per step and none is divided by eight."""
    x, y, test_x, test_y = images()
    model = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    accumulate = 8
    optimizer.zero_grad()
    for epoch in range(6):
        for i, (xb, yb) in enumerate(batches(x, y, size=16)):
            loss = criterion(model(xb), yb)
            (loss / (accumulate if fixed else 1)).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                session.log(loss=loss, epoch=epoch)
    return error_rate(model, test_x, test_y)


@fault(
    "broadcast_loss",
    group="B",
    arch="mlp",
    task="regression",
    sites=LOSS,
    cascade=("constant_output", "not_learning", "loss_plateau"),
    well=0.4,
    ill=0.8,
)
def broadcasts_the_target(attach, fixed):
    """A column of outputs meets a row of targets, and all pairs are compared."""
    x, y = houses()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    criterion = nn.MSELoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        for xb, yb in batches(x, y):
            loss = criterion(model(xb), yb.unsqueeze(1) if fixed else yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(x).squeeze(1), y).item()


@fault(
    "wrong_dim_softmax",
    group="B",
    arch="mlp",
    task="classification",
    sites=LOSS,
    cascade=("not_learning", "loss_plateau"),
    well=0.6,
    ill=2.0,
)
def softmax_over_the_batch(attach, fixed):
    """log_softmax runs over the samples instead of the classes."""
    x, y, *_ = digits()
    model = Perceptron()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=3e-2)
    session = attach(model, optimizer)
    loss = None
    for _ in range(4):
        for xb, yb in batches(x, y, drop_last=True):
            logp = F.log_softmax(model(xb), dim=1 if fixed else 0)
            loss = F.nll_loss(logp, yb)
            model.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return loss.item()


class Normal(nn.Module):
    """Predicts a mean and the logarithm of a variance."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.mean, self.log_var = nn.Linear(32, 1), nn.Linear(32, 1)

    def log_prob(self, x, y):
        h = self.body(x)
        mean, log_var = self.mean(h).squeeze(1), self.log_var(h).squeeze(1)
        return -0.5 * (log_var + (y - mean) ** 2 * torch.exp(-log_var))

    forward = log_prob


@fault(
    "loss_sign_flipped",
    group="B",
    arch="mlp",
    task="regression",
    sites=LOSS,
    cascade=("loss_divergence", "exploding_activation", "exploding_gradient", "nan_forward", "nan_backward"),
    exact=False,
    onset=1,
    well=1.0,
    ill=2.0,
)
def minimises_the_likelihood(attach, fixed):
    """The likelihood is minimised: the loss falls without end and the fit gets worse."""
    x, y = houses()
    model = Normal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    session = attach(model, optimizer)
    for _ in range(6):
        for xb, yb in batches(x, y):
            log_prob = model(xb, yb).mean()
            loss = -log_prob if fixed else log_prob
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            fit = F.mse_loss(model.mean(model.body(x[:256])).squeeze(1).detach(), y[:256])
            session.log(loss=loss, mse=fit)
    return F.mse_loss(model.mean(model.body(x)).squeeze(1), y).item()


@fault(
    "large_initial_loss",
    also=("bad_init_scale",),
    group="B",
    arch="mlp",
    task="classification",
    sites=("fc3", "loss_fn"),
    cascade=("exploding_gradient",),
    well=4.0,
    ill=10.0,
)
def starts_with_a_huge_head(attach, fixed):
    """The last layer is initialised far too large: the loss starts at many times ln 10."""
    x, y, *_ = digits()
    model = Perceptron()
    nn.init.normal_(model.fc3.weight, std=0.1 if fixed else 10.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    first = None
    for _ in range(4):
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first = loss.item() if first is None else first
            session.log(loss=loss)
    return first


@fault(
    "output_range_mismatch",
    group="B",
    arch="autoencoder",
    task="reconstruction",
    sites=("loss_fn", "decoder"),
    well=0.35,
    ill=0.5,
)
def sigmoid_for_signed_targets(attach, fixed):
    """The decoder ends in a sigmoid, the targets are standardised and often negative."""
    x, _, test, _ = digits()
    model = AutoEncoder()
    model.decoder.append(nn.Identity() if fixed else nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = nn.MSELoss()
    session = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(5):
        for (xb,) in batches(x):
            optimizer.zero_grad()
            loss = loss_fn(model(xb), xb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(test), test).item()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 24, padding_idx=0)
        self.rnn = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, 2)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@fault(
    "ignore_index_all",
    also=("empty_target",),
    group="B",
    arch="gru",
    task="tagging",
    sites=LOSS,
    cascade=("nan_forward", "nan_backward"),
    onset=30,
    well=0.3,
    ill=2.0,
)
def meets_a_batch_without_targets(attach, fixed):
    """Some batches have padding only, and the mean over no targets is NaN."""
    ids, _, _ = sentences()
    tags = torch.where(ids == 0, -100, ids % 2)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    broken, loss = 0, None
    for step in range(1, 81):
        rows = torch.randint(0, len(ids), (32,))
        xb, yb = ids[rows], tags[rows]
        if step % 30 == 0:
            yb = yb if fixed else torch.full_like(yb, -100)
        loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        broken += not loss.isfinite()
    return broken + loss.item()
