"""Twelfth hold-out: healthy programs as one finds them in examples."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from fault_programs.holdout_12.about import healthy
from fault_programs.holdout_12.material import digits, houses, moons, spots, spread


@healthy(area="classification", source="in the style of the basic MNIST example", deceptive=False)
def mnist_example_with_train_and_test(attach):
    """Functions train() and test(), Adadelta and StepLR."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 12, 3), nn.Conv2d(12, 24, 3)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.3)
            self.fc1, self.fc2 = nn.Linear(24 * 4, 48), nn.Linear(48, 10)

        def forward(self, x):
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
            x = self.dropout2(F.relu(self.fc1(x)))
            return F.log_softmax(self.fc2(x), dim=1)

    def train(model, loader, optimizer, session):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())

    def test(model, loader):
        model.eval()
        loss, wrong = 0, 0
        with torch.no_grad():
            for data, target in loader:
                out = model(data)
                loss += F.nll_loss(out, target, reduction="sum").item()
                wrong += (out.argmax(1) != target).sum().item()
        return loss / len(loader.dataset), wrong / len(loader.dataset)

    xtr, ytr, xte, yte = digits()
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=48, shuffle=True)
    test_loader = DataLoader(TensorDataset(xte, yte), batch_size=200)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    session = attach(model, optimizer)
    for epoch in range(8):
        train(model, train_loader, optimizer, session)
        val_loss, wrong = test(model, test_loader)
        session.log(val_loss=val_loss, val_error=wrong)
        scheduler.step()
    return wrong


