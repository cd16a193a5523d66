"""Data of the seventh hold-out: digits, blobs to cut out, prose, sounds, sales, a table, a citation graph, rings and a corridor."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


@cache
def pictures() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training digits (1397, 1, 8, 8) standardised, their labels, then 400 for testing."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(77).permutation(len(x))
    x = torch.tensor((x[order] / 16.0 - 0.305) / 0.376, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y[order])
    return x[400:], y[400:], x[:400], y[:400]


@cache
def blobs(count: int = 240, size: int = 20) -> tuple[Tensor, Tensor]:
    """Return grey pictures (N, 1, S, S) with a disc somewhere, and the mask of the disc."""
    made = np.random.RandomState(701)
    grid = np.mgrid[0:size, 0:size]
    x, y = 0.4 * made.randn(count, 1, size, size), np.zeros((count, 1, size, size))
    for n in range(count):
        r, c, k = made.randint(4, size - 4), made.randint(4, size - 4), made.randint(2, 5)
        y[n, 0] = (grid[0] - r) ** 2 + (grid[1] - c) ** 2 <= k * k
    x += 1.2 * y
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


@cache
def prose(length: int = 6000, words: int = 24) -> Tensor:
    """Return a text in which a token follows from the two before it, mostly."""
    made = np.random.RandomState(702)
    follow = made.randint(1, words, (5, words, 2))
    out = [1, 2]
    for _ in range(length):
        out.append(int(follow[out[-2] % 5, out[-1], made.choice(2, p=[0.88, 0.12])]))
    return torch.tensor(out)


def chunks(text: Tensor, length: int, size: int, steps: int):
    """Yield `steps` batches (size, length + 1) cut from a text at random."""
    for _ in range(steps):
        at = torch.randint(0, len(text) - length - 1, (size,))
        yield torch.stack([text[a : a + length + 1] for a in at])


@cache
def sounds(count: int = 600, kinds: int = 6, length: int = 36) -> tuple[Tensor, Tensor]:
    """Return energies (N, T, 10) of short words, and which of six was spoken."""
    made = np.random.RandomState(703)
    path = made.randint(0, 10, (kinds, 3))
    x = 0.5 * made.randn(count, length, 10)
    y = made.randint(0, kinds, count)
    for n in range(count):
        at = made.randint(0, 14)
        for band in path[y[n]]:
            x[n, at : at + 6, band] += 1.6
            at += 6
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@cache
def sales(length: int = 1600) -> Tensor:
    """Return the sales of a shop: a week, a season and noise, about standard normal."""
    made = np.random.RandomState(704)
    t = np.arange(length)
    y = np.sin(t * 2 * np.pi / 7) + 0.8 * np.sin(t * 2 * np.pi / 60) + 0.15 * made.randn(length)
    return torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)


@cache
def windows(past: int = 20, ahead: int = 6) -> tuple[Tensor, Tensor]:
    """Return all windows of the sales (N, past) and what came next (N, ahead)."""
    cut = sales().unfold(0, past + ahead, 1)
    return cut[:, :past].clone(), cut[:, past:].clone()


@cache
def table(count: int = 1300) -> tuple[Tensor, Tensor]:
    """Return seven columns and a number that follows from them, both about standard normal."""
    made = torch.Generator().manual_seed(705)
    x = torch.randn(count, 7, generator=made)
    y = torch.sin(1.7 * x[:, 0]) + 0.8 * x[:, 1] * x[:, 2] + 0.6 * x[:, 3].clamp(min=0) - 0.5 * x[:, 4]
    y = y + 0.1 * torch.randn(count, generator=made)
    return x, (y - y.mean()) / y.std()


@cache
def citations(nodes: int = 360, kinds: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (N, 12), a symmetric adjacency matrix without loops (N, N), and kinds (N,)."""
    made = np.random.RandomState(706)
    y = made.randint(0, kinds, nodes)
    like = y[:, None] == y[None, :]
    link = np.triu(made.rand(nodes, nodes) < np.where(like, 0.08, 0.008), 1)
    x = made.randn(kinds, 12)[y] + 2.6 * made.randn(nodes, 12)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(link | link.T, dtype=torch.float32), torch.tensor(y)


def normal_adjacency(adj: Tensor) -> Tensor:
    """Return the adjacency matrix with loops, normalised on both sides."""
    adj = adj + torch.eye(len(adj))
    scale = adj.sum(1).rsqrt()
    return scale[:, None] * adj * scale[None, :]


@cache
def rings(count: int = 1500) -> Tensor:
    """Return points (N, 2) on two rings."""
    made = torch.Generator().manual_seed(707)
    angle = torch.rand(count, generator=made) * 6.2832
    radius = torch.where(torch.rand(count, generator=made) < 0.5, 0.6, 1.5)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=made)


class Corridor:
    """A corridor of seven places: the door is at the right end, a step costs 0.05, an episode ends after 25 steps."""

    places = 7

    def reset(self) -> Tensor:
        self.at, self.time = int(torch.randint(0, 6, ())), 0
        return self.seen()

    def seen(self) -> Tensor:
        return torch.eye(self.places)[self.at]

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at = min(max(self.at + (1 if action == 1 else -1), 0), 6)
        self.time += 1
        done = self.at == 6
        return self.seen(), 1.0 if done else -0.05, done or self.time >= 25


def batches(*columns: Tensor, size: int, epochs: int = 1):
    """Yield shuffled batches, epoch after epoch, without short ones."""
    for _ in range(epochs):
        order = torch.randperm(len(columns[0]))
        for start in range(0, len(order) - size + 1, size):
            pick = order[start : start + size]
            yield tuple(column[pick] for column in columns)


@torch.no_grad()
def error_rate(model, x: Tensor, y: Tensor) -> float:
    """Return the share of wrong classes, in evaluation mode."""
    was = model.training
    model.eval()
    share = float((model(x).argmax(-1) != y).float().mean())
    model.train(was)
    return share


@torch.no_grad()
def energy_distance(a: Tensor, b: Tensor) -> float:
    """Return how far two clouds of points are from each other."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


@torch.no_grad()
def regret(policy, episodes: int = 40) -> float:
    """Return 1 minus the mean reward of a policy that acts greedily in the corridor: about 0.12 at best."""
    env, total = Corridor(), 0.0
    for _ in range(episodes):
        seen, done = env.reset(), False
        while not done:
            seen, reward, done = env.step(int(policy(seen).argmax()))
            total += reward
    return 1 - total / episodes
