"""Data that the programs of the tenth hold-out share: digits, drawn shapes, a game on a rail."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits


@lru_cache(maxsize=1)
def _digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(10).permutation(len(images))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    return x, torch.tensor(labels[order], dtype=torch.long)


def digits(train=1200):
    """Return digits for training and for testing, with values from 0 to 1."""
    x, y = _digits()
    return x[:train].clone(), y[:train].clone(), x[train:].clone(), y[train:].clone()


def boxes(count, size=12, noise=0.1):
    """Return noisy pictures with one bright rectangle, and its centre, width and height in parts of the picture."""
    pictures = noise * torch.randn(count, 1, size, size)
    w, h = torch.randint(2, 7, (count,)), torch.randint(2, 7, (count,))
    x = (torch.rand(count) * (size - w + 1)).long()
    y = (torch.rand(count) * (size - h + 1)).long()
    for i in range(count):
        pictures[i, 0, y[i] : y[i] + h[i], x[i] : x[i] + w[i]] += 1.0
    return pictures, torch.stack([x + w / 2, y + h / 2, w.float(), h.float()], 1) / size


def overlap(a, b):
    """Return the intersection over union of boxes given by centre, width and height."""
    low = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
    high = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
    both = (high - low).clamp(min=0).prod(1)
    return both / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - both).clamp(min=1e-6)


def spread(a, b):
    """Return the energy distance of two sets of points: 0 if they come from one distribution."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


class Rail:
    """A cart on a rail that should stand where a lamp is: the closer, the better."""

    actions = 3

    def __init__(self, steps=10):
        self.steps = steps

    def reset(self):
        self.place, self.lamp = (torch.rand(2) * 2 - 1).tolist()
        self.left = self.steps
        return torch.tensor([self.place, self.lamp])

    def step(self, action):
        self.place = min(1.0, max(-1.0, self.place + 0.3 * (action - 1)))
        self.left -= 1
        return torch.tensor([self.place, self.lamp]), -abs(self.place - self.lamp), self.left == 0


def missed(choose, games=40, steps=10):
    """Return how far from the lamp a policy is on average, in games that are the same each time."""
    rail, made, total = Rail(steps), torch.Generator().manual_seed(99), 0.0
    with torch.no_grad():
        for _ in range(games):
            rail.reset()
            rail.place, rail.lamp = (torch.rand(2, generator=made) * 2 - 1).tolist()
            seen, over = torch.tensor([rail.place, rail.lamp]), False
            while not over:
                seen, reward, over = rail.step(int(choose(seen)))
                total -= reward
    return total / games / steps
