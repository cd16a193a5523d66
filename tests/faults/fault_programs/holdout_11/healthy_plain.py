"""Eleventh hold-out: healthy programs in the manner of public examples."""

from __future__ import annotations

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from fault_programs.holdout_11.about import healthy
from fault_programs.holdout_11.material import digits, discs, standard, table


@healthy(
    area="image classification", source="after a basic example with log_softmax and a step schedule", deceptive=False
)
def digits_with_log_softmax_and_steps(attach):
    """A convolutional net, dropout, NLLLoss and StepLR once per epoch."""
    xtr, ytr, xte, yte = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 1), nn.Conv2d(16, 24, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.4)
            self.fc1, self.fc2 = nn.Linear(96, 64), nn.Linear(64, 10)

        def forward(self, x):
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
            return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    session = attach(model, optimizer, scheduler=scheduler)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)
    error = 1.0
    for epoch in range(8):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            out = model(xte)
        error = float((out.argmax(1) != yte).float().mean())
        session.log(test_loss=F.nll_loss(out, yte).item(), test_error=error)
        scheduler.step()
    return error


@healthy(
    area="tabular classification",
    source="after examples of OneCycleLR, which is stepped with each batch",
    deceptive=False,
)
def wine_with_one_cycle(attach):
    """A small network under a one-cycle schedule."""
    xtr, ytr, xte, yte = table("wine", 120)
    xtr, xte = standard(xtr, xte)
    ytr, yte = torch.tensor(ytr), torch.tensor(yte)
    model = nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    epochs, batches = 20, 8
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.15, total_steps=epochs * batches)
    session = attach(model, optimizer, scheduler=scheduler)
    for epoch in range(epochs):
        model.train()
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=15, shuffle=True):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss.item(), lr=scheduler.get_last_lr()[0])
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(model(xte), yte).item())
    with torch.no_grad():
        return float((model(xte).argmax(1) != yte).float().mean()) + 0.02


