"""The training programs that benchmarks measure: a GPT-like model, a CNN, an MLP, and one of many small tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Program:
    """A model with its optimizer and one training step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    def step(self) -> torch.Tensor:
        x, y = self.batch()
        loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.project(seen)
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(*, layers: int = 12, width: int = 256, batch: int = 8, context: int = 128) -> Program:
    """A 10 M-parameter decoder at its defaults."""
    torch.manual_seed(0)
    model = GPT(layers, width, max(1, width // 64), 2000, context)

    def tokens() -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(2000, (batch, context + 1))
        return text[:, :-1], text[:, 1:]

    return Program(model, torch.optim.AdamW(model.parameters(), 3e-4), tokens)


def cnn(*, batch: int = 32) -> Program:
    """A small residual-free CNN with batch norm on 3 x 32 x 32 images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1), (256, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return Program(model, optimizer, lambda: (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))))


def mlp(*, width: int = 1536, depth: int = 4, batch: int = 64) -> Program:
    """A wide MLP: 9.5 M parameters in few tensors, little arithmetic per parameter."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return Program(model, optimizer, lambda: (torch.randn(batch, width), torch.randint(10, (batch,))))


def many_small(*, tensors: int, width: int = 32, batch: int = 32) -> Program:
    """A deep, narrow chain of layers with about `tensors` parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(tensors // 2)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    return Program(model, optimizer, lambda: (torch.randn(batch, width), torch.randint(width, (batch,))))
