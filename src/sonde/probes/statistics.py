"""Statistics of activations, of every sample and of every channel, with one transfer from the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.probes.axes import channel_axis
from sonde.probes.dense import dense

_ROWS: Final = ("mean", "m2", "min", "max", "abs_sum", "nonzero", "positive", "le_minus_one", "ge_one", "nan", "inf")


def sample_statistics(tensor: Tensor, module: nn.Module | None = None) -> list[dict[str, Any]]:
    """Return the statistics of every sample of a batch of outputs.

    `std` is the sample standard deviation, as `torch.std`; `l1_norm` and `l2_norm` are sums over all elements, and
    `abs_mean` is the mean magnitude. Numbers are over finite elements; `nan` and `inf` count the others. What cannot be
    known is None: the mean of no elements, the deviation of one.
    """
    x = _as_float(dense(tensor))
    if x.dim() == 0:
        x = x.reshape(1)
    channels = channel_axis(module, x)
    x_BCN = _by_channel(x, channels)
    table = _measure(x_BCN)
    num_samples, _, num_places = x_BCN.shape
    shape = [1, *tensor.shape[1:]] if tensor.dim() else []  # of a sample that came alone
    return [
        _describe(table[:, sample], num_places, shape, with_channels=channels is not None and x.dim() > 2)
        for sample in range(num_samples)
    ]


def _as_float(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.abs()
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _by_channel(x: Tensor, channels: int | None) -> Tensor:
    if channels is None:
        return x.reshape(x.shape[0], 1, -1)
    if x.dim() == 2:  # features without places: the whole vector is one row
        return x.unsqueeze(1)
    moved = x.movedim(channels, 1)
    # A reduction over the middle of [batch, tokens, features] is as fast as one over the end, without a copy.
    return moved.flatten(2) if moved.is_contiguous() or moved.dim() > 3 else moved


def _measure(x_BCN: Tensor) -> Tensor:
    """Return [statistic, sample, channel] on the host, in float64."""
    if x_BCN.numel() == 0:
        return torch.zeros(len(_ROWS), *x_BCN.shape[:2], dtype=torch.float64)
    table = _reduce(x_BCN, torch.zeros_like(x_BCN[..., 0]), torch.zeros_like(x_BCN[..., 0]))
    if bool(table[0].isfinite().all()):
        return table
    # Rare and worth a second look: leave NaN and infinities out, and count them.
    nan, inf = x_BCN.isnan(), x_BCN.isinf()
    return _reduce(x_BCN, nan.sum(-1), inf.sum(-1), left_out=nan | inf)


def _reduce(x: Tensor, nan: Tensor, inf: Tensor, left_out: Tensor | None = None) -> Tensor:
    count = torch.full_like(nan, x.shape[-1], dtype=torch.float64) - nan - inf
    low = high = x
    if left_out is not None:
        x, low, high = x.masked_fill(left_out, 0), x.masked_fill(left_out, math.inf), x.masked_fill(left_out, -math.inf)
    mean = x.sum(-1, dtype=torch.float64) / count
    m2 = (x - mean.unsqueeze(-1).to(x.dtype)).square_()
    if left_out is not None:
        m2.masked_fill_(left_out, 0)
    rows = (
        mean,
        m2.sum(-1, dtype=torch.float64),
        low.amin(-1),
        high.amax(-1),
        torch.linalg.vector_norm(x, 1, -1, dtype=torch.float64),
        torch.count_nonzero(x, -1),
        (x > 0).sum(-1),
        (x <= -1).sum(-1),
        (x >= 1).sum(-1),
        nan,
        inf,
    )
    return torch.stack([row.double() for row in rows]).cpu()


def _describe(table: Tensor, num_places: int, shape: list[int], *, with_channels: bool) -> dict[str, Any]:
    """Put the channels of one sample together; whole-sample numbers need no second look at the data."""
    columns = dict(zip(_ROWS, table, strict=True))
    finite = num_places - columns["nan"] - columns["inf"]
    total, count = float(finite.sum()), num_places * table.shape[1]
    known = finite > 0
    mean = columns["mean"].where(known, 0.0)
    overall = float((mean * finite).sum()) / total if total else 0.0
    m2 = float((columns["m2"].where(known, 0.0) + finite * (mean - overall).square()).sum())
    stats: dict[str, Any] = {
        "shape": shape,
        "mean": overall if total else None,
        "std": math.sqrt(m2 / (total - 1)) if total > 1 else None,
        "min": float(columns["min"][known].min()) if total else None,
        "max": float(columns["max"][known].max()) if total else None,
        "l1_norm": float(columns["abs_sum"][known].sum()),
        "l2_norm": math.sqrt(m2 + total * overall**2),
        "abs_mean": float(columns["abs_sum"][known].sum()) / total if total else None,
        "nan": int(columns["nan"].sum()),
        "inf": int(columns["inf"].sum()),
    }
    stats |= dict(_shares(columns, known, count, total))
    if with_channels:
        stats["channel_means"] = _numbers(columns["mean"], known)
        stats["channel_stds"] = _numbers((columns["m2"] / (finite - 1)).sqrt(), finite > 1)
    return stats


def _shares(columns: dict[str, Tensor], known: Tensor, count: int, total: float) -> Iterator[tuple[str, float | None]]:
    # Left-out elements were set to 0 before counting, so they are among neither the non-zero nor the large ones.
    yield "sparsity", (total - float(columns["nonzero"][known].sum())) / count if count else None
    for share, row in (
        ("positive_ratio", "positive"),
        ("saturation_low", "le_minus_one"),
        ("saturation_high", "ge_one"),
    ):
        yield share, float(columns[row][known].sum()) / count if count else None


def _numbers(values: Tensor, known: Tensor) -> list[float | None]:
    return [value if is_known else None for value, is_known in zip(values.tolist(), known.tolist(), strict=True)]
