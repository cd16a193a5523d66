"""Datapoints, a small model, and a loop that evaluates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.debuggers import SequentialDebugger


class Branching(nn.Module):
    """One of two branches runs, depending on the input; a shared cell runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.even, self.odd = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.cell = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.stem(x))
        x = self.even(x) if float(x.detach().sum()) % 2 < 1 else self.odd(x)
        x = x.mean((2, 3))
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Branching().eval()


def image(idx: int) -> torch.Tensor:
    return torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(idx))


def datapoint(model, *ids, idx=None):
    inputs = torch.stack([image(each) for each in ids])
    return {
        "inputs": inputs,
        "outputs": model(inputs),
        "meta_info": {"idx": list(ids) if idx is None else idx},
    }


@pytest.fixture
def build(model):
    """Build a debugger from `name=debugger`, and close it in the end."""
    built = []

    def make(options=None, **debuggers):
        config = [{"name": name, "debugger_config": each} for name, each in debuggers.items()]
        debugger = SequentialDebugger(config, model, **(options or {}))
        debugger.enabled = True
        built.append(debugger)
        return debugger

    yield make
    for debugger in built:
        debugger.close()
