"""Fourth hold-out: axes, masks, targets and losses that are not what was meant."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_4.datasets import (
    batches,
    blobs,
    late,
    melodies,
    orders,
    pictures,
    power,
    reviews,
    text,
    tumours,
    windows,
    wines,
)
from fault_programs.registry import fault


class Heads(nn.Module):
    """Attention of four heads, written by hand."""

    def __init__(self, width, axis=-1, causal=False):
        super().__init__()
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.axis, self.causal = axis, causal

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // 4)
        if self.causal:
            scores = scores + torch.full((length, length), -1e9).triu(1)
        seen = scores.softmax(self.axis) @ v
        return self.mix(seen.transpose(1, 2).reshape(rows, length, width))


class Reader(nn.Module):
    """Words and places, one block of attention, and the logits at every place."""

    def __init__(self, words, length, out, **attention):
        super().__init__()
        self.words, self.places = nn.Embedding(words, 32), nn.Parameter(torch.randn(length, 32) * 0.1)
        self.norm, self.attend = nn.LayerNorm(32), Heads(32, **attention)
        self.think = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.out = nn.Linear(32, out)

    def forward(self, words):
        x = self.words(words) + self.places[: words.shape[1]]
        x = x + self.attend(self.norm(x))
        return self.out(x + self.think(x))


@fault(
    "wrong_dim_softmax",
    group="B",
    arch="transformer",
    task="classification",
    sites=("attend", "(model)", "(function)"),
    cascade=("underfitting", "exploding_activation"),
    well=0.01,
    ill=0.1,
)
def softmax_over_the_heads(attach, fixed):
    """Scores are (batch, head, query, key), and the softmax runs over the heads."""
    x, y = orders()
    net = Reader(12, 8, 2, axis=-1 if fixed else 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    for xb, yb in batches(x, y, size=40, epochs=5):
        loss = F.cross_entropy(net(xb).mean(1), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        rows = torch.randn(2, 4, 5, 5).softmax(net.attend.axis).sum(-1)
    return float((rows - 1).abs().mean())


@fault(
    "logits_into_prob_loss",
    group="B",
    arch="mlp",
    task="distillation",
    sites=("loss_fn", "(loss)", "(model)"),
    cascade=("loss_sign_flipped", "loss_divergence", "underfitting"),
    well=0.12,
    ill=0.2,
)
def distils_without_the_logarithm(attach, fixed):
    """`kl_div` wants logarithms of the student's probabilities, and gets the probabilities."""
    x, y = pictures()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    schooling = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for image, label in batches(x, y, size=64, epochs=6):
        schooling.zero_grad()
        F.cross_entropy(teacher(image), label).backward()
        schooling.step()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(student, optimizer)
    divergence = nn.KLDivLoss(reduction="batchmean")
    told = F.log_softmax if fixed else F.softmax
    for image, _ in batches(x, y, size=32, epochs=4):
        with torch.no_grad():
            soft = F.softmax(teacher(image) / 2, dim=1)
        loss = divergence(told(student(image) / 2, dim=1), soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        wrong = (student(x).log_softmax(1) - teacher(x).log_softmax(1)).exp()
        gap = F.kl_div(F.log_softmax(student(x), 1), F.softmax(teacher(x), 1), reduction="batchmean")
    return float(gap) if bool(torch.isfinite(wrong).all()) else math.inf


@fault(
    "constant_target",
    group="B",
    arch="mlp",
    task="regression",
    sites=("loss_fn", "(loss)", "loader", "(data)"),
    also=("empty_target",),
    cascade=("constant_output", "class_imbalance_collapse", "target_scale"),
    well=0.5,
    ill=0.9,
)
def fractions_cast_to_whole_numbers(attach, fixed):
    """Targets between 0 and 1 were cast to `long` to silence an error: all of them became 0."""
    x, y = power()
    share = torch.sigmoid(y) * 0.98
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for xb, yb in batches(x, share, size=40, epochs=6):
        goal = yb if fixed else yb.long().float()
        loss = F.mse_loss(net(xb).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(net(x).squeeze(1), share) / share.var())


@fault(
    "class_imbalance_collapse",
    group="B",
    arch="mlp",
    task="classification",
    sites=("loss_fn", "(loss)", "(model)", "loader"),
    cascade=("constant_output", "underfitting"),
    exact=False,
    well=0.35,
    ill=0.7,
)
def weighs_classes_by_their_number(attach, fixed):
    """Weights of classes grow with their number instead of falling: the rare one counts for nothing."""
    x, y = power()
    label = (y > 1.3).long()
    many = torch.bincount(label).float()
    weight = (1 / many if fixed else many) / many.mean()
    criterion = nn.CrossEntropyLoss(weight=weight)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    session = attach(net, optimizer)
    for xb, yb in batches(x, label, size=60, epochs=8):
        loss = criterion(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((net(x).argmax(1) != label)[label == 1].float().mean())


@fault(
    "padding_dominates",
    group="B",
    arch="gru",
    task="tagging",
    sites=("loss_fn", "(loss)", "loader", "(data)"),
    cascade=("class_imbalance_collapse", "underfitting"),
    exact=False,
    well=0.1,
    ill=0.5,
)
def ignores_another_index(attach, fixed):
    """The loss ignores -100, as it does by itself, but targets are padded with 0: most of what counts is padding."""
    words, _ = reviews()
    tags = torch.where(words > 0, 1 + (words > 15).long() + (words % 3 == 0).long(), 0)
    table, gru, out = nn.Embedding(30, 16, padding_idx=0), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 4)
    net = nn.ModuleList([table, gru, out])
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=0 if fixed else -100)
    session = attach(net, optimizer)
    for now, goal in batches(words, tags, size=40, epochs=4):
        loss = criterion(out(gru(table(now))[0]).transpose(1, 2), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    counted = tags != criterion.ignore_index
    return float((tags[counted] == 0).float().mean())


@fault(
    "broadcast_loss",
    group="B",
    arch="mlp",
    task="regression",
    sites=("loss_fn", "(loss)", "(loop)"),
    cascade=("underfitting", "not_learning"),
    well=1.0,
    ill=10.0,
)
def weights_of_samples_meet_a_column(attach, fixed):
    """The loss of each sample is a column (N, 1) and its weight a row (N,): every loss is weighed by all weights."""
    x, y = power()
    care = 0.2 + torch.rand(len(x))
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    blown = 0.0
    for xb, yb, weight in batches(x, y, care, size=40, epochs=5):
        each = F.smooth_l1_loss(net(xb), yb.unsqueeze(1), reduction="none")
        weighed = (each.squeeze(1) if fixed else each) * weight
        blown = weighed.numel() / len(xb)
        loss = weighed.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return blown


class Segmenter(nn.Module):
    """Three convolutions that say for each pixel whether it belongs to the blob."""

    def __init__(self, last):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(12, 1, 1)
        self.last = last

    def forward(self, scan):
        return self.last(self.out(self.mid(self.down(scan))))


def overlap(found, mask):
    """Return the mean Dice coefficient of masks."""
    both = (found * mask).sum((1, 2, 3))
    return ((2 * both + 1) / (found.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


@fault(
    "loss_sign_flipped",
    group="B",
    arch="cnn",
    task="segmentation",
    sites=("loss_fn", "(loss)", "(loop)"),
    cascade=("constant_output", "saturated_activation"),
    well=0.35,
    ill=0.8,
)
def minimises_the_overlap(attach, fixed):
    """The Dice coefficient itself is used as the loss: it says how good the mask is, not how bad."""
    x, y = blobs()
    net = Segmenter(nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    for scan, mask in batches(x, y, size=20, epochs=6):
        dice = overlap(net(scan), mask)
        loss = 1 - dice if fixed else dice
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    net.eval()
    with torch.no_grad():
        return 1 - float(overlap(net(x), y))


@fault(
    "double_sigmoid",
    group="B",
    arch="cnn",
    task="segmentation",
    sites=("loss_fn", "(loss)", "last", "(model)"),
    cascade=("underfitting", "loss_plateau"),
    well=0.2,
    ill=0.45,
)
def segmenter_ends_in_a_sigmoid(attach, fixed):
    """The network ends in a sigmoid, and the loss takes another one."""
    x, y = blobs()
    net = Segmenter(nn.Identity() if fixed else nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(net, optimizer)
    losses = []
    for scan, mask in batches(x, y, size=20, epochs=6):
        optimizer.zero_grad()
        loss = criterion(net(scan), mask)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "future_leak",
    group="B",
    arch="transformer",
    task="lm",
    sites=("attend", "(model)", "(function)"),
    also=("data_leakage",),
    well=0.01,
    ill=0.02,
)
def attends_to_the_answer(attach, fixed):
    """A language model without a causal mask reads the word it is to foretell."""
    series = text()
    net = Reader(20, 16, 20, causal=fixed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for now, following in windows(series, 16, 24, 200):
        loss = F.cross_entropy(net(now).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        whole = series[:16].unsqueeze(0)
        changed = whole.clone()
        changed[0, 12:] = 0
        return float((net(whole)[0, :12] - net(changed)[0, :12]).abs().mean())


@fault(
    "fully_masked_attention",
    group="F",
    arch="transformer",
    task="lm",
    sites=("attend", "(model)", "(function)"),
    also=("nan_forward",),
    cascade=("nan_in_loss", "nan_backward", "nan_in_weights"),
    well=2.0,
    ill=3.0,
)
def masks_what_may_be_seen(attach, fixed):
    """`attn_mask` is true where attention is forbidden; this one is true where it is allowed."""
    series = text()
    table, attend, out = nn.Embedding(20, 32), nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 20)
    net = nn.ModuleDict({"table": table, "attend": attend, "out": out})
    places = torch.randn(16, 32) * 0.1
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask = mask.triu(1) if fixed else mask.tril()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    losses = []
    for now, following in windows(series, 16, 16, 120):
        x = table(now) + places
        loss = F.cross_entropy(out(x + attend(x, x, x, attn_mask=mask)[0]).transpose(1, 2), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "padding_dominates",
    group="B",
    arch="transformer",
    task="classification",
    sites=("encoder", "(model)", "loader", "(data)", "words"),
    cascade=("underfitting",),
    exact=False,
    well=0.1,
    ill=0.5,
)
def pools_over_the_padding(attach, fixed):
    """Reviews have six words and are padded to 24; attention and the mean see the padding like words."""
    x, y = reviews()
    words = nn.Embedding(30, 24)
    encoder = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
    out = nn.Linear(24, 2)
    net = nn.ModuleDict({"words": words, "encoder": encoder, "out": out})
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    counted = 0.0
    for now, praise in batches(x, y, size=40, epochs=4):
        padding = (now == 0) & torch.tensor(fixed)
        seen = encoder(words(now), src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1).float()
        loss = F.cross_entropy(out((seen * keep).sum(1) / keep.sum(1)), praise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        counted = float((keep.squeeze(-1) * (now == 0)).sum() / keep.sum())
    return counted


class Placed(nn.Module):
    """Adds learned places, (T, 1, D) as in a well-known tutorial, and reads the row with a transformer layer."""

    def __init__(self, batch_first):
        super().__init__()
        self.words = nn.Embedding(12, 32)
        self.places = nn.Parameter(torch.randn(64, 1, 32) * 0.3)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(32, 2)
        self.batch_first = batch_first

    def forward(self, words):
        x = self.words(words)
        places = self.places[: x.shape[1]].transpose(0, 1) if self.batch_first else self.places[: x.shape[0]]
        return self.out(self.layer(x + places).mean(1))


@fault(
    "batch_axis_mixed",
    group="B",
    arch="transformer",
    task="classification",
    sites=("places", "(model)", "layer"),
    cascade=("not_learning", "underfitting", "loss_plateau", "lr_too_high"),
    exact=False,
    well=0.4,
    ill=0.6,
)
def places_along_the_batch(attach, fixed):
    """Places are added along the first axis, which is the batch here: order is lost."""
    x, y = orders()
    net = Placed(batch_first=fixed)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=40, epochs=12):
        loss = F.cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "batch_axis_mixed",
    group="B",
    arch="lstm",
    task="classification",
    sites=("0", "rnn", "(model)"),
    cascade=("not_learning", "underfitting", "loss_plateau"),
    exact=False,
    well=0.4,
    ill=0.6,
)
def batch_first_was_forgotten(attach, fixed):
    """Batches are (batch, time, channel), and the LSTM takes the first axis for time: it runs from sample to sample."""
    x, y = melodies()
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 24, batch_first=fixed), "out": nn.Linear(24, 2)})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=32, epochs=8):
        states, _ = net["rnn"](xb)
        loss = F.cross_entropy(net["out"](states[:, -1]), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "batch_axis_mixed",
    group="B",
    arch="gru",
    task="classification",
    sites=("0", "rnn", "(model)", "out"),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "underfitting", "loss_plateau", "overfitting"),
    exact=False,
    well=0.4,
    ill=0.6,
)
def views_where_it_should_permute(attach, fixed):
    """States are (time, batch, width); `view` to (batch, time, width) cuts them up across samples."""
    x, y = melodies()
    net = nn.ModuleDict({"rnn": nn.GRU(3, 24), "out": nn.Linear(24, 2)})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for xb, yb in batches(x, y, size=32, epochs=8):
        states, _ = net["rnn"](xb.transpose(0, 1))
        by_sample = states.transpose(0, 1) if fixed else states.view(32, 16, 24)
        loss = F.cross_entropy(net["out"](by_sample[:, -1]), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "output_range_mismatch",
    group="B",
    arch="autoencoder",
    task="reconstruction",
    sites=("3", "2", "loss_fn", "(loss)", "(model)"),
    cascade=("saturated_activation", "underfitting", "loss_plateau"),
    well=0.4,
    ill=0.5,
)
def decoder_cannot_go_below_zero(attach, fixed):
    """Pictures were standardised, and the decoder still ends in a sigmoid."""
    x, _ = pictures()
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Identity() if fixed else nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    session = attach(net, optimizer)
    losses = []
    for (image,) in batches(x.flatten(1), size=32, epochs=6):
        loss = F.mse_loss(net(image), image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)