@healthy(area="char rnn", source="in the style of the word language model example", deceptive=False)
def song_of_numbers_with_a_detached_state(attach):
    """A GRU over a long text in columns, whose state is detached between pieces and reset with each epoch."""
    vocab, bptt = 8, 16
    text = [0, 1]
    for _ in range(4000):
        text.append((text[-1] + 2 * text[-2] + 1) % vocab if random.random() < 0.9 else random.randrange(vocab))
    data = torch.tensor(text[: 4000 // 20 * 20]).view(20, -1).t().contiguous()

    class RNNModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.encoder = nn.Dropout(0.1), nn.Embedding(vocab, 16)
            self.rnn, self.decoder = nn.GRU(16, 48), nn.Linear(48, vocab)

        def forward(self, ids, hidden):
            out, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
            return self.decoder(self.drop(out)).view(-1, vocab), hidden

    model = RNNModel()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(14):
        hidden, total = None, []
        model.train()
        for i in range(0, len(data) - 1 - bptt, bptt):
            source, target = data[i : i + bptt], data[i + 1 : i + 1 + bptt].reshape(-1)
            hidden = hidden.detach() if hidden is not None else None
            out, hidden = model(source, hidden)
            loss = criterion(out, target)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total.append(loss.item())
            session.log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        out, _ = model(data[:-1], None)
        return criterion(out, data[1:].reshape(-1)).item()


@healthy(area="regression", source="in the style of tabular examples with early stopping", deceptive=False)
def house_prices_with_early_stopping(attach):
    """A validation set, patience, and the best weights as a copy."""
    x, y = houses(1000)
    full = TensorDataset(x, (y - y.mean()) / y.std())
    train, val = random_split(full, [800, 200])
    model = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-2)
    session = attach(model, optimizer)
    best, best_state, patience = float("inf"), None, 0
    for epoch in range(25):
        model.train()
        for xb, yb in DataLoader(train, batch_size=64, shuffle=True, drop_last=True):
            loss = F.mse_loss(model(xb), yb.view(-1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            xv, yv = full[val.indices]
            val_loss = F.mse_loss(model(xv), yv.view(-1, 1)).item()
        session.log(val_loss=val_loss)
        if val_loss < best:
            best, best_state, patience = val_loss, copy.deepcopy(model.state_dict()), 0
        else:
            patience += 1
            if patience > 5:
                break
    model.load_state_dict(best_state)
    return best


@healthy(area="graph", source="in the style of two-layer GCN examples on one graph", deceptive=False)
def two_layers_on_one_citation_graph(attach):
    """A normalised adjacency with self loops, all nodes in each step, a mask for the known labels."""
    nodes, classes = 240, 4
    label = torch.arange(nodes) % classes
    chance = torch.where(label[:, None] == label, 0.08, 0.006)
    adj = (torch.rand(nodes, nodes) < chance).float().triu(1)
    adj = adj + adj.t() + torch.eye(nodes)
    scale = adj.sum(1).rsqrt()
    adj = scale[:, None] * adj * scale
    x = torch.randn(nodes, 24)
    x[torch.arange(nodes), label] += 1.0
    known = torch.rand(nodes) < 0.3

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1, self.gc2 = nn.Linear(24, 32), nn.Linear(32, classes)

        def forward(self, x):
            x = F.dropout(F.relu(adj @ self.gc1(x)), 0.5, training=self.training)
            return F.log_softmax(adj @ self.gc2(x), dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(150):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x)[known], label[known])
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    model.eval()
    return float((model(x).argmax(1) != label)[~known].float().mean())


@healthy(area="segmentation", source="in the style of small U-Net trainers", deceptive=False)
def unet_trainer_with_bce_and_dice(attach):
    """A Trainer class, BCE plus Dice, cosine schedule once per epoch."""

    class DoubleConv(nn.Sequential):
        def __init__(self, a, b):
            super().__init__(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc, self.down, self.up = DoubleConv(1, 8), DoubleConv(8, 16), nn.ConvTranspose2d(16, 8, 2, 2)
            self.conv, self.outc = DoubleConv(16, 8), nn.Conv2d(8, 1, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.up(self.down(F.max_pool2d(x1, 2)))
            return self.outc(self.conv(torch.cat([x1, x2], 1)))

    class Trainer:
        def __init__(self, epochs=9):
            self.net, self.epochs = UNet(), epochs
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=4e-3)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)
            self.loader = DataLoader(TensorDataset(*spots(200)), batch_size=20, shuffle=True)
            self.session = attach(self.net, self.optimizer)

        @staticmethod
        def dice(p, t):
            return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)

        def run(self):
            for epoch in range(self.epochs):
                self.net.train()
                for image, mask in self.loader:
                    logits = self.net(image)
                    loss = F.binary_cross_entropy_with_logits(logits, mask) + self.dice(logits.sigmoid(), mask)
                    self.optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    self.optimizer.step()
                    self.session.log(loss=loss.item())
                self.scheduler.step()
            self.net.eval()
            x, y = spots(100)
            with torch.no_grad():
                return self.dice((self.net(x) > 0).float(), y).item()

    return Trainer().run()


@healthy(area="diffusion", source="in the style of minimal DDPMs for points in the plane", deceptive=False)
def points_by_denoising(attach):
    """Noise prediction with a linear schedule, and an average of the weights that makes the samples."""
    steps = 40
    betas = torch.linspace(1e-3, 0.2, steps)
    alphas = 1 - betas
    bar = alphas.cumprod(0)
    data = moons(2000)

    class Denoiser(nn.Module):
        def __init__(self, dim=64):
            super().__init__()
            self.time = nn.Embedding(steps, dim)
            self.inp, self.mid, self.out = nn.Linear(2, dim), nn.Linear(dim, dim), nn.Linear(dim, 2)

        def forward(self, x, t):
            h = F.silu(self.inp(x) + self.time(t))
            return self.out(F.silu(h + self.mid(h)))

    model = Denoiser()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for step in range(700):
        x0 = data[torch.randint(0, 2000, (128,))]
        t = torch.randint(0, steps, (128,))
        noise = torch.randn_like(x0)
        x_t = bar[t, None].sqrt() * x0 + (1 - bar[t, None]).sqrt() * noise
        loss = F.mse_loss(model(x_t, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), model.parameters()):
                a.lerp_(b, 0.02)
        session.log(loss=loss.item())
    with torch.no_grad():
        x = torch.randn(500, 2)
        for i in reversed(range(steps)):
            eps = ema(x, torch.full((500,), i))
            x = (x - betas[i] / (1 - bar[i]).sqrt() * eps) / alphas[i].sqrt()
            x = x + betas[i].sqrt() * torch.randn_like(x) if i else x
    return spread(x, moons(500))


@healthy(area="seq2seq", source="in the style of seq2seq tutorials with teacher forcing", deceptive=False)
def reversed_numbers_with_teacher_forcing(attach):
    """An encoder and a decoder with two optimizers; half of the batches are forced."""
    vocab, length, sos = 8, 5, 8

    class EncoderRNN(nn.Module):
        def __init__(self, hidden=48):
            super().__init__()
            self.embedding, self.gru = nn.Embedding(vocab, 24), nn.GRU(24, hidden, batch_first=True)

        def forward(self, ids):
            return self.gru(self.embedding(ids))[1]

    class DecoderRNN(nn.Module):
        def __init__(self, hidden=48):
            super().__init__()
            self.embedding, self.gru = nn.Embedding(vocab + 1, 24), nn.GRU(24, hidden, batch_first=True)
            self.out = nn.Linear(hidden, vocab)

        def forward(self, hidden, target=None):
            token, outputs = torch.full((hidden.shape[1], 1), sos), []
            for t in range(length):
                out, hidden = self.gru(F.relu(self.embedding(token)), hidden)
                outputs.append(self.out(out))
                token = target[:, t : t + 1] if target is not None else outputs[-1].argmax(-1).detach()
            return torch.cat(outputs, 1)

    encoder, decoder = EncoderRNN(), DecoderRNN()
    enc_optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)
    dec_optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)
    session = attach(nn.ModuleList([encoder, decoder]), [enc_optimizer, dec_optimizer])
    for step in range(260):
        ids = torch.randint(0, vocab, (40, length))
        target = ids.flip(1)
        forced = np.random.rand() < 0.5
        logits = decoder(encoder(ids), target if forced else None)
        loss = F.cross_entropy(logits.reshape(-1, vocab), target.reshape(-1))
        enc_optimizer.zero_grad()
        dec_optimizer.zero_grad()
        loss.backward()
        enc_optimizer.step()
        dec_optimizer.step()
        session.log(loss=loss.item())
    ids = torch.randint(0, vocab, (200, length))
    with torch.no_grad():
        return float((decoder(encoder(ids)).argmax(-1) != ids.flip(1)).float().mean())
