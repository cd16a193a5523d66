"""Programs in which nothing is wrong: one for each common pair of architecture and optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from fault_programs.dev.datasets import (
    batches,
    digits,
    error_rate,
    houses,
    images,
    language,
    rings,
    sentences,
    waves,
    windows,
)
from fault_programs.dev.models import (
    VAE,
    AutoEncoder,
    Mixture,
    Perceptron,
    Recurrent,
    SentenceEncoder,
    SmallCNN,
    TinyLM,
    TinyResNet,
)
from fault_programs.registry import healthy


@healthy(arch="mlp", task="classification", well=0.1)
def mlp_sgd(attach):
    x, y, test_x, test_y = digits()
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(4):
        for xb, yb in batches(x, y):
            loss = loss_fn(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@healthy(arch="mlp", task="regression", well=0.2)
def mlp_adam_regression(attach):
    x, y = houses()
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(8):
        for xb, yb in batches(x, y):
            loss = F.mse_loss(model(xb), yb.unsqueeze(1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    return F.mse_loss(model(x).squeeze(1), y).item()


@healthy(arch="mlp", task="classification", well=0.1)
def mlp_binary_rmsprop(attach):
    x, y = rings()
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            out = model(xb).squeeze(1)
            loss = criterion(out, yb.float())
            loss.backward()
            optimizer.step()
            session.log(loss=loss, accuracy=((out > 0) == yb).float().mean())
    return ((model(x).squeeze(1) > 0) != y).float().mean().item()


@healthy(arch="cnn", task="classification", well=0.2)
def cnn_adam_with_validation(attach):
    x, y, test_x, test_y = images()
    model = SmallCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    train_loader, val_loader = batches(x, y), batches(test_x, test_y, shuffle=False)
    session = attach(model, optimizer, loss_fn=criterion, loader=train_loader)
    for epoch in range(4):
        session.epoch(epoch)
        model.train()
        for xb, yb in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        total = 0.0
        with torch.no_grad():
            for xb, yb in val_loader:
                total += criterion(model(xb), yb).item() * len(xb)
        session.log(val_loss=total / len(test_x))
    return error_rate(model, test_x, test_y)


@healthy(arch="cnn", task="classification", well=0.2)
def cnn_sgd_one_cycle(attach):
    x, y, test_x, test_y = images()
    model = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=4 * 23)
    session = attach(model, optimizer, scheduler=scheduler)
    for _ in range(4):
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@healthy(arch="resnet", task="classification", well=0.1)
def resnet_sgd_step_schedule(attach):
    x, y, test_x, test_y = images()
    model = TinyResNet(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.3)
    session = attach(model, optimizer, scheduler=scheduler)
    for _ in range(4):
        model.train()
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        scheduler.step()
        session.log(val_error=error_rate(model, test_x, test_y))
    return error_rate(model, test_x, test_y)


@healthy(arch="resnet", task="classification", well=0.1)
def resnet_adamw_cosine(attach):
    x, y, test_x, test_y = images()
    model = TinyResNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    scheduler = CosineAnnealingLR(optimizer, T_max=92)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@healthy(arch="lstm", task="classification", well=0.1)
def lstm_adam_clipped(attach):
    x, y = waves()
    model = Recurrent(nn.LSTM)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(9):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, x, y)


@healthy(arch="gru", task="classification", well=0.1)
def gru_sgd(attach):
    x, y = waves()
    model = Recurrent(nn.GRU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    session = attach(model, optimizer)
    for _ in range(10):
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
    return error_rate(model, x, y)


@healthy(arch="transformer", task="lm", well=1.9)
def lm_adamw_groups(attach):
    x, y = windows(language())
    model = TinyLM()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=4e-3
    )
    session = attach(model, optimizer)
    loss = None
    for _ in range(4):
        for xb, yb in batches(x, y, size=32):
            logits = model(xb)
            loss = F.cross_entropy(logits.view(-1, 16), yb.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            session.log(loss=loss)
    return loss.item()


@healthy(arch="transformer", task="classification", well=0.2)
def sentence_encoder_adam(attach):
    ids, padded, y = sentences()
    model = SentenceEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(8):
        for a, mask, b in batches(ids, padded, y):
            batch = {"input": a, "mask": mask, "label": b}
            optimizer.zero_grad()
            loss = criterion(model(batch["input"], batch["mask"]), batch["label"])
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    model.eval()
    return (model(ids, padded).argmax(1) != y).float().mean().item()


@healthy(arch="autoencoder", task="reconstruction", well=0.25)
def autoencoder_adam(attach):
    x, _, test, _ = digits()
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(5):
        for (xb,) in batches(x):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), xb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(test), test).item()


@healthy(arch="vae", task="reconstruction", well=0.5)
def vae_adam(attach):
    x, _, test, _ = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(5):
        for (xb,) in batches(x):
            out, mean, log_var = model(xb)
            rebuilt = F.mse_loss(out, xb)
            kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
            loss = rebuilt + 0.01 * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss, rebuilt=rebuilt, kl=kl)
    return F.mse_loss(model(test)[0], test).item()


@healthy(arch="moe", task="classification", well=0.15)
def mixture_adam(attach):
    x, y, test_x, test_y = digits()
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@healthy(arch="cnn", task="classification", well=0.2)
def cnn_logs_nothing(attach):
    x, y, test_x, test_y = images()
    model = SmallCNN()
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
    attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(xb), dim=1), yb).backward()
            optimizer.step()
    return error_rate(model, test_x, test_y)
