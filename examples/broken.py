"""A training with three mistakes that raise no error, and what Sonde says about it.

    python examples/broken.py [--run runs/broken]

The loss falls, slowly, and ends far too high. Nothing warns: the loop is valid PyTorch.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.views.terminal import Look, make_console
from sonde.views.terminal.findings import render_diagnosis


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(self.dropout(x)))
        return torch.softmax(self.head(x), dim=-1)


def train(path: Path, epochs: int = 6) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = Network()
    optimizer = torch.optim.Adam([*model.first.parameters(), *model.head.parameters()], lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    model.eval()
    with sonde.watch(model, optimizer, run=path) as session:
        for _ in range(epochs):
            for x, y in DataLoader(data, batch_size=64, shuffle=True):
                loss = criterion(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)


def show(path: Path, console: Console) -> None:
    console.print(f"\n$ sonde diagnose {path}", style="bold", highlight=False)
    for part in render_diagnosis(sonde.diagnose(path), Look.of(console)):
        console.print(part)


def main(path: Path = Path("runs/broken"), console: Console | None = None) -> None:
    if (path / "run.json").exists():
        shutil.rmtree(path)  # this example's own earlier run; Sonde itself never overwrites one
    console = console or make_console()
    console.print("\nand a network that trains without an error, and badly:", style="bold")
    train(path)
    show(path, console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/broken"))
    main(parser.parse_args().run)
