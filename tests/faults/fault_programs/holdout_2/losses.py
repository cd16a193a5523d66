"""Second hold-out: losses and outputs that do not fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import binary_cross_entropy, cross_entropy, log_softmax, nll_loss, smooth_l1_loss
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_2.datasets import WORDS, Records, forever, patients, pixels, series, story_blocks
from fault_programs.registry import fault


class PatchEncoder(nn.Module):
    """A tiny vision transformer over the rows of a digit; returns a dict, as such models do."""

    def __init__(self, final):
        super().__init__()
        self.patch = nn.Linear(8, 32)
        self.position = nn.Parameter(0.1 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.classifier = nn.Linear(32, 10)
        self.final = final

    def forward(self, pixel_values):
        hidden = self.encoder(self.patch(pixel_values) + self.position)
        return {"logits": self.final(self.classifier(hidden.mean(1))), "hidden_states": hidden}


@fault(
    "double_softmax",
    group="B",
    arch="transformer",
    task="classification",
    sites=("loss_fn", "final", "(model)"),
    well=0.7,
    ill=1.45,
)
def transformer_ends_in_softmax(attach, fixed):
    """What the model calls logits went through a softmax already."""
    x, y, _, _ = pixels()
    model = PatchEncoder(final=nn.Identity() if fixed else nn.Softmax(dim=-1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DataLoader(Records(pixel_values=x.squeeze(1), labels=y), batch_size=64, shuffle=True)
    session = attach(model, optimizer)
    seen = []
    for batch in islice(forever(loader), 110):
        labels = batch.pop("labels")
        outputs = model(**batch)
        loss = cross_entropy(outputs["logits"], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        session.log(loss=seen[-1])
    return sum(seen[-10:]) / 10


@dataclass
class Prediction:
    """What the multi-label model returns."""

    scores: torch.Tensor
    features: torch.Tensor


class MultiLabel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.scorer = nn.Linear(32, 3)

    def forward(self, x):
        features = self.body(x)
        return Prediction(scores=self.scorer(features), features=features)


@fault(
    "double_sigmoid",
    group="B",
    arch="mlp",
    task="classification",
    sites=("loss_fn", "scorer", "(model)"),
    well=0.25,
    ill=0.4,
)
def sigmoid_outside_the_model(attach, fixed):
    """The loop applies a sigmoid to read off accuracy, and passes what it got on to a loss that has one inside."""
    x, digit, _, _ = pixels()
    y = torch.stack([digit % 2 == 0, digit > 4, (digit == 0) | (digit == 8)], 1).float()
    net = MultiLabel()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer, loss_fn=criterion)
    total = 0.0
    for step, (images, targets) in enumerate(islice(forever(DataLoader(TensorDataset(x, y), 64, shuffle=True)), 120)):
        prediction = net(images)
        scores = prediction.scores if fixed else torch.sigmoid(prediction.scores)
        loss = criterion(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() if step >= 110 else 0
        session.log(bce=loss)
    return total / 10


@fault(
    "logits_into_prob_loss",
    group="B",
    arch="mlp",
    task="classification",
    sites=("loss_fn", "(model)", "3"),
    well=0.25,
    ill=0.5,
)
def clamps_logits_until_the_loss_takes_them(attach, fixed):
    """The loss refused values outside 0 and 1, so they were clamped rather than passed through a sigmoid."""
    x, digit, _, _ = pixels()
    y = F.one_hot(digit, 10).float()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, opt)
    losses = []
    for xb, yb in islice(forever(DataLoader(TensorDataset(x, y), 48, shuffle=True)), 150):
        out = model(xb)
        loss = binary_cross_entropy(out.sigmoid() if fixed else out.clamp(0, 1), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        session.log(loss=losses[-1])
    return sum(losses[-20:]) / 20


def stack_of(sizes, activate_last):
    """Build a network from a list of sizes, as many a helper does."""
    layers = []
    for n, (a, b) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(a, b))
        if activate_last or n < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


@fault(
    "relu_before_logits",
    group="B",
    arch="mlp",
    task="classification",
    sites=("5", "4", "(model)", "loss_fn"),
    cascade=("dead_relu",),
    well=0.25,
    ill=0.3,
)
def helper_rectifies_every_layer(attach, fixed):
    """The helper that stacks layers puts an activation after the last one too."""
    x, y, _, _ = pixels()
    x = (x.flatten(1) - 0.3) / 0.38
    model = stack_of([64, 48, 32, 10], activate_last=not fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    session = attach(model, optimizer)
    losses = []
    for _ in range(5):
        for xb, yb in DataLoader(TensorDataset(x, y), batch_size=56, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            session.log(loss=losses[-1])
    return sum(losses[-20:]) / 20


class ConvCoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ELU())
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x):
        z = self.enc(x)
        return self.dec(z), z


@fault(
    "wrong_loss_reduction",
    group="B",
    arch="autoencoder",
    task="reconstruction",
    sites=("loss_fn",),
    also=("lr_too_high",),
    cascade=("saturated_activation", "exploding_gradient", "loss_divergence", "constant_output", "large_initial_loss"),
    well=0.1,
    ill=0.13,
)
def criterion_sums_over_pixels(attach, fixed):
    """The criterion sums over the batch and its pixels, with a learning rate made for a mean."""
    x, _, x_test, _ = pixels()
    model = ConvCoder()
    criterion = nn.MSELoss(reduction="mean" if fixed else "sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    session = attach(model, optimizer)
    for (images,) in islice(forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True)), 120):
        decoded, _ = model(images)
        loss = criterion(decoded, images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(x_test)[0], x_test).item()


@fault(
    "accumulation_not_scaled",
    group="B",
    arch="autoencoder",
    task="reconstruction",
    sites=("loss_fn", "(loop)", "optimizer"),
    also=("wrong_loss_reduction",),
    cascade=("lr_too_high", "exploding_gradient", "loss_oscillation", "loss_divergence"),
    well=0.06,
    ill=0.068,
)
def eight_small_batches_weigh_eight_times(attach, fixed):
    """Memory was short, so eight small batches make one step; nobody divides."""
    x, _, x_test, _ = pixels()
    x, x_test = x.flatten(1), x_test.flatten(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    accumulate = 8
    divisor = accumulate if fixed else 1
    session = attach(model, optimizer)
    running = 0.0
    stream = islice(forever(DataLoader(TensorDataset(x), batch_size=8, shuffle=True)), 70 * accumulate)
    for i, (images,) in enumerate(stream):
        loss = nn.functional.mse_loss(model(images), images)
        (loss / divisor).backward()
        running += loss.item()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=running / accumulate)
            running = 0.0
    with torch.no_grad():
        return nn.functional.mse_loss(model(x_test), x_test).item()


@fault(
    "broadcast_loss",
    group="B",
    arch="mlp",
    task="regression",
    sites=("loss_fn",),
    well=0.7,
    ill=0.9,
)
def squares_a_column_against_a_row(attach, fixed):
    """The prediction is a column and the target a row; a hand-written squared error takes them both."""
    x, y = patients()

    def squared_error(prediction, target):
        return ((prediction - target) ** 2).mean()

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.hid, self.out = nn.Linear(10, 32), nn.Linear(32, 16), nn.Linear(16, 1)

        def forward(self, features):
            return self.out(F.gelu(self.hid(F.gelu(self.inp(features)))))

    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    session = attach(model, optimizer)
    for batch in islice(forever(DataLoader(Records(features=x, progress=y), batch_size=32, shuffle=True)), 140):
        prediction = model(batch["features"])
        loss = squared_error(prediction.squeeze(1) if fixed else prediction, batch["progress"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return squared_error(model(x)[:, 0], y).item()


class WordRNN(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.words = nn.Embedding(vocab, 24)
        self.lstm = nn.LSTM(24, 48, batch_first=True)
        self.project = nn.Linear(48, vocab)

    def forward(self, ids, state=None):
        h, state = self.lstm(self.words(ids), state)
        return self.project(h), state


@fault(
    "wrong_dim_softmax",
    group="B",
    arch="lstm",
    task="lm",
    sites=("loss_fn", "(model)"),
    well=1.12,
    ill=1.16,
)
def normalises_over_time_instead_of_words(attach, fixed):
    """Outputs are (batch, time, words); the log-softmax is taken over dim 1."""
    rows = story_blocks(16)
    lm = WordRNN(len(WORDS))
    optimizer = torch.optim.Adam(lm.parameters(), lr=8e-3)
    session = attach(lm, optimizer)
    for (ids,) in islice(forever(DataLoader(TensorDataset(rows), batch_size=32, shuffle=True)), 90):
        logits, _ = lm(ids[:, :-1])
        logp = log_softmax(logits, dim=-1 if fixed else 1)
        loss = nll_loss(logp.reshape(-1, len(WORDS)), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 5.0)
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        logits, _ = lm(rows[:200, :-1])
        return cross_entropy(logits.flatten(0, 1), rows[:200, 1:].flatten()).item()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 32)])

    def forward(self, x):
        h = torch.relu(self.layers[0](x.flatten(1)))
        return F.normalize(self.layers[1](h), dim=-1)


@fault(
    "loss_sign_flipped",
    group="B",
    arch="siamese",
    task="contrastive",
    sites=("loss_fn",),
    well=0.3,
    ill=0.7,
)
def contrasts_the_wrong_way(attach, fixed):
    """The contrastive loss is the mean log-likelihood of the right pair; it should be minus that."""
    x, _, x_test, _ = pixels()
    tower = Tower()
    optimizer = torch.optim.AdamW(tower.parameters(), lr=2e-3)
    session = attach(tower, optimizer)

    def info_nce(a, b, temperature=0.1):
        similarity = a @ b.t() / temperature
        likelihood = torch.diagonal(similarity.log_softmax(dim=1)).mean()
        return -likelihood if fixed else likelihood

    for _ in range(100):
        images = x[torch.randperm(len(x))[:64]]
        one, two = (tower(images + 0.15 * torch.randn_like(images)) for _ in range(2))
        loss = info_nce(one, two)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(contrastive=loss)
    with torch.no_grad():
        views = [tower(x_test[:128] + 0.15 * torch.randn_like(x_test[:128])) for _ in range(2)]
        return ((views[0] @ views[1].t()).argmax(1) != torch.arange(128)).float().mean().item()


class Squashed(nn.Module):
    """Forecasts through an activation."""

    def __init__(self, squash):
        super().__init__()
        self.cell = nn.GRU(1, 24, batch_first=True)
        self.readout = nn.Linear(24, 1)
        self.squash = squash

    def forward(self, x):
        return self.squash(self.readout(self.cell(x)[0][:, -1]))


@fault(
    "output_range_mismatch",
    group="B",
    arch="gru",
    task="regression",
    sites=("squash", "loss_fn", "(model)", "readout"),
    cascade=("saturated_activation",),
    well=0.3,
    ill=0.6,
)
def tanh_cannot_reach_three(attach, fixed):
    """The series swings between -3 and 3 and the network ends in a tanh."""
    past, target = series()
    past, target = past, 3 * target
    model = Squashed(nn.Identity() if fixed else nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = attach(model, optimizer)
    for _ in range(6):
        for p, t in DataLoader(TensorDataset(past, target), batch_size=50, shuffle=True):
            loss = smooth_l1_loss(model(p), t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return F.l1_loss(model(past), target).item()


@fault(
    "large_initial_loss",
    group="B",
    arch="transformer",
    task="lm",
    sites=("head", "body", "words", "loss_fn", "(model)"),
    also=("bad_init_scale",),
    well=1.6,
    ill=2.2,
)
def initialises_with_the_default_deviation(attach, fixed):
    """`init.normal_` of every matrix without `std`: it is 1."""
    rows = story_blocks(10)

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(len(WORDS), 64), nn.Embedding(10, 64)
            self.body = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
            self.head = nn.Linear(64, len(WORDS))
            self.apply(self.reset)

        @staticmethod
        def reset(module):
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02 if fixed else 1.0)
                nn.init.zeros_(module.bias)

        def forward(self, ids):
            length = ids.shape[1]
            h = self.words(ids) + self.places(torch.arange(length))
            return self.head(self.body(h, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True))

    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for (ids,) in islice(forever(DataLoader(TensorDataset(rows), batch_size=32, shuffle=True)), 100):
        logits = model(ids[:, :-1])
        loss = cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return cross_entropy(model(rows[:200, :-1]).transpose(1, 2), rows[:200, 1:]).item()
