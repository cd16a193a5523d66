"""Train a small CNN on scikit-learn's digits with everything recorded, then show what was seen.

    python examples/digits.py [--run runs/digits] [--epochs 6]

This is what `make demo` runs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import sonde
from sonde.views.terminal import TrainingProgress, make_console, print_summary

EVERYTHING = ("parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state")


def network() -> nn.Module:
    """Three convolutions with batch norm, and a head."""
    model = nn.Sequential()
    channels = 1
    for index, width in enumerate((16, 32, 64)):
        block = nn.Sequential()
        block.add_module("conv", nn.Conv2d(channels, width, 3, padding=1, bias=False))
        block.add_module("norm", nn.BatchNorm2d(width))
        block.add_module("relu", nn.ReLU(inplace=True))
        model.add_module(f"block{index + 1}", block)
        channels = width
    model.add_module("pool", nn.AdaptiveAvgPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("dropout", nn.Dropout(0.2))
    model.add_module("head", nn.Linear(4 * channels, 10))
    return model


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, held_out = random_split(data, [1500, len(data) - 1500], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=256)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


def train(path: Path, epochs: int) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, held_out = loaders()
    steps = epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, final_div_factor=10)
    with (
        sonde.watch(model, optimizer, run=path, what=EVERYTHING, scheduler=scheduler, loader=loader) as session,
        TrainingProgress(steps, title="digits") as progress,
    ):
        for epoch in range(epochs):
            session.epoch(epoch)
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                session.log(loss=loss)
                progress.update(session.current_step, loss=loss.item())
            session.log(val_accuracy=accuracy(model, held_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    if (options.run / "run.json").exists():
        shutil.rmtree(options.run)  # the demo's own earlier run; watch() itself never overwrites one
    train(options.run, options.epochs)
    print_summary(sonde.open_run(options.run), make_console())


if __name__ == "__main__":
    main()
