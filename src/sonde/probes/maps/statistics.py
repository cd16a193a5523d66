"""Statistics of activations, of every sample and of every channel, with one transfer from the device."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sonde.probes.maps.outputs import channel_axis, dense

BRIEF: Final = ("mean", "std", "min", "max")
_ROWS: Final = ("mean", "m2", "min", "max", "abs_sum", "nonzero", "positive", "le_minus_one", "ge_one", "nan", "inf")


def brief_statistics(tensor: Tensor) -> list[dict[str, Any]]:
    """Return mean, standard deviation, least and greatest value and shape of every sample, by the fastest way."""
    x = _as_float(dense(tensor))
    x_BN = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    shape = [1, *tensor.shape[1:]] if tensor.dim() else []
    count = x_BN.shape[1]
    if count > 1 and len(x_BN):
        # torch.var_mean goes over the data once and is ten times slower than these four.
        mean = x_BN.sum(1, keepdim=True) / count
        away = x_BN - mean
        rest = away.sum(1) / count
        spread = (away.square_().sum(1) - count * rest.square()).clamp_min(0) / (count - 1)
        found = torch.stack([mean[:, 0] + rest, spread.sqrt(), x_BN.amin(1), x_BN.amax(1)], 1).tolist()
        if all(math.isfinite(number) for numbers in found for number in numbers):
            return [dict(zip(BRIEF, numbers, strict=True)) | {"shape": list(shape)} for numbers in found]
    return [{name: each[name] for name in (*BRIEF, "shape")} for each in sample_statistics(tensor)]


def sample_statistics(tensor: Tensor, module: nn.Module | None = None) -> list[dict[str, Any]]:
    """Return the statistics of every sample of a batch of outputs.

    `std` is the sample standard deviation, as `torch.std`; `l1_norm` is the mean of the magnitudes, also called
    `abs_mean`, `abs_sum` their sum, and `l2_norm` the norm over all elements. Numbers are over finite elements; `nan`
    and `inf` count the others. What cannot be known is None: the mean of no elements, the deviation of one.
    `channel_means` and `channel_stds` are arrays, in which it is NaN.
    """
    x = _as_float(dense(tensor))
    if x.dim() == 0:
        x = x.reshape(1)
    channels = channel_axis(module, x)
    x_BCN = _by_channel(x, channels)
    with_channels = channels is not None and x.dim() > 2
    shape = [1, *tensor.shape[1:]] if tensor.dim() else []  # of a sample that came alone
    return [{"shape": list(shape)} | each for each in _describe(_measure(x_BCN), x_BCN.shape[2], with_channels)]


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
    none = torch.zeros_like(x_BCN[..., 0])
    table = _reduce(x_BCN, none, none)
    if bool(table[0].isfinite().all()):
        return table
    # Rare: leave NaN and infinities out in a second pass, and count them.
    nan, inf = x_BCN.isnan(), x_BCN.isinf()
    return _reduce(x_BCN, nan.sum(-1), inf.sum(-1), left_out=nan | inf)


def _reduce(x: Tensor, nan: Tensor, inf: Tensor, left_out: Tensor | None = None) -> Tensor:
    """Reduce the last axis. One buffer serves all steps, and truth values go into it as numbers, which is faster."""
    low = high = x
    if left_out is not None:
        x, low, high = x.masked_fill(left_out, 0), x.masked_fill(left_out, math.inf), x.masked_fill(left_out, -math.inf)
    buffer = torch.empty_like(x)
    count = x.shape[-1] - nan.double() - inf.double()
    mean = x.sum(-1).double() / count
    torch.sub(x, mean.unsqueeze(-1).to(x.dtype), out=buffer)
    if left_out is not None:
        buffer.masked_fill_(left_out, 0)
    # The mean was rounded to the tensor's type; what is left over corrects it and the squares about it.
    rest = buffer.sum(-1).double() / count
    m2 = buffer.square_().sum(-1).double() - count * rest.square()
    abs_sum = torch.abs(x, out=buffer).sum(-1)
    sign = torch.sign(x, out=buffer).sum(-1)
    nonzero = buffer.abs_().sum(-1)
    le_minus_one = torch.le(x, -1, out=buffer).sum(-1)
    ge_one = torch.ge(x, 1, out=buffer).sum(-1)
    rows = (
        mean + rest,
        m2.clamp_min(0),
        low.amin(-1),
        high.amax(-1),
        abs_sum,
        nonzero,
        (nonzero + sign) / 2,
        le_minus_one,
        ge_one,
        nan,
        inf,
    )
    return torch.stack([row.double() for row in rows]).cpu()


def _describe(table: Tensor, num_places: int, with_channels: bool) -> list[dict[str, Any]]:
    """Put the channels of each sample together; whole-sample numbers need no second pass over the data."""
    row = dict(zip(_ROWS, table.numpy(), strict=True))  # [sample, channel] each
    finite = num_places - row["nan"] - row["inf"]
    known = finite > 0
    mean, m2 = np.where(known, row["mean"], 0.0), np.where(known, row["m2"], 0.0)
    total, count = finite.sum(1), num_places * finite.shape[1]
    overall = _over((mean * finite).sum(1), total)
    squares = (m2 + finite * (mean - np.where(total > 0, overall, 0.0)[:, None]) ** 2).sum(1)
    abs_sum = row["abs_sum"].sum(1, where=known)
    columns = {
        "mean": overall,
        "std": np.sqrt(_over(squares, total - 1)),
        "min": np.where(total > 0, row["min"].min(1, where=known, initial=math.inf), math.nan),
        "max": np.where(total > 0, row["max"].max(1, where=known, initial=-math.inf), math.nan),
        "l1_norm": _over(abs_sum, total),
        "abs_sum": abs_sum,
        "l2_norm": np.sqrt(squares + np.where(total > 0, total * overall**2, 0.0)),
        "abs_mean": _over(abs_sum, total),
        # Left-out elements were set to 0 before counting, so they are among neither the non-zero nor the large ones.
        "sparsity": _over(total - row["nonzero"].sum(1, where=known), count),
        "positive_ratio": _over(row["positive"].sum(1, where=known), count),
        "saturation_low": _over(row["le_minus_one"].sum(1, where=known), count),
        "saturation_high": _over(row["ge_one"].sum(1, where=known), count),
    }
    described: list[dict[str, Any]] = [
        dict(zip(columns, each, strict=True)) for each in zip(*map(_numbers, columns.values()), strict=True)
    ]
    for name in ("nan", "inf"):
        for each, number in zip(described, row[name].sum(1).tolist(), strict=True):
            each[name] = int(number)
    if with_channels:
        channels = zip(np.where(known, row["mean"], math.nan), np.sqrt(_over(row["m2"], finite - 1)), strict=True)
        for each, (means, stds) in zip(described, channels, strict=True):
            each |= {"channel_means": means.astype(np.float32), "channel_stds": stds.astype(np.float32)}
    return described


def _over(values: NDArray[np.float64], divisor: Any) -> NDArray[np.float64]:
    """Divide; what cannot be known is NaN."""
    out = np.full(values.shape, math.nan)
    result: NDArray[np.float64] = np.divide(values, divisor, out=out, where=np.asarray(divisor) > 0)
    return result


def _numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Return plain numbers, with None for what cannot be known."""
    return [None if math.isnan(value) else value for value in values.tolist()]
