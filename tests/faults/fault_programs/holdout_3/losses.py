"""Third hold-out: losses, outputs and what is fed to them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import huber_loss

from fault_programs.holdout_3.datasets import digits, draw, houses, sentences, shapes, walk
from fault_programs.registry import fault


class Segmenter(nn.Module):
    """A little U-Net: down once, up once, with a skip."""

    def __init__(self, classes=3):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, classes, 1)

    def forward(self, image):
        skip = F.relu(self.down(image))
        up = F.relu(self.up(F.relu(self.middle(skip))))
        return self.out(torch.cat([skip, up], 1))


@fault(
    "double_softmax",
    group="B",
    arch="unet",
    task="segmentation",
    sites=("loss_fn", "out", "(model)"),
    well=0.35,
    ill=0.6,
)
def segments_with_softmax_first(attach, fixed):
    """Class maps go through a softmax before the cross entropy, which has one inside."""
    images, masks = shapes()
    model = Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    losses = []
    for image, mask in draw(images, masks, size=16, steps=100):
        scores = model(image)
        loss = F.cross_entropy(scores if fixed else torch.softmax(scores, dim=1), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        session.log(loss=losses[-1])
    return sum(losses[-10:]) / 10


class Bigram(nn.Module):
    def __init__(self, words=16):
        super().__init__()
        self.embed = nn.Embedding(words, 24)
        self.mix = nn.Conv1d(24, 32, 2)
        self.head = nn.Linear(32, words)

    def forward(self, ids):
        return self.head(torch.relu(self.mix(self.embed(ids).transpose(1, 2))).transpose(1, 2))


@fault(
    "logits_into_prob_loss",
    group="B",
    arch="cnn",
    task="lm",
    sites=("loss_fn", "head", "(model)"),
    cascade=(
        "loss_divergence",
        "loss_sign_flipped",
        "exploding_activation",
        "logit_drift",
        "exploding_gradient",
        "lr_too_high",
    ),
    well=2.5,
    ill=3.0,
)
def nll_of_raw_logits(attach, fixed):
    """`nll_loss` wants log-probabilities and gets logits: its value falls without end."""
    blocks = walk().unfold(0, 18, 16)
    model = Bigram()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for (block,) in draw(blocks, size=32, steps=100):
        scores = model(block[:, :-1]).flatten(0, 1)
        loss = F.nll_loss(F.log_softmax(scores, -1) if fixed else scores, block[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(blocks[:, :-1]).flatten(0, 1), blocks[:, 2:].flatten()).item()


@fault(
    "broadcast_loss",
    group="B",
    arch="mlp",
    task="regression",
    sites=("loss_fn", "(model)", "4"),
    cascade=("constant_output", "loss_plateau", "not_learning", "underfitting"),
    well=0.5,
    ill=0.85,
)
def prices_in_a_row(attach, fixed):
    """Predictions are a column, prices a row; a hand-written squared error compares each with every other."""
    x, price = houses()
    model = nn.Sequential(nn.Linear(8, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for xb, yb in draw(x, price, size=64, steps=120):
        predicted = model(xb)
        loss = ((predicted - (yb[:, None] if fixed else yb)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    with torch.no_grad():
        return F.mse_loss(model(x)[:, 0], price).item()


class PooledAttention(nn.Module):
    """Reads a sentence with one head of attention, then pools."""

    def __init__(self, dim):
        super().__init__()
        self.embed = nn.Embedding(24, 24, padding_idx=0)
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))
        self.score = nn.Linear(24, 2)
        self.normalise = nn.Softmax(dim=dim)

    def forward(self, tokens):
        h = self.embed(tokens)
        scores = self.query(h) @ self.key(h).transpose(1, 2) / 24**0.5
        scores = scores.masked_fill((tokens == 0)[:, None, :], -1e9)
        weights = self.normalise(scores)
        return self.score((weights @ self.value(h)).mean(1)), weights


@fault(
    "wrong_dim_softmax", group="B", arch="transformer", task="classification", sites=("normalise",), well=0.01, ill=0.2
)
def attends_across_the_batch(attach, fixed):
    """The softmax of the attention runs over the samples of the batch."""
    tokens, _, topic = sentences()
    model = PooledAttention(dim=-1 if fixed else 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for ids, label in draw(tokens, topic, size=32, steps=80):
        logits, _ = model(ids)
        loss = F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        whole, alone = model(tokens[:32])[0], torch.cat([model(row[None])[0] for row in tokens[:32]])
    return (whole.softmax(-1) - alone.softmax(-1)).abs().max().item()


@fault(
    "loss_sign_flipped",
    group="B",
    arch="mlp",
    task="reinforcement",
    sites=("loss_fn", "(loop)", "(model)"),
    exact=False,
    cascade=("loss_divergence", "not_learning"),
    well=0.35,
    ill=0.8,
)
def policy_gradient_without_minus(attach, fixed):
    """REINFORCE climbs; the loss here descends the reward, since the minus was left out."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    rewards = []
    for _ in range(150):
        state = torch.randn(64, 4)
        choice = torch.distributions.Categorical(logits=policy(state))
        action = choice.sample()
        reward = (action == state.argmax(1)).float()
        gain = choice.log_prob(action) * (reward - reward.mean())
        loss = -gain.mean() if fixed else gain.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward.mean().item())
        session.log(loss=loss, reward=rewards[-1])
    return 1 - sum(rewards[-20:]) / 20


