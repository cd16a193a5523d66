"""Data that the programs of the thirteenth hold-out share: digits, scenes, sounds, flats, rings and a pond."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F


@lru_cache(maxsize=1)
def _digits():
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(13).permutation(len(images))
    return images[order].astype(np.float32).reshape(-1, 8, 8), labels[order].astype(np.int64)


def digits(train=1200, top=1.0):
    """Return digits for training and for testing as tensors with values from 0 to `top`."""
    images, labels = _digits()
    x, y = torch.from_numpy(images * (top / 16))[:, None], torch.from_numpy(labels)
    return x[:train].clone(), y[:train].clone(), x[train:].clone(), y[train:].clone()


def blots(count, size=12):
    """Return noisy pictures with one bright box, and the box as centre, width and height from 0 to 1."""
    wide = torch.randint(3, 7, (count, 2))
    start = (torch.rand(count, 2) * (size - wide + 1)).long()
    at = torch.arange(size)
    across, down = (((at >= start[:, i, None]) & (at < (start + wide)[:, i, None])).float() for i in (0, 1))
    picture = down[:, :, None] * across[:, None, :] + 0.2 * torch.randn(count, size, size)
    return picture[:, None], torch.cat([start + wide / 2, wide], 1) / size


def tissue(count, size=12):
    """Return noisy pictures and a mask that says where it is bright."""
    picture, box = blots(count, size)
    edge = (torch.arange(size) + 0.5) / size
    inside = [(edge - box[:, i, None]).abs() < box[:, i + 2, None] / 2 for i in (0, 1)]
    return picture, (inside[1][:, :, None] & inside[0][:, None, :]).float()[:, None]


def words_as_sound(count, words=6, frames=20, bands=10):
    """Return noisy spectra (count, frames, bands) with one word, which starts anywhere, and which word it is."""
    shapes = torch.sin(torch.arange(words)[:, None, None] * 1.7 + torch.arange(6)[:, None] * torch.arange(1, bands + 1))
    label = torch.randint(0, words, (count,))
    start = torch.randint(0, frames - 5, (count,))
    sound = 0.5 * torch.randn(count, frames, bands)
    for k in range(6):
        sound[torch.arange(count), start + k] += shapes[label, k]
    return sound, label


def flats(count):
    """Return a table of flats (area, rooms, year, distance in metres, floor, noise) and what they cost in thousands."""
    area = 30 + 120 * torch.rand(count)
    rooms = (area / 28 + torch.randn(count)).round().clamp(1, 6)
    year = 1900 + (123 * torch.rand(count)).floor()
    metres = 200 + 15000 * torch.rand(count)
    floor = torch.randint(0, 12, (count,)).float()
    noise = 40 + 30 * torch.rand(count)
    price = 2.2 * area * (1.6 - metres / 16000) + 0.9 * (year - 1950) + 4 * floor - 1.2 * noise + 15 * rooms
    return torch.stack([area, rooms, year, metres, floor, noise], 1), price + 6 * torch.randn(count)


def rings(count):
    """Return points on two rings, in random order."""
    angle = 2 * np.pi * torch.rand(count)
    radius = torch.where(torch.rand(count) < 0.5, 0.5, 1.2) + 0.04 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def apart(a, b):
    """Return the energy distance of two sets of points, 0 if they are alike; 100 if one is lost."""
    far = 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()
    return min(float(far.nan_to_num(100.0, 100.0, 100.0)), 100.0)


class Pond:
    """A frozen pond of four by four: 1 for the far corner, -1 for one of three holes, and a little for every step."""

    states, actions = 16, 4
    holes = (5, 7, 12)

    def reset(self, place=0):
        """Start anew and return the place as a vector."""
        self.place, self.steps = place, 0
        return self._seen()

    def _seen(self):
        return F.one_hot(torch.tensor(self.place), 16).float()

    def step(self, action):
        """Walk up, right, down or left; return what is seen, the reward, and whether it is over."""
        row, column = divmod(self.place, 4)
        row, column = ((row - 1, column), (row, column + 1), (row + 1, column), (row, column - 1))[action]
        if 0 <= row < 4 and 0 <= column < 4:
            self.place = 4 * row + column
        self.steps += 1
        if self.place in self.holes:
            return self._seen(), -1.0, True
        if self.place == 15:
            return self._seen(), 1.0, True
        return self._seen(), -0.02, self.steps >= 30


def lost_on_the_pond(choose, starts=(0, 1, 4, 8, 3)):
    """Return by how much a policy earns less than 1 on average."""
    pond, total = Pond(), 0.0
    with torch.no_grad():
        for place in starts:
            seen, over = pond.reset(place), False
            while not over:
                seen, reward, over = pond.step(int(choose(seen)))
                total += reward
    return 1 - total / len(starts)
