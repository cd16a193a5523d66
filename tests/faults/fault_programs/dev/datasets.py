"""Data small enough to learn in a hundred steps: digits, made-up houses, waves, rings and a made-up language."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return flat standardised digits and labels to train on, then those to validate on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))
    x = torch.tensor((x[order] - 4.884) / 6.017, dtype=torch.float32)
    y = torch.tensor(y[order], dtype=torch.long)
    return x[:1472], y[:1472], x[1472:], y[1472:]


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the digits as one-channel images of 8 x 8."""
    x, y, held, held_y = digits()
    return x.view(-1, 1, 8, 8), y, held.view(-1, 1, 8, 8), held_y


@cache
def houses(count: int = 1024) -> tuple[Tensor, Tensor]:
    """Return eight standardised features and a standardised price that depends on them, with noise."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=made)
    y = x[:, 0] * 2 + torch.sin(2 * x[:, 1]) + x[:, 2] * x[:, 3] + 0.1 * torch.randn(count, generator=made)
    return x, (y - y.mean()) / y.std()


@cache
def rings(count: int = 1024) -> tuple[Tensor, Tensor]:
    """Return points of two rings around each other, and which ring they are from."""
    made = torch.Generator().manual_seed(2)
    y = torch.randint(0, 2, (count,), generator=made)
    angle = torch.rand(count, generator=made) * 2 * torch.pi
    radius = 1 + 1.2 * y + 0.15 * torch.randn(count, generator=made)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y


@cache
def waves(count: int = 768, length: int = 20) -> tuple[Tensor, Tensor]:
    """Return noisy waves (count, length, 1) of four frequencies, and which."""
    made = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (count,), generator=made)
    phase = torch.rand(count, 1, generator=made) * 2 * torch.pi
    time = torch.arange(length).float()
    x = torch.sin(phase + time * (0.3 + 0.45 * y[:, None])) + 0.1 * torch.randn(count, length, generator=made)
    return x[..., None], y


@cache
def language(vocab: int = 16, count: int = 12000) -> Tensor:
    """Return a text in a made-up language in which few letters can follow each letter."""
    made = np.random.RandomState(4)
    follow = made.dirichlet(np.full(vocab, 0.1), vocab) * 0.95 + 0.05 / vocab
    text = [0]
    for chance in made.rand(count - 1):
        text.append(min(int(np.searchsorted(follow[text[-1]].cumsum(), chance)), vocab - 1))
    return torch.tensor(text)


def windows(text: Tensor, length: int = 16) -> tuple[Tensor, Tensor]:
    """Cut a text into windows, and the same moved by one."""
    count = (len(text) - 1) // length
    return text[: count * length].view(count, length), text[1 : count * length + 1].view(count, length)


@cache
def sentences(count: int = 768, length: int = 12, vocab: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded token ids (0 pads), where they are padded, and whether more tokens are even than odd."""
    made = torch.Generator().manual_seed(5)
    x = torch.randint(2, vocab, (count, length), generator=made)
    padded = torch.arange(length)[None] >= torch.randint(4, length + 1, (count, 1), generator=made)
    x[padded] = 0
    even = ((x % 2 == 0) & ~padded).sum(1)
    return x, padded, (even * 2 > (~padded).sum(1)).long()


def batches(*tensors: Tensor, size: int = 64, shuffle: bool = True, drop_last: bool = False) -> DataLoader:
    """Return a loader over tensors."""
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=shuffle, drop_last=drop_last)


def error_rate(model: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of wrong classes, in eval mode."""
    was = model.training
    model.eval()
    with torch.no_grad():
        wrong = (model(x).argmax(-1) != y).float().mean().item()
    model.train(was)
    return wrong