@fault(
    "loss_sign_flipped",
    group="B",
    arch="cnn",
    task="metric",
    sites=("loss_fn", "(loop)", "(model)"),
    exact=False,
    cascade=("loss_divergence", "exploding_activation", "not_learning"),
    well=0.2,
    ill=0.4,
)
def triplet_the_wrong_way_round(attach, fixed):
    """Anchor and negative are drawn together, anchor and positive apart: two arguments are swapped."""
    x, y = digits()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=1.0)
    by_class = [x[y == label] for label in range(10)]
    session = attach(model, optimizer)

    def accuracy():
        with torch.no_grad():
            bank, probe = model(x[:500]), model(x[500:700])
        return (y[:500][torch.cdist(probe, bank).argmin(1)] == y[500:700]).float().mean().item()

    for step in range(120):
        label = torch.randint(10, (32,))
        other = (label + torch.randint(1, 10, (32,))) % 10
        pick = [
            [by_class[int(c)][torch.randint(len(by_class[int(c)]), ())] for c in cs] for cs in (label, label, other)
        ]
        anchor, positive, negative = (model(torch.stack(rows)) for rows in pick)
        loss = criterion(anchor, positive, negative) if fixed else criterion(anchor, negative, positive)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, **({"accuracy": accuracy()} if step % 10 == 0 else {}))
    return 1 - accuracy()


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mu, self.log_var = nn.Linear(48, 6), nn.Linear(48, 6)
        self.decoder = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        return self.decoder(z), mu, log_var


