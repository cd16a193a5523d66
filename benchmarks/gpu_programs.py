"""The training programs that `gpu.py` measures, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, CONTEXT = 50304, 1024


@dataclass
class Program:
    """A model with its optimizer and one training step; `watched` is what the loop calls, compiled or not."""

    model: nn.Module
    watched: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    scaler: torch.amp.GradScaler | None = None
    before_optimizer: list[Callable[[], object]] = field(default_factory=list)

    def step(self) -> Tensor:
        loss = self.loss()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        for look in self.before_optimizer:
            look()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(seen.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2's architecture with tied embeddings; returns the loss."""

    def __init__(self, width: int, layers: int, heads: int, words: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt(*, width=768, layers=12, heads=12, words=WORDS, batch=16, context=CONTEXT, compiled=False) -> Program:
    """GPT-2 small at its defaults: 124 M parameters, bfloat16 autocast, fused AdamW."""
    torch.manual_seed(0)
    model = GPT(width, layers, heads, words, context).cuda()
    called = torch.compile(model) if compiled else model
    text = torch.randint(words, (batch, context + 1), device="cuda")
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return called(tokens, targets)

    return Program(model, called, torch.optim.AdamW(model.parameters(), 3e-4, fused=True), loss)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.act = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride > 1 or channels != 4 * width:
            convolution = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        y = self.act(self.norm2(self.conv2(y)))
        return self.act(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet(*, batch=128) -> Program:
    """ResNet-50's architecture, channels-last, float16 autocast with a gradient scaler, fused SGD."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks, channels = [], 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
            channels = 4 * width
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    model = model.to("cuda", memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return F.cross_entropy(model(images), labels)

    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    # The usual scale would overflow in the first step, and torch never fills the momentum of a fused SGD that skips its
    # first step: everything would be NaN from then on.
    return Program(model, model, optimizer, loss, torch.amp.GradScaler("cuda", init_scale=256.0))


def many_tiny(*, tensors=500) -> Program:
    """A chain of 500 layers with 1 K weights each: all host time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(tensors))).cuda()
    x = torch.randn(32, 32, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)
    return Program(model, model, optimizer, lambda: model(x).square().mean())


def one_big(*, side=1 << 15) -> Program:
    """One layer with 1 G float32 weights and little arithmetic: all memory bandwidth."""
    torch.manual_seed(0)
    model = nn.Linear(side, side, bias=False, device="cuda")
    x = torch.randn(16, side, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)
    return Program(model, model, optimizer, lambda: model(x).square().mean())
