"""Data that the programs of the eleventh hold-out share: digits, tables, discs, and a corridor to walk along."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine

_LOADERS = {"cancer": load_breast_cancer, "diabetes": load_diabetes, "digits": load_digits, "wine": load_wine}


@lru_cache(maxsize=4)
def _arrays(name):
    x, y = _LOADERS[name](return_X_y=True)
    order = np.random.RandomState(11).permutation(len(x))
    return x[order], y[order]


def digits(train=1200):
    """Return digits for training and for testing, as pictures with values from 0 to 1."""
    x, y = _arrays("digits")
    x = torch.tensor(x / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y, dtype=torch.long)
    return x[:train].clone(), y[:train].clone(), x[train:].clone(), y[train:].clone()


def table(name, train):
    """Return a raw table as numpy arrays: features and targets for training, then for testing."""
    x, y = _arrays(name)
    return x[:train].copy(), y[:train].copy(), x[train:].copy(), y[train:].copy()


def standard(x, *others):
    """Return arrays as float tensors, scaled with the mean and deviation of the first."""
    mean, std = x.mean(0), x.std(0) + 1e-8
    return tuple(torch.tensor((a - mean) / std, dtype=torch.float32) for a in (x, *others))


def discs(count, size=16, noise=0.3):
    """Return noisy pictures with one bright disc each, its mask, and its centre in parts of the picture."""
    centre = 3 + torch.rand(count, 2) * (size - 6)
    radius = 2 + 2 * torch.rand(count)
    at = torch.arange(size, dtype=torch.float32)
    far = (at[None, :, None] - centre[:, 1, None, None]) ** 2 + (at[None, None] - centre[:, 0, None, None]) ** 2
    mask = (far < radius[:, None, None] ** 2).float()[:, None]
    return mask + noise * torch.randn_like(mask), mask, centre / size


class Corridor:
    """Cells in a row: a step right costs a little, the last cell pays; an episode ends there or when time is up."""

    def __init__(self, cells=7, time=20, pay=1.0, cost=0.02):
        self.cells, self.time, self.pay, self.cost = cells, time, pay, cost

    def seen(self):
        out = torch.zeros(self.cells)
        out[self.at] = 1.0
        return out

    def reset(self, at=0):
        self.at, self.left = at, self.time
        return self.seen()

    def step(self, action):
        self.at = max(0, min(self.cells - 1, self.at + (1 if action == 1 else -1)))
        self.left -= 1
        there = self.at == self.cells - 1
        reward = self.pay if there else -self.cost
        return self.seen(), reward, there or self.left == 0


class Aim:
    """A point on a line that should go where the mark is and stay; the nearer, the better; ten steps."""

    def reset(self, generator=None):
        self.place, self.mark = (torch.rand(2, generator=generator) * 2 - 1).tolist()
        self.left = 10
        return torch.tensor([self.place, self.mark])

    def step(self, action):
        self.place = min(1.0, max(-1.0, self.place + 0.3 * (action - 1)))
        self.left -= 1
        return torch.tensor([self.place, self.mark]), -abs(self.place - self.mark), self.left == 0


def distance(choose, games=40):
    """Return how far from the mark a policy is on average, in games that are the same each time."""
    env, made, total = Aim(), torch.Generator().manual_seed(7), 0.0
    with torch.no_grad():
        for _ in range(games):
            seen, over = env.reset(made), False
            while not over:
                seen, reward, over = env.step(int(choose(seen)))
                total -= reward
    return total / games / 10


def spread(a, b):
    """Return the energy distance of two sets of points: 0 if they come from one distribution."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())
