"""Data of the ninth hold-out: digits, spots, tables, series, little languages, graphs and corridors."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits


@cache
def _digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(90).permutation(len(x))
    images = torch.tensor(x[order] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images, torch.tensor(y[order])


def digits(train=1000, test=400):
    """Pictures of 8 by 8 in [0, 1] and their classes, as train and test."""
    x, y = _digits()
    return x[:train].clone(), y[:train].clone(), x[-test:].clone(), y[-test:].clone()


def spots(count=160, size=16, seed=91):
    """Grey pictures with one bright disc, as bytes, and its mask as a picture editor saves it: 0 and 255."""
    rng = np.random.RandomState(seed)
    rows, cols = np.mgrid[:size, :size]
    images, masks = [], []
    for _ in range(count):
        r, c, radius = rng.uniform(4, size - 4), rng.uniform(4, size - 4), rng.uniform(2, 4.5)
        inside = (rows - r) ** 2 + (cols - c) ** 2 < radius**2
        picture = 90 + 45 * inside + rng.normal(0, 25, (size, size))
        images.append(np.clip(picture, 0, 255).astype(np.uint8))
        masks.append((255 * inside).astype(np.uint8))
    return np.stack(images), np.stack(masks)


def wrong_share(model, x, y):
    """Return the share of wrong answers in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(-1) != y).float().mean())


def houses(count=600, seed=92):
    """A table with six columns and a price that bends with them."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=made)
    y = 1.2 * x[:, 0] - 0.8 * x[:, 1] * x[:, 2] + torch.sin(2 * x[:, 3]) + 0.1 * torch.randn(count, generator=made)
    return x, y


def waves(count=400, length=24, seed=93):
    """Noisy sines with the class of their pitch and the value that comes next."""
    made = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (count,), generator=made)
    pitch = torch.tensor([0.2, 0.45, 0.8, 1.2])[kind]
    start = 2 * math.pi * torch.rand(count, generator=made)
    t = torch.arange(length + 1)
    wave = torch.sin(pitch[:, None] * t + start[:, None])
    noisy = wave + 0.1 * torch.randn(count, length + 1, generator=made)
    return noisy[:, :length], kind, wave[:, length]


def sums(count=300, length=16, vocab=7, seed=94):
    """Sentences in which each token is the sum of the two before it."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.zeros(count, length, dtype=torch.long)
    ids[:, :2] = torch.randint(0, vocab, (count, 2), generator=made)
    for at in range(2, length):
        ids[:, at] = (ids[:, at - 1] + ids[:, at - 2]) % vocab
    return ids


def keywords(count=600, shortest=3, longest=24, vocab=30, seed=95):
    """Token lists of many lengths; the class is the one keyword (1 to 4) that stands in it."""
    made = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for _ in range(count):
        long = torch.rand((), generator=made) < 0.15
        size = longest if long else int(torch.randint(shortest, shortest + 5, (), generator=made))
        text = torch.randint(5, vocab, (size,), generator=made)
        label = int(torch.randint(0, 4, (), generator=made))
        text[int(torch.randint(0, size, (), generator=made))] = label + 1
        texts.append(text)
        labels.append(label)
    return texts, torch.tensor(labels)


def speech(count=200, symbols=5, words=4, seed=96):
    """Frames in which each of `words` symbols sounds for a few frames, and the symbols (from 1 on)."""
    made = torch.Generator().manual_seed(seed)
    voice = torch.randn(symbols + 1, 8, generator=made)
    frames, targets = [], []
    for _ in range(count):
        said = torch.randint(1, symbols + 1, (words,), generator=made)
        parts = []
        for symbol in said:
            parts += [voice[symbol]] * int(torch.randint(2, 4, (), generator=made)) + [voice[0]]
        track = torch.stack(parts)[:16]
        track = F.pad(track, (0, 0, 0, 16 - len(track)))
        frames.append(track + 0.3 * torch.randn(16, 8, generator=made))
        targets.append(said)
    return torch.stack(frames), torch.stack(targets)


def heard(log_probs):
    """Return what a batch of (time, batch, symbol) says after greedy decoding."""
    said = []
    for row in log_probs.argmax(-1).T.tolist():
        kept = [s for at, s in enumerate(row) if s != 0 and (at == 0 or s != row[at - 1])]
        said.append(kept)
    return said


def slips(said, targets):
    """Return the edit distance per target symbol."""
    total = 0
    for got, want in zip(said, targets.tolist(), strict=True):
        row = list(range(len(want) + 1))
        for i, a in enumerate(got, 1):
            before, row[0] = row[0], i
            for j, b in enumerate(want, 1):
                before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
        total += row[-1]
    return total / targets.numel()


def friends(count=240, groups=4, width=40, signal=1.2, seed=97):
    """A graph whose groups know each other, as features, normalised adjacency and group."""
    made = torch.Generator().manual_seed(seed)
    group = torch.randint(0, groups, (count,), generator=made)
    near = torch.where(group[:, None] == group, 0.05, 0.02)
    edges = (torch.rand(count, count, generator=made) < near).triu(1)
    adjacency = (edges | edges.T).float() + torch.eye(count)
    scale = adjacency.sum(1).rsqrt()
    x = torch.randn(count, width, generator=made)
    x[torch.arange(count), group] += signal
    return x, scale[:, None] * adjacency * scale, group


def rings(count, seed=None):
    """Points on two half moons, about the unit size."""
    made = torch.Generator().manual_seed(seed) if seed is not None else None
    angle = math.pi * torch.rand(count, generator=made)
    upper = torch.rand(count, generator=made) < 0.5
    x = torch.where(upper, torch.cos(angle) - 0.5, 0.5 - torch.cos(angle))
    y = torch.where(upper, torch.sin(angle) - 0.25, 0.25 - torch.sin(angle))
    return 1.3 * torch.stack([x, y], 1) + 0.05 * torch.randn(count, 2, generator=made)


def energy(a, b):
    """Return the energy distance of two sets of points."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


class Corridor:
    """Cells in a row; 0 goes left, 1 goes right. The last cell pays 1 and ends the walk."""

    def __init__(self, cells=8, limit=24):
        self.cells, self.limit = cells, limit
        self.state = np.zeros(cells, dtype=np.float32)

    def reset(self, at=None):
        self.at = np.random.randint(0, self.cells - 1) if at is None else at
        self.time = 0
        self.state[:] = 0
        self.state[self.at] = 1
        return self.state

    def step(self, action):
        self.at = max(0, self.at + (1 if action == 1 else -1))
        self.time += 1
        self.state[:] = 0
        self.state[self.at] = 1
        done = self.at == self.cells - 1
        return self.state, float(done), done, self.time >= self.limit


def lost(policy, cells=8):
    """Return the share of starts from which a policy does not reach the end of a corridor."""
    missed = 0
    env = Corridor(cells, limit=2 * cells)
    for start in range(cells - 1):
        state, done, late = env.reset(start), False, False
        while not (done or late):
            state, _, done, late = env.step(policy(state))
        missed += not done
    return missed / (cells - 1)
