"""Sixth hold-out: programs in which nothing is wrong (vision, language, speech, series, graphs, fine-tuning)."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_6.about import healthy
from fault_programs.holdout_6.materials import batches, cells, clips, digits, load, papers, story, table, wrong


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


@healthy(area="vision", source="in the manner of kuangliu/pytorch-cifar")
def cifar_recipe_on_digits(attach):
    """Nesterov momentum, cosine, label smoothing and one mixup for pictures and labels."""
    xtr, ytr, xte, yte = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Residual(16),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=7)
    session = attach(net, optimizer, scheduler=scheduler)
    for _epoch in range(7):
        net.train()
        for inputs, targets in DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True):
            lam, index = float(np.random.beta(0.4, 0.4)), torch.randperm(64)
            outputs = net(lam * inputs + (1 - lam) * inputs[index])
            loss = lam * criterion(outputs, targets) + (1 - lam) * criterion(outputs, targets[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        scheduler.step()
    return wrong(net, xte, yte)


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocab=20, width=32, length=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks, self.ln_f = nn.ModuleList([Block(width) for _ in range(2)]), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@healthy(area="language", source="in the manner of karpathy/minGPT")
def gpt_with_warm_up_and_groups(attach):
    """AdamW with two groups, warm-up, cosine, clipping, tied head."""
    text = story()
    model = TinyGPT()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=4e-3, betas=(0.9, 0.95)
    )
    scheduler = LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 20) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, s / 200))))
    )
    session = attach(model, optimizer, scheduler=scheduler)
    for _ in range(200):
        at = torch.randint(0, len(text) - 25, (16,))[:, None] + torch.arange(25)
        chunk = text[at]
        loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        session.log(loss=loss)
    return float(loss.detach())


@healthy(area="speech", source="in the manner of the torchaudio M5 tutorial")
def keyword_spotter(attach):
    """Convolutions over time, batch norm, log_softmax and nll_loss, masking of bands as augmentation."""
    x, y = clips()
    x = torch.log1p(x)
    model = nn.Sequential(
        nn.Conv1d(8, 24, 5, stride=2),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(24, 32, 3),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7, 5),
        nn.LogSoftmax(1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    session = attach(model, optimizer)
    for _epoch in range(7):
        model.train()
        for xb, yb in batches(x[:560], y[:560], size=40):
            band = int(torch.randint(0, 8, ()))
            xb = xb.clone()
            xb[:, band] = 0.0
            loss = F.nll_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.nll_loss(model(x[560:]), y[560:]))
    return wrong(model, x[560:], y[560:])


class TCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.utils.parametrizations.weight_norm(nn.Conv1d(1 if d == 1 else width, width, 3, dilation=d))
                for d in (1, 2, 4, 8)
            ]
        )
        self.out = nn.Linear(width, 6)

    def forward(self, x):
        h = x[:, None]
        for conv in self.convs:
            h = F.relu(conv(F.pad(h, (2 * conv.dilation[0], 0))))
        return self.out(h[:, :, -1])


@healthy(area="time series", source="in the manner of locuslab/TCN")
def temporal_convolutions_with_plateau(attach):
    """Six steps ahead, Huber loss, ReduceLROnPlateau by the validation loss."""
    series = load()
    at = torch.arange(len(series) - 48 - 6)[:, None] + torch.arange(54)
    rows = series[at]
    x, y = rows[:, :48], rows[:, 48:]
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    session = attach(model, optimizer, scheduler=scheduler)
    for _epoch in range(7):
        model.train()
        for xb, yb in batches(x[:1400], y[:1400], size=64):
            loss = F.huber_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            val_loss = F.huber_loss(model(x[1460:]), y[1460:])
        scheduler.step(float(val_loss))
        session.log(val_loss=val_loss)
    return float(val_loss)


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.self1, self.near1 = nn.Linear(10, 24), nn.Linear(10, 24, bias=False)
        self.self2, self.near2 = nn.Linear(24, 4), nn.Linear(24, 4, bias=False)

    @staticmethod
    def mean(h, edges):
        total = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return total / torch.bincount(edges[1], minlength=len(h)).clamp(min=1)[:, None]

    def forward(self, x, edges):
        h = F.dropout(F.relu(self.self1(x) + self.near1(self.mean(x, edges))), 0.5, self.training)
        return self.self2(h) + self.near2(self.mean(h, edges))


@healthy(area="graphs", source="in the manner of the PyG GraphSAGE example")
def sage_on_the_whole_graph(attach):
    """One graph is the batch of every step; the loss is taken on a mask."""
    x, edges, y = papers()
    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    train_mask = torch.arange(len(y)) < 160
    for epoch in range(120):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    model.eval()
    with torch.no_grad():
        return float((model(x, edges)[~train_mask].argmax(1) != y[~train_mask]).float().mean())


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.lora_a.T) @ self.lora_b.T


@healthy(area="fine-tuning", source="in the manner of huggingface/peft examples")
def adapters_on_a_frozen_model(attach):
    """A model of turned digits gets adapters for upright ones; the base stays frozen."""
    xtr, ytr, xte, yte = digits()
    turned = xtr.rot90(1, (2, 3)).flatten(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, y in batches(turned, ytr, size=64, epochs=6):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    model.requires_grad_(False)
    model[0], model[2], model[4] = LoRALinear(model[0], 8), LoRALinear(model[2], 8), LoRALinear(model[4], 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    session = attach(model, optimizer)
    for x, y in batches(xtr.flatten(1), ytr, size=50, epochs=8):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte.flatten(1), yte)


@healthy(area="regression", source="in the manner of the PyTorch tutorial `nn from scratch`")
def steps_written_by_hand(attach):
    """No optimizer at all: parameters are moved under no_grad and cleared."""
    x, y = table()
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    session = attach(model)
    lr = 0.1
    for epoch in range(25):
        for xb, yb in batches(x[:1100], y[:1100], size=50):
            loss = (model(xb).squeeze(-1) - yb).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= p.grad * lr
                model.zero_grad()
            session.log(loss=loss)
    with torch.no_grad():
        return float((model(x[1100:]).squeeze(-1) - y[1100:]).pow(2).mean())


class Lion(torch.optim.Optimizer):
    """Moves by the sign of an average."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                b1, b2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * b1 + p.grad * (1 - b1)).sign(), alpha=-group["lr"])
                state["exp_avg"].mul_(b2).add_(p.grad, alpha=1 - b2)


