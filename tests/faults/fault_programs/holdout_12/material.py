"""Data that the programs of the twelfth hold-out share: digits, spots, a table of houses, a corridor."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits


@lru_cache(maxsize=1)
def _digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(12).permutation(len(images))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    return x, torch.tensor(labels[order], dtype=torch.long)


def digits(train=1200):
    """Return digits for training and for testing, with values from 0 to 1."""
    x, y = _digits()
    return x[:train].clone(), y[:train].clone(), x[train:].clone(), y[train:].clone()


def spots(count, size=12, noise=0.3):
    """Return noisy pictures with one bright rectangle, and the mask of it."""
    masks = torch.zeros(count, 1, size, size)
    for mask in masks:
        i, j = torch.randint(0, size - 5, (2,)).tolist()
        h, w = torch.randint(3, 6, (2,)).tolist()
        mask[0, i : i + h, j : j + w] = 1
    return noise * torch.randn(count, 1, size, size) + masks, masks


def houses(count, features=8):
    """Return a table of standardised features and a price that depends on them in a bent way."""
    x = torch.randn(count, features)
    w = torch.linspace(-1, 1, features)
    y = x @ w + 0.8 * torch.sin(2 * x[:, 0]) * x[:, 1] + 0.05 * torch.randn(count)
    return x, y


def spread(a, b):
    """Return the energy distance of two sets of points: 0 if they come from one distribution."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def moons(count):
    """Return points on two arcs, in random order."""
    t = torch.rand(count) * np.pi
    up = torch.rand(count) < 0.5
    x = torch.where(up, torch.cos(t), 1 - torch.cos(t))
    y = torch.where(up, torch.sin(t), 0.5 - torch.sin(t))
    return torch.stack([x - 0.5, y - 0.25], 1) + 0.05 * torch.randn(count, 2)


class Corridor:
    """A walker in a corridor of nine places: the right end pays 1, the left end 0.2, every step costs a little."""

    actions = 2

    def reset(self):
        self.place, self.left = int(torch.randint(2, 5, ())), 25
        return self._seen()

    def _seen(self):
        return torch.nn.functional.one_hot(torch.tensor(self.place), 9).float()

    def step(self, action):
        self.place += 1 if action == 1 else -1
        self.left -= 1
        end = self.place in (0, 8)
        reward = {0: 0.2, 8: 1.0}.get(self.place, -0.02)
        return self._seen(), reward, end or self.left == 0


def shortfall(choose, games=40):
    """Return by how much a policy earns less than 1 on average."""
    world, total = Corridor(), 0.0
    with torch.no_grad():
        for game in range(games):
            seen, over = world.reset(), False
            world.place = 2 + game % 3
            seen = world._seen()
            while not over:
                seen, reward, over = world.step(int(choose(seen)))
                total += reward
    return 1 - total / games
