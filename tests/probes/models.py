"""Small models of the kinds that probes must understand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SmallConvNet(nn.Module):
    """Convolutions with batch norm, dropout and in-place ReLU, as real ones have."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.relu(self.norm(self.conv1(x)))
        x = self.relu(self.conv2(x))
        return self.head(self.drop(x.mean((2, 3))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """Patches of 4 x 4, a class token and two registers; classified by the class token."""

    def __init__(self, width: int = 16, heads: int = 2, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.lead = nn.Parameter(torch.randn(1, 3, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.lead.expand(len(x), -1, -1), patches], 1)
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class SmallSwin(nn.Module):
    """Features kept as [batch, height, width, channels]."""

    def __init__(self, width: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.stage = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stage(self.patch(x).permute(0, 2, 3, 1))
        return self.head(x.mean((1, 2)))
