"""Data of the fifth hold-out: digits, masks, boxes, tokens, frames, series, graphs, ratings and small environments."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training pictures and labels (1297) and test ones (500); pictures (N, 1, 8, 8) from 0 to 1."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(51).permutation(len(x))
    x = torch.tensor(x[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y[order])
    return x[500:], y[500:], x[:500], y[:500]


@cache
def colours(count: int = 900) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures (N, 8, 8, 3) of bytes, one bright stripe in one of three colours and two directions; six classes."""
    made = np.random.RandomState(52)
    x = made.randint(0, 90, (count, 8, 8, 3))
    y = made.randint(0, 6, count)
    for n in range(count):
        at = made.randint(0, 8)
        if y[n] < 3:
            x[n, at, :, y[n]] += 150
        else:
            x[n, :, at, y[n] - 3] += 150
    return x.astype(np.uint8), y.astype(np.int64)


@cache
def scans(count: int = 300, size: int = 16, rare: bool = False) -> tuple[Tensor, Tensor]:
    """Return noisy scans (N, 1, S, S) with a disc on the left half, and its mask of 0.0 and 1.0."""
    made = np.random.RandomState(53)
    grid = np.arange(size)
    x, y = 0.6 * made.randn(count, 1, size, size), np.zeros((count, 1, size, size))
    for n in range(count):
        r, c, reach = made.randint(3, size - 3), made.randint(2, size // 2 - 1), 1.5 if rare else made.randint(2, 4)
        inside = (grid[:, None] - r) ** 2 + (grid[None, :] - c) ** 2 <= reach**2
        x[n, 0][inside] += 1.4
        y[n, 0][inside] = 1.0
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


@cache
def markov(length: int = 6000, words: int = 24, seed: int = 54) -> Tensor:
    """Return a text in which a word depends on the one before."""
    made = np.random.RandomState(seed)
    follow = made.randint(1, words, (words, 3))
    out = [1]
    for _ in range(length):
        out.append(int(follow[out[-1], made.choice(3, p=[0.75, 0.2, 0.05])]))
    return torch.tensor(out)


@cache
def reviews(count: int = 1200, length: int = 16, words: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return texts (N, T) padded with 0 at the end, their lengths, and whether words up to 20 outnumber the others."""
    made = np.random.RandomState(55)
    x, y, n_words = (
        np.zeros((count, length), dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, np.int64),
    )
    for n in range(count):
        many = 2 * made.randint(1, length // 4) + 1
        x[n, :many] = made.randint(1, words, many)
        y[n], n_words[n] = int((x[n, :many] <= 20).sum() * 2 > many), many
    return torch.tensor(x), torch.tensor(n_words), torch.tensor(y)


@cache
def sorting(count: int = 1500, length: int = 8, words: int = 12) -> tuple[Tensor, Tensor]:
    """Return rows of different words and whether the largest comes in the first half: only the order counts."""
    made = np.random.RandomState(56)
    x = np.stack([made.permutation(words)[:length] for _ in range(count)])
    return torch.tensor(x), torch.tensor((x.argmax(1) < length // 2).astype(np.int64))


@cache
def tagged(count: int = 800, length: int = 12, words: int = 20) -> tuple[Tensor, Tensor]:
    """Return sentences (N, T) and a tag of four for each word, from the word and the one before."""
    made = np.random.RandomState(57)
    x = made.randint(0, words, (count, length))
    before = np.concatenate([np.zeros((count, 1), dtype=np.int64), x[:, :-1]], 1)
    return torch.tensor(x), torch.tensor((x % 2) * 2 + (before % 2))


@cache
def utterances(count: int = 500, letters: int = 6, labels: int = 4, base: int = 1):
    """Return frames (N, T, 10) of spoken letters, the letters (N, labels) counted from `base`, no two equal in a row."""
    made = np.random.RandomState(58)
    shape = made.randn(letters, 10)
    frames, spoken = 0.3 * made.randn(count, 24, 10), np.zeros((count, labels), dtype=np.int64)
    for n in range(count):
        at, last = made.randint(0, 3), -1
        for k in range(labels):
            letter = made.choice([c for c in range(letters) if c != last])
            long = made.randint(3, 6)
            frames[n, at : at + long] += shape[letter]
            spoken[n, k], last, at = letter + base, letter, at + long
    return torch.tensor(frames, dtype=torch.float32), torch.tensor(spoken)


@cache
def demand(length: int = 2000) -> Tensor:
    """Return a series with two seasons, a slow wander and noise, about standard normal."""
    made = np.random.RandomState(59)
    t = np.arange(length)
    wander = np.cumsum(made.randn(length)) * 0.02
    y = np.sin(t / 3.0) + 0.6 * np.sin(t / 11.0) + wander + 0.15 * made.randn(length)
    return torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)


def windows(series: Tensor, length: int, ahead: int = 1) -> tuple[Tensor, Tensor]:
    """Return all windows (N, length) and the value `ahead` steps after each."""
    at = torch.arange(len(series) - length - ahead + 1)[:, None] + torch.arange(length)
    return series[at], series[at[:, -1] + ahead]


@cache
def plant(count: int = 1500) -> tuple[Tensor, Tensor]:
    """Return six readings (N, 6) and what they lead to (N,), both about standard normal."""
    made = torch.Generator().manual_seed(60)
    x = torch.randn(count, 6, generator=made)
    y = x[:, 0] * x[:, 1] + torch.cos(2 * x[:, 2]) + 0.8 * x[:, 3] - 0.5 * x[:, 4].abs()
    y = y + 0.1 * torch.randn(count, generator=made)
    return x, (y - y.mean()) / y.std()


@cache
def citations(nodes: int = 300, classes: int = 4, dense: float = 0.03) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (N, 12), a symmetric adjacency (N, N) of mostly like nodes, and classes."""
    made = np.random.RandomState(61)
    y = made.randint(0, classes, nodes)
    like = y[:, None] == y[None, :]
    link = np.triu(made.rand(nodes, nodes) < np.where(like, dense * 4, dense / 3), 1)
    a = (link | link.T).astype(np.float32)
    centre = made.randn(classes, 12)
    x = centre[y] + 2.2 * made.randn(nodes, 12)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(a), torch.tensor(y)


@cache
def ratings(users: int = 80, items: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs of users and items that were liked, (P,) each, and the table of likes (users, items)."""
    made = np.random.RandomState(62)
    taste = made.randn(users, 4) @ made.randn(4, items) + 0.3 * made.randn(users, items)
    liked = taste > 1.5
    u, i = np.nonzero(liked)
    return torch.tensor(u), torch.tensor(i), torch.tensor(liked)


@cache
def ring(count: int = 2000) -> Tensor:
    """Return points (N, 2) near a circle of radius 1.5."""
    made = torch.Generator().manual_seed(63)
    angle = torch.rand(count, generator=made) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], 1) * 1.5 + 0.1 * torch.randn(count, 2, generator=made)


class Corridor:
    """A corridor of seven places: start in the middle, right end pays 1, left end costs; each step costs a little."""

    size = 7

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> Tensor:
        self.at, self.time = 3, 0
        return self.state()

    def state(self) -> Tensor:
        return torch.eye(self.size)[self.at]

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at += 1 if action == 1 else -1
        self.time += 1
        reward = 1.0 if self.at == 6 else -1.0 if self.at == 0 else -0.05
        return self.state(), reward, self.at in (0, 6) or self.time >= 30


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
    share = float((model(x).argmax(1) != y).float().mean())
    model.train(was)
    return share
