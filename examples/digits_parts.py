"""What the digits configs share: scikit-learn's digits as a dataset, and a small network for them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

HELD_OUT = 297

torch.set_num_threads(1)  # a network this small gains nothing from more


class Digits(Dataset):
    """Grey images of 8 by 8 pixels and the digits they show."""

    def __init__(self, split: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.indices = order[HELD_OUT:] if split == "train" else order[:HELD_OUT]
        self.images, self.labels = images[self.indices], torch.tensor(digits.target)[self.indices]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict:
        # `idx` names a sample in scores and captures; without it, its place in the dataset does.
        meta = {"idx": int(self.indices[index])}
        return {"inputs": self.images[index], "labels": self.labels[index], "meta_info": meta}


def block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )


class Network(nn.Module):
    """Three convolutions and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(1, width), block(width, 2 * width), block(2 * width, 4 * width))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images))