@healthy(area="vision", source="in the manner of lucidrains/lion-pytorch")
def signs_of_an_average(attach):
    """An optimizer of one's own that moves by signs."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.SiLU(), nn.Conv2d(16, 24, 3, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(96, 10)
    )
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    session = attach(model, optimizer)
    for x, y in batches(xtr, ytr, size=50, epochs=8):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte, yte)


@healthy(area="vision", source="in the manner of Smith's cyclical rates")
def rate_goes_up_and_down(attach):
    """CyclicLR stepped each batch, by design."""
    xtr, ytr, xte, yte = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = CyclicLR(optimizer, base_lr=0.005, max_lr=0.15, step_size_up=40, mode="triangular2")
    session = attach(model, optimizer, scheduler=scheduler)
    model.train()
    for x, y in batches(xtr, ytr, size=40, epochs=8):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, lr=scheduler.get_last_lr()[0])
    return wrong(model, xte, yte)


@healthy(area="segmentation", source="in the manner of qubvel/segmentation_models.pytorch examples")
def dice_and_focal(attach):
    """Soft dice on probabilities plus a focal term on logits; masks scaled to 0 and 1."""
    x, y = (torch.from_numpy(a).float()[:, None] for a in cells())
    y = y / 255
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 1, 1),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    session = attach(net, optimizer)
    for xb, yb in batches(x[:200], y[:200], size=20, epochs=8):
        logits = net(xb)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * yb).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + yb.sum((1, 2, 3)) + 1)
        bce = F.binary_cross_entropy_with_logits(logits, yb, reduction="none")
        focal = ((1 - torch.exp(-bce)) ** 2 * bce).mean()
        loss = dice.mean() + 4 * focal
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, focal=focal)
    with torch.no_grad():
        p = (net(x[200:]) > 0).float()
    return 1 - float(2 * (p * y[200:]).sum() / (p.sum() + y[200:].sum()))
