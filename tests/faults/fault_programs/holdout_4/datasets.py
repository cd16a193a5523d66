"""Data of the fourth hold-out: digits, tumours, moons, blobs to segment, tokens, melodies and sums."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_moons
from torch import Tensor


@cache
def pictures() -> tuple[Tensor, Tensor]:
    """Return digit pictures (N, 1, 8, 8), standardised as a whole, with labels."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(41).permutation(len(x))
    x = (x[order] - x.mean()) / x.std()
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y[order])


@cache
def raw_pictures() -> tuple[Tensor, Tensor]:
    """Return digit pictures (N, 8, 8) of whole numbers up to 255, as a camera gives them, with labels."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(41).permutation(len(x))
    return torch.tensor(x[order] * 15.0, dtype=torch.uint8).view(-1, 8, 8), torch.tensor(y[order])


@cache
def tumours() -> tuple[Tensor, Tensor]:
    """Return thirty measurements of tumours as measured (0.001 to 4000), and whether they are benign."""
    x, y = load_breast_cancer(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@cache
def wines() -> tuple[Tensor, Tensor]:
    """Return thirteen standardised measurements of wines and which of three growers made them."""
    x, y = load_wine(return_X_y=True)
    return torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32), torch.tensor(y)


@cache
def moons(count: int = 1000) -> tuple[Tensor, Tensor]:
    """Return points of two interleaved moons, and which one each belongs to."""
    x, y = make_moons(count, noise=0.15, random_state=42)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@cache
def power(count: int = 1200) -> tuple[Tensor, Tensor]:
    """Return six readings of a plant (N, 6) and its output (N,), both about standard normal."""
    made = torch.Generator().manual_seed(43)
    x = torch.randn(count, 6, generator=made)
    y = x[:, 0] * x[:, 1] + torch.cos(2 * x[:, 2]) + 0.8 * x[:, 3] - 0.5 * x[:, 4].abs()
    y = y + 0.1 * torch.randn(count, generator=made)
    return x, (y - y.mean()) / y.std()


@cache
def blobs(count: int = 300, size: int = 12) -> tuple[Tensor, Tensor]:
    """Return noisy scans (N, 1, S, S) with a bright blob, and the mask of the blob as 0.0 and 1.0."""
    made = np.random.RandomState(44)
    grid = np.arange(size)
    x, y = 0.5 * made.randn(count, 1, size, size), np.zeros((count, 1, size, size))
    for n in range(count):
        row, column, reach = made.randint(2, size - 2), made.randint(2, size - 2), made.randint(2, 4)
        inside = (grid[:, None] - row) ** 2 + (grid[None, :] - column) ** 2 <= reach**2
        x[n, 0][inside] += 1.5
        y[n, 0][inside] = 1.0
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


@cache
def reviews(count: int = 1000, length: int = 24, words: int = 30) -> tuple[Tensor, Tensor]:
    """Return short reviews (N, T) padded with 0 to a length few of them need, and whether they praise.

    Words up to 15 praise and those above blame; the majority decides. A review has three to nine words.
    """
    made = np.random.RandomState(45)
    x, y = np.zeros((count, length), dtype=np.int64), np.zeros(count, dtype=np.int64)
    for n in range(count):
        many = 2 * made.randint(1, 5) + 1
        x[n, :many] = made.randint(1, words, many)
        y[n] = int((x[n, :many] <= 15).sum() * 2 > many)
    return torch.tensor(x), torch.tensor(y)


@cache
def text(length: int = 5000, words: int = 20) -> Tensor:
    """Return a text in which a word is followed by one of three, of which one is likely."""
    made = np.random.RandomState(46)
    follow = made.randint(0, words, (words, 3))
    out = [1]
    for _ in range(length):
        out.append(int(follow[out[-1], made.choice(3, p=[0.7, 0.2, 0.1])]))
    return torch.tensor(out)


@cache
def orders(count: int = 1200, length: int = 8, words: int = 12) -> tuple[Tensor, Tensor]:
    """Return rows of different words (N, T) and whether the largest comes in the first half: only order counts."""
    made = np.random.RandomState(47)
    x = np.stack([made.permutation(words)[:length] for _ in range(count)])
    return torch.tensor(x), torch.tensor((x.argmax(1) < length // 2).astype(np.int64))


@cache
def melodies(count: int = 800, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return series (N, T, 3) and the sign (N,) of a discounted sum of their first channel."""
    made = torch.Generator().manual_seed(48)
    x = torch.randn(count, length, 3, generator=made)
    fade = 0.9 ** torch.arange(length - 1, -1, -1.0)
    return x, ((x[..., 0] * fade).sum(1) > 0).long()


def windows(series: Tensor, length: int, size: int, steps: int):
    """Yield batches of stretches of a text and of the same stretches one word on."""
    for _ in range(steps):
        start = torch.randint(len(series) - length - 1, (size, 1)) + torch.arange(length)
        yield series[start], series[start + 1]


def batches(*columns: Tensor, size: int, epochs: int):
    """Yield shuffled batches of the columns, epoch after epoch; the last one of an epoch is left out if it is short."""
    for _ in range(epochs):
        order = torch.randperm(len(columns[0]))
        for start in range(0, len(order) - size + 1, size):
            pick = order[start : start + size]
            yield tuple(column[pick] for column in columns)


def late(losses: list[float], count: int = 20) -> float:
    """Return the mean of the last losses."""
    return sum(losses[-count:]) / len(losses[-count:])
