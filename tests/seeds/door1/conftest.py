"""What the examples need around them: a model with the layers they name, datapoints, and a way to run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

HERE = Path(__file__).parent


class Stage(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3, self.layer4 = Stage(3, 4), Stage(4, 6), Stage(6, 6), Stage(6, 8)

    def forward(self, x):
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class Weights(nn.Module):
    """Returns attention weights, as the examples expect."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).transpose(-2, -1) / 4, -1)


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.classify = Weights(width), nn.Linear(width, 5)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.classify((self.attention(tokens) @ tokens).mean(1))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), Head(8)

    def forward(self, x):
        return self.head(self.backbone(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Network().eval()


def block(page: str, name: str) -> str:
    """Return one example, as it stands but for its import lines."""
    parts = re.split(r"^######## (.*)\n", (HERE / f"{page}.txt").read_text(), flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))[name]


@pytest.fixture
def run():
    """Run examples one after another, in one namespace."""

    def run_blocks(page: str, *names: str, **given):
        space = dict(given)
        for name in names:
            exec(compile(block(page, name), f"{page}: {name}", "exec"), space)
        return space

    return run_blocks


@pytest.fixture
def evaluate():
    """Evaluate datapoints with a debugger, as an evaluator does."""

    def loop(debugger, model, count=6):
        found = {}
        with torch.no_grad():
            for idx in range(count):
                inputs = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(idx))
                dp = {"inputs": inputs, "outputs": model(inputs), "meta_info": {"idx": [idx]}}
                dp["debug"] = debugger(dp, model)
                found[idx] = dp
        return found

    return loop