@healthy(
    area="segmentation",
    source="after small U-Net examples with a sum of cross entropy and dice, and accumulation",
    deceptive=False,
)
def unet_with_dice_and_accumulation(attach):
    """Losses are divided by the number of accumulated batches."""

    class Block(nn.Sequential):
        def __init__(self, a, b):
            super().__init__(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(4, b), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.middle, self.up = Block(1, 8), Block(8, 16), Block(24, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.down(x)
            b = self.middle(F.max_pool2d(a, 2))
            return self.out(self.up(torch.cat([a, F.interpolate(b, scale_factor=2)], 1)))

    def dice_loss(logits, mask):
        p = torch.sigmoid(logits)
        return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)

    x, mask, _ = discs(320)
    model, every = UNet(), 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        model.train()
        optimizer.zero_grad()
        for i, part in enumerate(torch.randperm(240).split(12)):
            logits = model(x[part])
            loss = F.binary_cross_entropy_with_logits(logits, mask[part]) + dice_loss(logits, mask[part])
            (loss / every).backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(val_dice=1 - float(dice_loss(model(x[240:]), mask[240:])))
    with torch.no_grad():
        return float(dice_loss(model(x[240:]), mask[240:]))


@healthy(area="speech", source="after CTC examples: log_softmax, time first, lengths of each sample", deceptive=False)
def ctc_with_lengths(attach):
    """A bidirectional LSTM that spells short words."""

    def spoken(n):
        xs, ys = [], []
        for _ in range(n):
            word = [random.randint(1, 5) for _ in range(random.randint(2, 4))]
            parts = []
            for k in word:
                parts += [
                    torch.zeros(random.randint(1, 2), 6),
                    F.one_hot(torch.tensor([k]), 6).float().repeat(random.randint(1, 3), 1),
                ]
            xs.append(torch.cat(parts) * 1.5)
            ys.append(torch.tensor(word))
        lengths = torch.tensor([len(x) for x in xs])
        x = pad_sequence(xs, batch_first=True)
        return x + 0.3 * torch.randn(x.shape), lengths, ys

    class Recogniser(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(6, 24, bidirectional=True, batch_first=True)
            self.out = nn.Linear(48, 6)

        def forward(self, x):
            return F.log_softmax(self.out(self.rnn(x)[0]), -1)

    model, ctc = Recogniser(), nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for it in range(160):
        x, lengths, words = spoken(20)
        log_probs = model(x).transpose(0, 1)
        loss = ctc(log_probs, torch.cat(words), lengths, torch.tensor([len(w) for w in words]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        session.log(ctc_loss=loss.item())
    x, lengths, words = spoken(120)
    with torch.no_grad():
        best = model(x).argmax(-1)
    wrong = 0
    for row, length, word in zip(best, lengths, words):
        wrong += [int(k) for k in torch.unique_consecutive(row[:length]) if k] != word.tolist()
    return wrong / 120 + 0.05


@healthy(
    area="translation", source="after examples of nn.Transformer with a causal mask and padding masks", deceptive=False
)
def transformer_turns_words_around(attach):
    """Encoder and decoder, warm-up, ignore_index for the padding."""
    pad, start, end = 0, 1, 2

    def pairs(n):
        src, tgt = [], []
        for _ in range(n):
            word = [random.randint(3, 9) for _ in range(random.randint(2, 5))]
            src.append(torch.tensor(word))
            tgt.append(torch.tensor([start, *word[::-1], end]))
        return pad_sequence(src, True, pad), pad_sequence(tgt, True, pad)

    class Seq2Seq(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.embed, self.place = nn.Embedding(10, d, padding_idx=pad), nn.Embedding(12, d)
            self.net = nn.Transformer(d, 2, 1, 1, 64, dropout=0.0, batch_first=True)
            self.out = nn.Linear(d, 10)

        def forward(self, src, tgt):
            a = self.embed(src) + self.place(torch.arange(src.shape[1]))
            b = self.embed(tgt) + self.place(torch.arange(tgt.shape[1]))
            causal = torch.triu(torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool), 1)
            h = self.net(
                a,
                b,
                tgt_mask=causal,
                src_key_padding_mask=src == pad,
                tgt_key_padding_mask=tgt == pad,
                memory_key_padding_mask=src == pad,
            )
            return self.out(h)

    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 40))
    session = attach(model, optimizer, scheduler=scheduler)
    for it in range(300):
        src, tgt = pairs(32)
        loss = F.cross_entropy(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=pad)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        session.log(loss=loss.item())
    src, tgt = pairs(200)
    with torch.no_grad():
        logits = model(src, tgt[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=pad)) + 0.02


@healthy(area="graph", source="after the two-layer GCN on a citation graph with few labelled nodes", deceptive=False)
def gcn_with_twenty_labels(attach):
    """Normalised adjacency with self loops; only the training mask counts in the loss."""
    n = 240
    label = torch.arange(n) % 3
    x = F.one_hot(label, 3).float() @ torch.randn(3, 16) + 1.5 * torch.randn(n, 16)
    chance = torch.where(label[:, None] == label[None], 0.06, 0.006)
    a = (torch.rand(n, n) < chance).triu(1).float()
    a = a + a.T + torch.eye(n)
    d = a.sum(1).rsqrt()
    a = d[:, None] * a * d[None]
    order = torch.randperm(n)
    train, val, test = order[:30], order[30:90], order[90:]

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            x = F.dropout(x, 0.3, self.training)
            h = F.relu(a @ self.w1(x))
            return a @ self.w2(F.dropout(h, 0.5, self.training))

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(150):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[train], label[train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(x)[val], label[val])
        session.log(loss=loss.item(), val_loss=val_loss.item())
    with torch.no_grad():
        return float((model(x)[test].argmax(1) != label[test]).float().mean()) + 0.03


@healthy(area="imbalanced table", source="after examples of WeightedRandomSampler for rare classes", deceptive=False)
def rare_class_is_drawn_more_often(attach):
    """A sampler that draws the rare class as often as the other."""
    n = 3000
    x = torch.randn(n, 10)
    y = (torch.rand(n) < 0.06).long()
    x[:, :4] += 0.9 * y[:, None]
    weights = 1.0 / torch.bincount(y[:2200])[y[:2200]].float()
    sampler = WeightedRandomSampler(weights.tolist(), 2200, replacement=True)
    loader = DataLoader(TensorDataset(x[:2200], y[:2200]), batch_size=50, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    for epoch in range(5):
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        said = model(x[2200:]).argmax(1)
    rare = y[2200:] == 1
    return 0.5 * float((said[rare] == 0).float().mean() + (said[~rare] == 1).float().mean())


@healthy(
    area="siamese",
    source="after examples of nn.TripletMarginLoss with anchors, positives and negatives",
    deceptive=False,
)
def triplets_of_digits(attach):
    """Many triplets soon cost nothing, as they should."""
    xtr, ytr, xte, yte = digits()
    groups = [torch.nonzero(ytr == c).flatten() for c in range(10)]

    def triplets(n):
        c = torch.randint(0, 10, (n,))
        other = (c + torch.randint(1, 10, (n,))) % 10

        def draw(classes):
            return xtr[torch.stack([groups[k][torch.randint(len(groups[k]), ())] for k in classes.tolist()])]

        return draw(c), draw(c), draw(other)

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    criterion = nn.TripletMarginLoss(margin=1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    for it in range(200):
        loss = criterion(*(net(x) for x in triplets(40)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(triplet_loss=loss.item())
    with torch.no_grad():
        near = torch.cdist(net(xte), net(xtr)).topk(5, 1, largest=False).indices
    return float((ytr[near].mode(1).values != yte).float().mean()) + 0.02


@healthy(
    area="forecast",
    source="after examples of an LSTM that forecasts the next value of a scaled series",
    deceptive=False,
)
def lstm_forecasts_a_season(attach):
    """Windows of a series with trend and season, scaled with the training part."""
    t = torch.arange(600.0)
    series = 50 + 0.05 * t + 8 * torch.sin(2 * math.pi * t / 24) + 1.0 * torch.randn(600)
    mean, std = series[:450].mean(), series[:450].std()
    scaled = (series - mean) / std
    windows = scaled.unfold(0, 25, 1)
    x, y = windows[:, :24, None], windows[:, 24:]

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(1, 24, batch_first=True)
            self.linear = nn.Linear(24, 1)

        def forward(self, x):
            return self.linear(self.lstm(x)[0][:, -1])

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    for epoch in range(20):
        for xb, yb in DataLoader(TensorDataset(x[:425], y[:425]), batch_size=32, shuffle=True):
            loss = F.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        with torch.no_grad():
            session.log(val_loss=F.mse_loss(model(x[425:]), y[425:]).item())
    with torch.no_grad():
        return float((model(x[425:]) - y[425:]).abs().mean())


@healthy(
    area="distillation",
    source="after examples of distillation with softened answers of a larger network",
    deceptive=False,
)
def student_learns_from_a_teacher(attach):
    """KL of softened answers with batchmean, times the square of the temperature."""
    xtr, ytr, xte, yte = digits()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    first = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(150):
        pick = torch.randint(0, len(xtr), (64,))
        loss = F.cross_entropy(teacher(xtr[pick]), ytr[pick])
        first.zero_grad()
        loss.backward()
        first.step()
    teacher.eval().requires_grad_(False)
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    session = attach(student, optimizer)
    T, alpha = 3.0, 0.7
    for epoch in range(10):
        for x, y in DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True):
            with torch.no_grad():
                soft = F.softmax(teacher(x) / T, 1)
            out = student(x)
            kd = F.kl_div(F.log_softmax(out / T, 1), soft, reduction="batchmean") * T * T
            loss = alpha * kd + (1 - alpha) * F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), kd=kd.item())
    with torch.no_grad():
        return float((student(xte).argmax(1) != yte).float().mean())
