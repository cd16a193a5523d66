"""Data of the second hold-out: small public tables, digits, and made-up series, sentences and pairs."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine, make_moons
from torch import Tensor
from torch.utils.data import Dataset

WORDS = (
    *("<pad>", "the", "a", "small", "big", "red", "old", "cat", "dog", "bird", "fox", "sees"),
    *("hears", "likes", "chases", "and", "then", "runs", "sleeps", "."),
)


@cache
def pixels() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return digit images (N, 1, 8, 8) from 0 to 1 with labels, to train on and to test on."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(7).permutation(len(x))
    x = torch.tensor(x[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y[order])
    return x[:1400], y[:1400], x[1400:], y[1400:]


@cache
def tumours() -> tuple[np.ndarray, np.ndarray]:
    """Return thirty raw measurements of tumours and whether each is benign."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(8).permutation(len(x))
    return x[order], y[order]


@cache
def wines() -> tuple[Tensor, Tensor]:
    """Return standardised measurements of wines of three growers, with noise so that there are enough of them."""
    x, y = load_wine(return_X_y=True)
    made = np.random.RandomState(9)
    x = (x - x.mean(0)) / x.std(0)
    pick = made.randint(0, len(x), 900)
    x = x[pick] + 0.3 * made.randn(900, x.shape[1])
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y[pick])


@cache
def patients() -> tuple[Tensor, Tensor]:
    """Return ten standardised measurements of patients, and the standardised progress of their illness."""
    x, y = load_diabetes(return_X_y=True)
    x = x / x.std(0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)


@cache
def moons(count: int = 1200) -> tuple[Tensor, Tensor]:
    """Return two interleaved half moons."""
    x, y = make_moons(count, noise=0.15, random_state=3)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@cache
def series(count: int = 900, length: int = 24) -> tuple[Tensor, Tensor]:
    """Return waves (N, T, 1) of random pitch, and the value that comes next (N, 1)."""
    made = torch.Generator().manual_seed(11)
    pitch = 0.2 + 0.5 * torch.rand(count, 1, generator=made)
    phase = 6.3 * torch.rand(count, 1, generator=made)
    time = torch.arange(length + 1).float()
    wave = torch.sin(phase + pitch * time) + 0.03 * torch.randn(count, length + 1, generator=made)
    return wave[:, :length, None], wave[:, length:]


@cache
def story(sentences: int = 1500) -> Tensor:
    """Return the word numbers of a story made by a little grammar."""
    made = np.random.RandomState(12)
    number = {word: n for n, word in enumerate(WORDS)}

    def thing() -> list[str]:
        return [
            made.choice(["the", "a"]),
            made.choice(["small", "big", "red", "old"]),
            made.choice(["cat", "dog", "bird", "fox"]),
        ]

    text: list[str] = []
    for _ in range(sentences):
        text += thing()
        text += (
            [made.choice(["sees", "hears", "likes", "chases"]), *thing()]
            if made.rand() < 0.6
            else ["then", made.choice(["runs", "sleeps"])]
        )
        text.append(".")
    return torch.tensor([number[str(word)] for word in text])


def story_blocks(length: int = 12) -> Tensor:
    """Return the story cut into rows of `length` + 1 words, so that each row holds its own targets."""
    text = story()
    rows = (len(text) - 1) // length
    return torch.stack([text[n * length : n * length + length + 1] for n in range(rows)])


class Records(Dataset):
    """A dataset of dicts, as people write one."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def forever(loader):
    """Repeat a loader, shuffled anew each time."""
    while True:
        yield from loader
