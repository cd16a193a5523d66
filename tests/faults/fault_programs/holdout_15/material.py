"""Data that the programs of the fifteenth hold-out share: digits, waves, a table of loans, marked sentences, a tightrope."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits


@lru_cache(maxsize=1)
def _digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(15).permutation(len(images))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    return x, torch.tensor(labels[order], dtype=torch.long)


def digits(train=1200):
    """Return digits for training and for testing, with values from 0 to 1."""
    x, y = _digits()
    return x[:train].clone(), y[:train].clone(), x[train:].clone(), y[train:].clone()


def wrong(model, x, y):
    """Return which share of the answers is wrong."""
    with torch.no_grad():
        return float((model(x).argmax(1) != y).float().mean())


def motions(count, kinds=6, length=32):
    """Return windows of three noisy sensors, each kind with a frequency and a phase between sensors of its own."""
    kind = torch.randint(0, kinds, (count,))
    t = torch.arange(length) / length
    frequency = 1 + kind % 3
    lag = (kind // 3)[:, None] * 0.25
    start = torch.rand(count, 1)
    base = frequency[:, None] * t
    x = torch.stack([torch.sin(2 * torch.pi * (base + start + i * lag)) for i in range(3)], 1)
    return x + 0.4 * torch.randn(count, 3, length), kind


def loans(count):
    """Return eight standardised columns of a table and a number that depends on them in a bent way."""
    x = torch.randn(count, 8)
    y = 1.2 * x[:, 0] - 0.7 * x[:, 1] + x[:, 2] * x[:, 3] + torch.relu(x[:, 4]) + 0.1 * torch.randn(count)
    return x, y


def sentences(count, length=16, topics=6, vocab=60):
    """Return ids of words from 20 on, with two words in each that tell its topic."""
    topic = torch.randint(0, topics, (count,))
    ids = torch.randint(20, vocab, (count, length))
    at = torch.stack([torch.randperm(length)[:2] for _ in range(count)])
    ids.scatter_(1, at, torch.stack([2 + topic, 2 + topics + topic], 1))
    return ids, topic


def rings(count):
    """Return points on two rings about the origin."""
    angle = 2 * torch.pi * torch.rand(count)
    radius = torch.where(torch.rand(count) < 0.5, 1.0, 0.4) + 0.04 * torch.randn(count)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1)


def spread(a, b):
    """Return the energy distance of two sets of points: 0 if they come from one distribution."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


class Tightrope:
    """Keep a walker near the middle: it drifts outwards, actions push left, nothing, right; a fall ends the walk."""

    actions, most = 3, 40

    def reset(self):
        self.x, self.v, self.t = float(torch.rand(()) - 0.5), 0.0, 0
        return self.seen()

    def seen(self):
        return torch.tensor([self.x, self.v])

    def step(self, action):
        self.v += 0.12 * (action - 1) + 0.06 * self.x + 0.02 * float(torch.randn(()))
        self.x += self.v
        self.t += 1
        fell = abs(self.x) > 1.2
        reward = 0.0 if fell else 1.0 - 0.5 * abs(self.x)
        return self.seen(), reward, fell or self.t >= self.most


def falls_short(choose, walks=25):
    """Return by how much the walks of a policy stay behind the most that can be earned, as a share."""
    world, total = Tightrope(), 0.0
    with torch.no_grad():
        for _ in range(walks):
            seen, over = world.reset(), False
            while not over:
                seen, reward, over = world.step(int(choose(seen)))
                total += reward
    return 1 - total / (walks * Tightrope.most)
