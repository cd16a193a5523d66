"""Healthy programs that look ill to a hasty eye."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from fault_programs.dev.datasets import batches, digits, error_rate, houses, images, language, windows
from fault_programs.dev.models import Perceptron, SmallCNN, TinyLM, TinyResNet
from fault_programs.registry import healthy


@healthy(deceptive=True, arch="mlp", task="classification", well=0.15)
def sparse_activations(attach):
    """Nine of ten outputs of the wide rectifier are zero, though every unit fires at times."""
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    nn.init.constant_(model[0].bias, -0.8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            hidden = model[1](model[0](xb))
            loss = F.cross_entropy(model[2](hidden), yb) + 1e-2 * hidden.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@healthy(deceptive=True, arch="mlp", task="classification", well=0.1)
def plateau_before_the_drop(attach):
    """Parity of three bits: the loss lies flat at ln 2 for long, then drops."""
    x = torch.randint(0, 2, (1024, 10)).float() * 2 - 1
    y = (x[:, :3].prod(1) > 0).long()
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    session = attach(model, optimizer, loss_fn=criterion)
    for _ in range(12):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, x, y)


@healthy(deceptive=True, arch="mlp", task="regression", well=0.5)
def spiky_loss(attach):
    """Targets with heavy tails: single batches have ten times the loss."""
    x, y = houses()
    noise = torch.distributions.StudentT(1.6).sample(y.shape) * 0.15
    target = y + noise
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(8):
        for xb, yb in batches(x, target):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb).squeeze(1), yb)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 4.0)
            optimizer.step()
            session.log(loss=loss)
    return F.mse_loss(model(x).squeeze(1), y).item()


@healthy(deceptive=True, arch="gan", task="adversarial", well=1.0)
def two_optimizers_in_turn(attach):
    """A generator and a critic that take turns; the losses hover."""
    generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    session = attach({"generator": generator, "critic": critic}, [opt_g, opt_d])
    centre = torch.tensor([2.0, -1.0])
    bce = F.binary_cross_entropy_with_logits
    for _ in range(160):
        real = torch.randn(64, 2) * 0.5 + centre
        fake = generator(torch.randn(64, 4))
        loss_d = bce(critic(real), torch.ones(64, 1)) + bce(critic(fake.detach()), torch.zeros(64, 1))
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = bce(critic(fake), torch.ones(64, 1))
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        session.log(loss_d=loss_d, loss_g=loss_g)
    return (generator(torch.randn(512, 4)).mean(0) - centre).norm().item()


@healthy(deceptive=True, arch="mlp", task="classification", well=0.15)
def pruned_weights(attach):
    """Four fifths of the weights are pruned and stay at zero."""
    x, y, test_x, test_y = digits()
    model = Perceptron()
    for layer in (model.fc1, model.fc2):
        prune.random_unstructured(layer, "weight", amount=0.8)
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


class LowRank(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.lora_A.T) @ self.lora_B.T


@healthy(deceptive=True, arch="mlp", task="classification", well=0.2)
def lora_with_zero_b(attach):
    """Adapters whose second factor starts at zero, beside frozen layers."""
    x, y, test_x, test_y = digits()
    model = Perceptron()
    model.requires_grad_(False)
    model.fc1, model.fc2, model.fc3 = LowRank(model.fc1), LowRank(model.fc2), LowRank(model.fc3, 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    session = attach(model, optimizer)
    for _ in range(5):
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


@healthy(deceptive=True, arch="cnn", task="classification", well=0.3)
def ema_copy_beside(attach):
    """A moving average of the model is kept and watched; it has no gradient and no optimizer."""
    x, y, test_x, test_y = images()
    model = SmallCNN()
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach({"model": model, "ema": ema}, optimizer)
    for _ in range(4):
        for xb, yb in batches(x, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                    slow.mul_(0.95).add_(fast, alpha=0.05)
            session.log(loss=loss)
        session.log(val_error=error_rate(ema, test_x, test_y))
    return error_rate(ema, test_x, test_y)


@healthy(deceptive=True, arch="resnet", task="classification", well=0.15)
def curriculum_of_classes(attach):
    """The first epoch has five of ten classes only, on purpose."""
    x, y, test_x, test_y = images()
    model = TinyResNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    easy = y < 5
    for epoch in range(5):
        model.train()
        for xb, yb in batches(x[easy], y[easy]) if epoch == 0 else batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return error_rate(model, test_x, test_y)


class Shared(nn.Module):
    """One block, called four times; the output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.block = TinyLM(16, 32, 16, 1).blocks[0]
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), float("-inf")), 1)
        for _ in range(3):
            x = self.block(x, mask)
        return self.head(self.norm(x))


@healthy(deceptive=True, arch="transformer", task="lm", well=1.9)
def shared_block_and_tied_head(attach):
    """One block runs three times and the head is the embedding."""
    x, y = windows(language())
    model = Shared()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    loss = None
    for _ in range(3):
        for xb, yb in batches(x, y, size=32):
            loss = F.cross_entropy(model(xb).transpose(1, 2), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return loss.item()


class MCDropout(nn.Dropout):
    """Drops in evaluation too, to sample from the posterior."""

    def forward(self, x):
        return F.dropout(x, self.p, training=True)


@healthy(deceptive=True, arch="mlp", task="classification", well=0.15)
def dropout_samples_in_eval(attach):
    """Monte Carlo dropout: ten evaluations of the same samples differ on purpose."""
    x, y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), MCDropout(0.2), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(4):
        model.train()
        for xb, yb in batches(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            mean = torch.stack([model(test_x).softmax(1) for _ in range(10)]).mean(0)
        session.log(val_error=(mean.argmax(1) != test_y).float().mean())
    return error_rate(model, test_x, test_y)


@healthy(deceptive=True, arch="cnn", task="classification", well=0.25)
def frozen_backbone(attach):
    """The features are pretrained and frozen; the optimizer has the head only."""
    x, y, test_x, test_y = images()
    model = TinyResNet()
    model.requires_grad_(False)
    model.fc = nn.Linear(model.fc.in_features, 10)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=2e-2)
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
