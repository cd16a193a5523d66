"""Data that the programs of the fourteenth hold-out share: digits, squares, sentences, moons and a track."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits


@lru_cache(maxsize=1)
def _digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(14).permutation(len(images))
    return torch.tensor(images[order].reshape(-1, 1, 8, 8), dtype=torch.float32), torch.tensor(labels[order])


def digits(train=1200, scale=1 / 16):
    """Return ((pictures, labels) for training, the same for testing)."""
    images, labels = _digits()
    images = images * scale
    return (images[:train].clone(), labels[:train].clone()), (images[train:].clone(), labels[train:].clone())


def squares(count, size=12):
    """Return noisy pictures with one bright rectangle, its corners (x1, y1, x2, y2) in pixels, and its mask."""
    wide = torch.randint(3, 7, (count, 2))
    low = (torch.rand(count, 2) * (size - wide + 1)).floor().long()
    high = low + wide
    at = torch.arange(size)
    inside = (at[None, :, None] >= low[:, None]) & (at[None, :, None] < high[:, None])
    mask = (inside[:, :, 1, None] & inside[:, None, :, 0]).float()[:, None]
    return mask + 0.25 * torch.randn(count, 1, size, size), torch.cat([low, high], 1).float(), mask


def overlap(a, b):
    """Return the intersection over union of boxes given by their corners."""
    inner = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    area = [(c[:, 2:] - c[:, :2]).clamp(min=0).prod(1) for c in (a, b)]
    return inner / (area[0] + area[1] - inner + 1e-6)


def sentences(count, classes=4, vocab=40, length=10, hints=3):
    """Return rows of words and a topic, for which a few of the words in a row are typical."""
    label = torch.randint(0, classes, (count,))
    words = torch.randint(classes * 3, vocab, (count, length))
    for k in range(hints):
        words[:, k] = torch.where(torch.rand(count) < 0.8, label * 3 + torch.randint(0, 3, (count,)), words[:, k])
    return words.gather(1, torch.rand(count, length).argsort(1)), label


def moons(count):
    """Return points on two half circles that reach into each other."""
    angle, upper = np.pi * torch.rand(count), torch.rand(count) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    return torch.stack([x, y], 1) + 0.04 * torch.randn(count, 2)


def energy(a, b):
    """Return the energy distance between two sets of points, at most 50."""
    far = 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()
    return min(float(torch.nan_to_num(far, 50.0, 50.0)), 50.0)


def wrong(model, x, y):
    """Return the share of wrong answers of a model that is used as it is."""
    with torch.no_grad():
        return (model(x).argmax(1) != y).float().mean().item()