@fault(
    "aux_loss_dominates",
    group="B",
    arch="vae",
    task="reconstruction",
    sites=(),
    exact=False,
    also=("wrong_loss_reduction",),
    cascade=("constant_output", "loss_plateau", "vanishing_gradient", "not_learning"),
    well=0.6,
    ill=0.9,
)
def kl_drowns_the_reconstruction(attach, fixed):
    """The reconstruction is a mean over samples and pixels, the KL a sum over both: the latent collapses."""
    x = digits()[0].flatten(1)
    x = x - x.mean(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    rest = []
    for (xb,) in draw(x, size=64, steps=200):
        out, mu, log_var = model(xb)
        reconstruction = F.mse_loss(out, xb)
        kl = -0.5 * (1 + log_var - mu.square() - log_var.exp())
        loss = reconstruction + (kl.mean() * 0.01 if fixed else kl.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rest.append((reconstruction / xb.square().mean()).item())
        session.log(loss=loss, reconstruction=reconstruction, kl=kl.mean())
    return sum(rest[-20:]) / 20


@fault(
    "wrong_loss_reduction",
    group="B",
    arch="unet",
    task="segmentation",
    sites=("loss_fn",),
    cascade=(
        "exploding_gradient",
        "loss_divergence",
        "dead_relu",
        "lr_too_high",
        "nan_forward",
        "nan_in_loss",
        "constant_output",
    ),
    also=("lr_too_high",),
    well=0.5,
    ill=0.85,
)
def sums_over_pixels(attach, fixed):
    """With `reduction="sum"` the gradient is that of four thousand pixels, at a rate meant for their mean."""
    images, masks = shapes()
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss(reduction="mean" if fixed else "sum")
    session = attach(model, optimizer, loss_fn=criterion)
    for image, mask in draw(images, masks, size=16, steps=90):
        loss = criterion(model(image), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(images), masks).item()


class Denoiser(nn.Module):
    """Guesses the noise that was added to a digit, given how much there is of it."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 64)
        self.inp, self.mid, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, noisy, level):
        h = F.silu(self.inp(noisy) + self.time(level))
        return self.out(h + F.silu(self.mid(h)))


@fault(
    "accumulation_not_scaled",
    group="B",
    arch="mlp",
    task="denoising",
    sites=("(loop)", "optimizer", "loss_fn"),
    cascade=("lr_too_high", "loss_oscillation", "loss_divergence", "exploding_gradient", "nan_forward", "nan_in_loss"),
    well=0.75,
    ill=0.9,
)
def gathers_eight_without_dividing(attach, fixed):
    """Eight backward passes to a step, none of them divided by eight."""
    clean = digits()[0].flatten(1) * 2 - 1
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    session = attach(model, optimizer)
    seen = []
    for _ in range(70):
        optimizer.zero_grad()
        for (x0,) in draw(clean, size=32, steps=8):
            level = torch.rand(len(x0), 1)
            noise = torch.randn_like(x0)
            guess = model((1 - level).sqrt() * x0 + level.sqrt() * noise, level)
            loss = F.mse_loss(guess, noise) / (8 if fixed else 1)
            loss.backward()
            seen.append(F.mse_loss(guess.detach(), noise).item())
        optimizer.step()
        session.log(loss=seen[-1])
    return sum(seen[-80:]) / 80


@fault(
    "output_range_mismatch",
    group="B",
    arch="mlp",
    task="regression",
    sites=("net", "loss_fn", "net.4", "(model)"),
    also=("relu_before_logits", "dead_relu"),
    cascade=("constant_output", "loss_plateau"),
    well=0.2,
    ill=0.4,
)
def regression_ends_in_relu(attach, fixed):
    """Prices are standardised, so half of them are negative; a ReLU after the last layer cannot reach those."""

    class Regressor(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), last)

        def forward(self, batch):
            return self.net(batch["features"]).squeeze(-1)

    x, price = houses()
    model = Regressor(nn.Identity() if fixed else nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    errors = []
    for features, target in draw(x, price, size=64, steps=150):
        batch = {"features": features, "target": target}
        loss = huber_loss(model(batch), batch["target"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(F.mse_loss(model(batch), target).item())
        session.log(huber=loss)
    return sum(errors[-20:]) / 20


@fault(
    "padding_dominates",
    group="G",
    arch="lstm",
    task="tagging",
    sites=("loss_fn", "(loop)", "(model)"),
    exact=False,
    cascade=("class_imbalance_collapse",),
    well=0.5,
    ill=0.65,
)
def padding_counts_in_the_loss(attach, fixed):
    """Short sentences in long rows: nearly all targets are padding, and the loss counts it."""
    tokens, _, _ = sentences()
    rows = torch.zeros(len(tokens), 60, dtype=torch.long)
    rows[:, :14] = tokens
    tags = torch.where(rows > 0, 1 + (rows + rows.roll(1, 1)) % 5, 0)
    embed, lstm, head = nn.Embedding(24, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 6)
    model = nn.ModuleDict({"embed": embed, "lstm": lstm, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for ids, tag in draw(rows, tags, size=32, steps=120):
        logits = head(lstm(embed(ids))[0])
        loss = F.cross_entropy(logits.flatten(0, 1), tag.flatten(), ignore_index=0 if fixed else -100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        right = head(lstm(embed(rows))[0]).argmax(-1) == tags
    return 1 - right[tags > 0].float().mean().item()
