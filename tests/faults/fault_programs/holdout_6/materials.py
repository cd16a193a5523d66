"""Data of the sixth hold-out: digits, cells, countdowns, clips, loads, wine-like tables, graphs and small environments."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training pictures and labels (1397) and test ones (400); pictures (N, 1, 8, 8) from 0 to 1."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(66).permutation(len(x))
    x = torch.tensor(x[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y[order])
    return x[400:], y[400:], x[:400], y[:400]


@cache
def cells(count: int = 260, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy pictures (N, S, S) of floats with one or two bright squares, and masks as in a PNG: 0 and 255."""
    made = np.random.RandomState(601)
    x, y = 0.5 * made.randn(count, size, size), np.zeros((count, size, size), dtype=np.uint8)
    for n in range(count):
        for _ in range(made.randint(1, 3)):
            r, c, k = made.randint(0, size - 5), made.randint(0, size - 5), made.randint(3, 6)
            x[n, r : r + k, c : c + k] += 1.3
            y[n, r : r + k, c : c + k] = 255
    return x.astype(np.float32), y


@cache
def story(length: int = 5000, words: int = 20) -> Tensor:
    """Return a text in which a word depends on the two before."""
    made = np.random.RandomState(602)
    follow = made.randint(0, words, (words, words, 2))
    out = [1, 2]
    for _ in range(length):
        out.append(int(follow[out[-2] % 4, out[-1], made.choice(2, p=[0.85, 0.15])]))
    return torch.tensor(out)


@cache
def clips(count: int = 700, kinds: int = 5, length: int = 40) -> tuple[Tensor, Tensor]:
    """Return short sounds (N, 8, T) as bands of energy, and which of five words was spoken."""
    made = np.random.RandomState(603)
    path = made.randint(0, 8, (kinds, 4))
    x = np.abs(0.4 * made.randn(count, 8, length))
    y = made.randint(0, kinds, count)
    for n in range(count):
        at = made.randint(0, 12)
        for band in path[y[n]]:
            x[n, band, at : at + 6] += 1.2
            at += 6
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@cache
def load(length: int = 1800) -> Tensor:
    """Return the load of a power line: a day, a week and noise, about standard normal."""
    made = np.random.RandomState(604)
    t = np.arange(length)
    y = (
        np.sin(t * 2 * np.pi / 24)
        + 0.5 * np.sin(t * 2 * np.pi / 168)
        + 0.3 * np.sin(t * 2 * np.pi / 6)
        + 0.12 * made.randn(length)
    )
    return torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)


@cache
def table(count: int = 1400) -> tuple[Tensor, Tensor]:
    """Return eight columns and a number that depends on them, both about standard normal."""
    made = torch.Generator().manual_seed(605)
    x = torch.randn(count, 8, generator=made)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.7 * x[:, 3].abs() - 0.6 * x[:, 4]
    y = y + 0.15 * torch.randn(count, generator=made)
    return x, (y - y.mean()) / y.std()


@cache
def papers(nodes: int = 320, kinds: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (N, 10), directed edges (2, E) mostly between like nodes in both directions, and kinds."""
    made = np.random.RandomState(606)
    y = made.randint(0, kinds, nodes)
    like = y[:, None] == y[None, :]
    link = np.triu(made.rand(nodes, nodes) < np.where(like, 0.09, 0.01), 1)
    a, b = np.nonzero(link)
    x = made.randn(kinds, 10)[y] + 2.4 * made.randn(nodes, 10)
    edges = np.stack([np.concatenate([a, b]), np.concatenate([b, a])])
    return torch.tensor(x, dtype=torch.float32), torch.tensor(edges), torch.tensor(y)


@cache
def moons(count: int = 1600) -> Tensor:
    """Return points (N, 2) on two half circles."""
    made = torch.Generator().manual_seed(607)
    angle = torch.rand(count, generator=made) * 3.1416
    upper = torch.rand(count, generator=made) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    return torch.stack([x, y], 1) * 1.3 + 0.06 * torch.randn(count, 2, generator=made)


class Walk:
    """A walk of eight places: start anywhere, the right end pays 1, the left end 0.1, both end it; a step costs a little."""

    size = 8

    def reset(self) -> Tensor:
        self.at, self.time = int(torch.randint(1, 7, ())), 0
        return self.state()

    def state(self) -> Tensor:
        return torch.eye(self.size)[self.at]

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at += 1 if action == 1 else -1
        self.time += 1
        reward = 1.0 if self.at == 7 else 0.1 if self.at == 0 else -0.02
        return self.state(), reward, self.at in (0, 7) or self.time >= 40


def batches(*columns: Tensor, size: int, epochs: int = 1):
    """Yield shuffled batches, epoch after epoch, without short ones."""
    for _ in range(epochs):
        order = torch.randperm(len(columns[0]))
        for start in range(0, len(order) - size + 1, size):
            pick = order[start : start + size]
            yield tuple(column[pick] for column in columns)


@torch.no_grad()
def wrong(model, x: Tensor, y: Tensor) -> float:
    """Return the share of wrong classes, in evaluation mode."""
    was = model.training
    model.eval()
    share = float((model(x).argmax(-1) != y).float().mean())
    model.train(was)
    return share


@torch.no_grad()
def apart(a: Tensor, b: Tensor) -> float:
    """Return the energy distance of two clouds of points."""
    between = torch.cdist(a, b).mean()
    return float(2 * between - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())
