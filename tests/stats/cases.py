"""Every kind of data that once went wrong."""

from __future__ import annotations

import math

import torch

NAN, INF = math.nan, math.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_odd_ones(values: torch.Tensor) -> torch.Tensor:
    values[3], values[700], values[-1] = NAN, INF, -INF
    return values


CASES = {
    "empty": torch.empty(0),
    "one": torch.tensor([-0.3]),
    "zero dimensions": torch.tensor(2.5),
    "normal": normal(5000),
    "nan": torch.tensor([NAN, 1.0, 2.0]),
    "only nan": torch.full((300,), NAN),
    "infinities": torch.tensor([INF, -INF, INF, 0.5, -3.0]),
    "only infinities": torch.tensor([INF, -INF]),
    "odd ones among many": with_odd_ones(normal(9000)),
    "odd ones first": torch.cat([torch.tensor([NAN, INF]), 1000 + 0.1 * normal(5000)]),
    "nan in every block": normal(20000).index_fill_(0, torch.arange(0, 20000, 1000), NAN),
    "only nan, then numbers": torch.cat([torch.full((5000,), NAN), normal(5000)]),
    "numbers, then only nan": torch.cat([normal(5000) - 7, torch.full((5000,), NAN)]),
    "denormals": torch.tensor([1e-45, -1e-40, 5e-39, 0.0]).repeat(100),
    "zeros": torch.zeros(5000),
    "signed zeros": torch.tensor([-0.0, 0.0, -0.0]),
    "constant": torch.full((9000,), 0.1),
    "negative constant": torch.full((4097,), -3.0),
    "ones": torch.ones(70),
    "relu": normal(6000).relu(),
    "far mean": 1000 + 0.01 * normal(20000),
    "very far mean": 1e6 + normal(5000),
    "far mean after zeros": torch.cat([torch.zeros(16), 1000 + 0.01 * normal(8000)]),
    "outlier first": torch.cat([torch.tensor([1e6]), 0.01 * normal(5000)]),
    "ramp": torch.arange(50000, dtype=torch.float64) / 64,
    "steps": torch.arange(8, dtype=torch.float64).repeat_interleave(4096),
    "huge": 1e38 * normal(5000).clamp(-3, 3),
    "large": 1e20 * normal(5000),
    "small": 1e-25 * normal(5000),
    "tiny": 1e-38 * normal(5000),
    "small spread": 1e-10 + 1e-17 * normal(5000),
    "half's largest": torch.tensor([65504.0, -65504.0]).repeat(3000),
    "half's smallest": torch.tensor([6e-8, -6e-5, 1e-3]).repeat(500),
    "edges of bins": (2.0 ** torch.arange(-60, 30, dtype=torch.float64)).repeat(60),
    "below edges": (1 - 2**-8) * 2.0 ** torch.arange(-60, 30, dtype=torch.float64),
    "wide": torch.exp(8 * normal(20000)).clamp(max=1e30),
    "wide, then narrow": torch.cat([torch.exp(8 * normal(5000)).clamp(max=1e30), normal(90000)]),
    "half tiny": torch.where(normal(9000) > 0, 1e-20, normal(9000)),
    "few below": torch.where(torch.arange(8000) % 100 == 0, 1e-6, 1.5),
}
