"""Data of the third hold-out: digits, tables, shapes to segment, sentences with padding, spirals and series."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return digit images (N, 1, 8, 8) between 0 and 1, in a fixed random order, with labels."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(21).permutation(len(x))
    return torch.tensor(x[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y[order])


@cache
def houses(count: int = 1000) -> tuple[Tensor, Tensor]:
    """Return eight standardised features of houses (N, 8) and a price in thousands (N,), standardised too."""
    made = torch.Generator().manual_seed(22)
    x = torch.randn(count, 8, generator=made)
    price = (
        2 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + torch.sin(2 * x[:, 4]) + 0.2 * torch.randn(count, generator=made)
    )
    return x, (price - price.mean()) / price.std()


@cache
def progress() -> tuple[Tensor, Tensor]:
    """Return ten measurements of patients and the raw score of their illness, 25 to 346."""
    x, y = load_diabetes(return_X_y=True)
    return torch.tensor(x / x.std(0), dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


@cache
def shapes(count: int = 400, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (N, 1, S, S) with a square or a disc, and a mask of classes 0, 1, 2 for each pixel."""
    made = np.random.RandomState(23)
    grid = np.arange(size)
    x, y = made.randn(count, 1, size, size) * 0.3, np.zeros((count, size, size), dtype=np.int64)
    for n in range(count):
        row, column, reach = made.randint(4, size - 4), made.randint(4, size - 4), made.randint(2, 5)
        down, right = np.abs(grid[:, None] - row), np.abs(grid[None, :] - column)
        if n % 2:
            inside = (down <= reach) & (right <= reach)
            x[n, 0][inside] += 1.0
        else:
            inside = down**2 + right**2 <= reach**2
            x[n, 0][inside] -= 1.0
        y[n][inside] = 1 + n % 2
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@cache
def sentences(count: int = 900, length: int = 14, words: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded sentences (N, T) of word numbers from 1, their lengths, and which of two topics they have."""
    made = np.random.RandomState(24)
    x, lengths, topic = (
        np.zeros((count, length), dtype=np.int64),
        made.randint(4, length, count),
        made.randint(0, 2, count),
    )
    half = (words - 1) // 2
    for n in range(count):
        own = made.rand(lengths[n]) < 0.75
        which = np.where(own, topic[n], 1 - topic[n])
        x[n, : lengths[n]] = 1 + made.randint(0, half, lengths[n]) + half * which
    return torch.tensor(x), torch.tensor(lengths), torch.tensor(topic)


@cache
def walk(length: int = 6000, words: int = 16) -> Tensor:
    """Return a text in which the next word is, mostly, a fixed function of the last two."""
    made = np.random.RandomState(25)
    follow = made.randint(0, words, (words, words))
    text = [0, 1]
    for _ in range(length):
        text.append(int(follow[text[-2], text[-1]]) if made.rand() < 0.9 else int(made.randint(words)))
    return torch.tensor(text)


@cache
def spirals(count: int = 900) -> tuple[Tensor, Tensor]:
    """Return points of three spiral arms, and the arm of each."""
    made = np.random.RandomState(26)
    arm = made.randint(0, 3, count)
    along = made.rand(count)
    angle = 2.0 * np.pi * arm / 3 + 4.0 * along
    x = np.stack([along * np.cos(angle), along * np.sin(angle)], 1) * 2 + 0.04 * made.randn(count, 2)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(arm)


@cache
def waves(count: int = 600, length: int = 20) -> tuple[Tensor, Tensor]:
    """Return pairs of series (N, T, 2) and the running product of the two (N, T)."""
    made = torch.Generator().manual_seed(27)
    x = torch.randn(count, length, 2, generator=made) * 0.7
    return x, torch.tanh((x[..., 0] * x[..., 1]).cumsum(1) * 0.5)


def draw(*columns: Tensor, size: int, steps: int):
    """Yield `steps` random batches of the columns."""
    for _ in range(steps):
        pick = torch.randint(len(columns[0]), (size,))
        yield tuple(column[pick] for column in columns)