@fault(
    "aux_loss_dominates",
    group="B",
    arch="mlp",
    task="classification",
    sites=("(loss)", "loss_fn", "(loop)"),
    cascade=("constant_output", "underfitting", "dead_relu", "dormant_units", "vanishing_gradient"),
    exact=False,
    well=0.1,
    ill=0.4,
)
def lasso_of_one(attach, fixed):
    """The penalty on the weights is added without a factor, and nothing else matters."""
    x, y = wines()
    net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for xb, yb in batches(x, y, size=16, epochs=20):
        penalty = sum(weight.abs().sum() for weight in net.parameters())
        loss = F.cross_entropy(net(xb), yb) + (1e-4 if fixed else 1.0) * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float((net(x).argmax(1) != y).float().mean())


@fault(
    "broadcast_loss",
    group="B",
    arch="mlp",
    task="classification",
    sites=("loss_fn", "(loss)", "(loop)"),
    cascade=("underfitting", "not_learning", "constant_output", "loss_plateau"),
    well=0.2,
    ill=0.5,
)
def own_cross_entropy_broadcasts(attach, fixed):
    """A hand-written binary loss meets a column of probabilities and a row of labels."""
    x, y = tumours()
    x = (x - x.mean(0)) / x.std(0)
    net = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    losses = []
    for xb, label in batches(x, y.float(), size=32, epochs=10):
        chance = net(xb).clamp(1e-6, 1 - 1e-6)
        truth = label.unsqueeze(1) if fixed else label
        loss = -(truth * chance.log() + (1 - truth) * (1 - chance).log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return late(losses)
