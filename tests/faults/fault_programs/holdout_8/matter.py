"""Data of the eighth hold-out: scanned digits, shapes to cut out, sentences, utterances, loads, a clinic, a web of pages, moons and a lift."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from torch import Tensor


@cache
def scans() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return digits (1300, 1, 8, 8) in [0, 1] and their labels to train on, then 497 to test on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(88).permutation(len(x))
    x = torch.tensor(x[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y[order])
    return x[:1300], y[:1300], x[1300:], y[1300:]


@cache
def clinic() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return thirty standardised measurements of tumours and 0 or 1, to train on (400) and to test on (169)."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(81).permutation(len(x))
    x = torch.tensor(((x - x.mean(0)) / x.std(0))[order], dtype=torch.float32)
    y = torch.tensor(y[order])
    return x[:400], y[:400], x[400:], y[400:]


@cache
def shapes(count: int = 260, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (N, 1, S, S) and labels (N, S, S): 0 the ground, 1 a bright square, 2 a small dark bar."""
    made = np.random.RandomState(82)
    x, y = 0.35 * made.randn(count, size, size), np.zeros((count, size, size), dtype=np.int64)
    for n in range(count):
        r, c = made.randint(1, size - 6, 2)
        y[n, r : r + 5, c : c + 5] = 1
        r, c = made.randint(0, size - 4), made.randint(0, size - 3)
        y[n, r : r + 4, c : c + 2] = 2
    x = x + 1.3 * (y == 1) - 1.5 * (y == 2)
    return torch.tensor(x[:, None], dtype=torch.float32), torch.tensor(y)


@cache
def sentences(count: int = 700, words: int = 20, longest: int = 12) -> tuple[Tensor, Tensor]:
    """Return token ids (N, T) padded with 0, and lengths: each word follows from the last by one of two rules per text."""
    made = np.random.RandomState(83)
    step = made.permutation(np.arange(2, words)), made.permutation(np.arange(2, words))
    out, sizes = np.zeros((count, longest), dtype=np.int64), made.randint(5, longest + 1, count)
    for n in range(count):
        rule, word = step[made.randint(2)], made.randint(2, words)
        for t in range(sizes[n]):
            out[n, t] = word
            word = rule[word - 2] if made.rand() < 0.93 else made.randint(2, words)
    return torch.tensor(out), torch.tensor(sizes)


@cache
def utterances(count: int = 420, speakers: int = 6, longest: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Return frames (N, T, 8) padded with zeros, lengths and the speaker."""
    made = np.random.RandomState(84)
    voice = made.randn(speakers, 8)
    x, who = np.zeros((count, longest, 8)), made.randint(0, speakers, count)
    sizes = made.randint(8, longest + 1, count)
    for n in range(count):
        sway = np.sin(np.arange(sizes[n]) * (0.3 + 0.1 * who[n]))[:, None]
        x[n, : sizes[n]] = 0.8 * voice[who[n]] + sway * np.roll(voice[who[n]], 1) + 0.9 * made.randn(sizes[n], 8)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(sizes), torch.tensor(who)


@cache
def loads(length: int = 1500) -> Tensor:
    """Return the hourly load of a town in megawatt: a day, a drift, and noise; far from zero."""
    made = np.random.RandomState(85)
    t = np.arange(length)
    drift = np.cumsum(made.randn(length)) * 0.6
    y = 140 + 22 * np.sin(t * 2 * np.pi / 24) + 8 * np.sin(t * 2 * np.pi / 8) + drift + 1.5 * made.randn(length)
    return torch.tensor(y, dtype=torch.float32)


@cache
def spans(past: int = 24, ahead: int = 6) -> tuple[Tensor, Tensor]:
    """Return all windows of the load (N, past) and what followed (N, ahead), in megawatt."""
    cut = loads().unfold(0, past + ahead, 1)
    return cut[:, :past].clone(), cut[:, past:].clone()


@cache
def pages(nodes: int = 300, kinds: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (N, 10), links (2, E) that point from a page to a page, and topics (N,)."""
    made = np.random.RandomState(86)
    y = made.randint(0, kinds, nodes)
    like = y[:, None] == y[None, :]
    link = made.rand(nodes, nodes) < np.where(like, 0.05, 0.01)
    np.fill_diagonal(link, False)
    x = made.randn(kinds, 10)[y] + 1.6 * made.randn(nodes, 10)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(np.stack(np.nonzero(link))), torch.tensor(y)


@cache
def tastes(users: int = 120, items: int = 60) -> Tensor:
    """Return which items (users, items) a user likes, 0 or 1, about a fifth: users come in four kinds."""
    made = np.random.RandomState(87)
    chance = made.rand(4, items) ** 4
    return torch.tensor(made.rand(users, items) < chance[made.randint(0, 4, users)], dtype=torch.float32)


@cache
def moons(count: int = 1200) -> Tensor:
    """Return points (N, 2) on two interleaved half moons, about standard normal."""
    x, _ = make_moons(count, noise=0.05, random_state=89)
    x = (x - x.mean(0)) / x.std(0)
    return torch.tensor(x, dtype=torch.float32)


@cache
def houses(count: int = 1200) -> tuple[Tensor, Tensor]:
    """Return eight columns and a price that follows from them, both about standard normal."""
    made = torch.Generator().manual_seed(810)
    x = torch.randn(count, 8, generator=made)
    y = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.7 * x[:, 3].abs() - 0.6 * x[:, 4]
    y = y + 0.1 * torch.randn(count, generator=made)
    return x, (y - y.mean()) / y.std()


class Lift:
    """A lift with eight floors that has to reach the floor called: down, up; 1 on arrival, else -0.05; 20 steps at most."""

    floors = 8

    def reset(self) -> Tensor:
        self.at, self.goal = (int(v) for v in torch.randperm(self.floors)[:2])
        self.time = 0
        return self.seen()

    def seen(self) -> Tensor:
        return torch.cat([torch.eye(self.floors)[self.at], torch.eye(self.floors)[self.goal]])

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at = min(max(self.at + (1 if action else -1), 0), self.floors - 1)
        self.time += 1
        there = self.at == self.goal
        return self.seen(), 1.0 if there else -0.05, there or self.time >= 20


def draw(*columns: Tensor, size: int, epochs: int = 1):
    """Yield shuffled batches, epoch after epoch, without short ones."""
    for _ in range(epochs):
        order = torch.randperm(len(columns[0]))
        for start in range(0, len(order) - size + 1, size):
            pick = order[start : start + size]
            yield tuple(column[pick] for column in columns)


@torch.no_grad()
def mistakes(model, x: Tensor, y: Tensor) -> float:
    """Return the share of wrong classes, in evaluation mode."""
    was = model.training
    model.eval()
    share = float((model(x).argmax(-1) != y).float().mean())
    model.train(was)
    return share


@torch.no_grad()
def gap(a: Tensor, b: Tensor) -> float:
    """Return the energy distance of two clouds of points."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


@torch.no_grad()
def shortfall(act, episodes: int = 40) -> float:
    """Return 1 minus the mean reward in the lift of a policy that acts greedily: about 0.1 at best."""
    env, total = Lift(), 0.0
    for _ in range(episodes):
        seen, done = env.reset(), False
        while not done:
            seen, reward, done = env.step(int(act(seen)))
            total += reward
    return 1 - total / episodes
