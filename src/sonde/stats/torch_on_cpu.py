"""Summaries of CPU tensors with nothing but torch operations: for machines where the native library was not built.

Only operations that are fast on a CPU are used, in chunks whose temporaries stay small, and rare cases
(non-finite values, squares beyond float32, a mean far from zero) are worked out only where cheap results ask for them.
Reading a scalar of a CPU tensor waits for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.core import schema
from sonde.core.schema import Bins
from sonde.stats.adapt import Readable, widened
from sonde.stats.protocol import HostArena

# Measured on a GPT-like step: smaller chunks stay in the cache but pay for more calls and leave torch's threads idle.
_CHUNK: Final = 1 << 19
# Sums of float32 squares outside these lie too near to overflow or underflow to be trusted.
_SMALLEST_SQUARES, _LARGEST_SQUARES = 1e-28, 1e38
_BIAS: Final = 127  # the exponent bits of 1.0 in float32
# The exponents of the first bin, which also takes all that is smaller, and of the last, which takes all that is larger.
_FIRST: Final = _BIAS + schema.FIRST_EXPONENT
_LAST: Final = _FIRST + schema.NUM_BINS - 1
# Elements from which it pays to clear and add up the 16,384 counts of pairs.
_PAIRS_FROM: Final = 1 << 15


def add(readable: Readable, row: int, arena: HostArena, histogram: bool) -> None:
    """Merge the summary of a tensor into a row."""
    # In the order of memory: reshape() would copy a transposed tensor.
    flat = readable.values.as_strided((readable.values.numel(),), (1,))
    tally = _Tally(*arena.rows[row].tolist())
    tally.seen += 1
    chunks = (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)) if len(flat) > _CHUNK else (flat,)
    for chunk in chunks:
        _add_chunk(widened(chunk), tally, arena.bins[row] if histogram else None)
    arena.rows[row] = tally.to_row()
    if readable.implicit_zeros:
        arena.add_zeros(row, readable.implicit_zeros)


@dataclass(slots=True)
class _Tally:
    """A row as plain numbers, whose fields are the columns of the schema in order."""

    seen: float
    count: float
    nan: float
    pos_inf: float
    neg_inf: float
    zero: float
    ge_one: float
    min: float
    max: float
    mean: float
    m2: float
    abs_sum: float

    @property
    def finite(self) -> float:
        return self.count - self.nan - self.pos_inf - self.neg_inf

    def to_row(self) -> list[float]:
        return [getattr(self, column) for column in schema.COLUMNS]

    def add_moments(self, size: int, low: float, high: float, mean: float, m2: float) -> None:
        """Merge the moments of `size` more finite elements, whose counts have been added already."""
        total = self.finite
        before = total - size
        if before == 0:
            self.min, self.max, self.mean, self.m2 = low, high, mean, m2
            return
        delta = mean - self.mean
        self.min, self.max = min(self.min, low), max(self.max, high)
        self.mean += delta * (size / total)
        self.m2 += m2 + delta * delta * before * (size / total)


def _add_chunk(chunk: Tensor, tally: _Tally, bins: Bins | None) -> None:
    size = chunk.numel()
    tally.count += size
    if size == 0:
        return
    low, high = (edge.item() for edge in torch.aminmax(chunk))
    if not math.isfinite(low + high) and not (math.isfinite(low) and math.isfinite(high)):
        chunk = _without_nonfinite(chunk, tally)
        size = chunk.numel()
        if size == 0:
            return
        low, high = (edge.item() for edge in torch.aminmax(chunk))
    magnitudes = chunk.abs()
    mean, m2, abs_sum = _moments(chunk, magnitudes, low, high)
    tally.abs_sum += abs_sum
    tally.add_moments(size, low, high, mean, m2)
    if bins is None:
        tally.zero += _zeros(chunk) if low <= 0.0 <= high else 0
        tally.ge_one += int(torch.count_nonzero(magnitudes >= 1.0)) if max(-low, high) >= 1.0 else 0
    else:
        found = _count_bins(magnitudes)
        # Zeros have the smallest exponent, but are in no bin.
        zeros = _zeros(chunk) if found[0] else 0
        found[0] -= zeros
        bins += found.view(np.uint64)
        tally.zero += zeros
        tally.ge_one += int(found[schema.ONE_BIN :].sum())


def _without_nonfinite(chunk: Tensor, tally: _Tally) -> Tensor:
    tally.nan += int(torch.count_nonzero(chunk.isnan()))
    tally.pos_inf += int(torch.count_nonzero(chunk == math.inf))
    tally.neg_inf += int(torch.count_nonzero(chunk == -math.inf))
    return chunk[chunk.isfinite()]


def _moments(chunk: Tensor, magnitudes: Tensor, low: float, high: float) -> tuple[float, float, float]:
    """Return mean, sum of squared deviations and sum of absolute values of finite elements."""
    size = chunk.numel()
    if low == high:
        return low, 0.0, abs(low) * size
    squares = _sum_of_squares(chunk)
    if chunk.dtype == torch.float32 and not _SMALLEST_SQUARES < squares < _LARGEST_SQUARES:
        chunk, magnitudes = chunk.double(), magnitudes.double()
        squares = _sum_of_squares(chunk)
    total = chunk.sum().item()
    mean = total / size
    abs_sum = magnitudes.sum().item()
    if math.isinf(squares):  # float64 elements beyond 1e154
        return mean, squares, abs_sum
    m2 = squares - total * mean
    if m2 < squares / 4:  # most of it cancelled: the mean is far from zero, so move the origin there first
        mean, m2 = _centred_moments(chunk, mean)
    return mean, m2, abs_sum


def _sum_of_squares(values: Tensor) -> float:
    # Not torch.dot: it runs one long float32 sum per lane and is off by 1e-5 on a chunk; sum() adds up pairwise.
    return values.square().sum().item()


def _centred_moments(chunk: Tensor, mean: float) -> tuple[float, float]:
    size = chunk.numel()
    origin = float(np.float32(mean)) if chunk.dtype == torch.float32 else mean
    centred = chunk - origin
    squares = _sum_of_squares(centred)
    if chunk.dtype == torch.float32 and squares < _SMALLEST_SQUARES:
        centred = chunk.double() - origin
        squares = _sum_of_squares(centred)
    rest = centred.sum().item()
    return origin + rest / size, max(0.0, squares - rest * (rest / size))


def _zeros(chunk: Tensor) -> int:
    return chunk.numel() - int(torch.count_nonzero(chunk))


def _count_bins(magnitudes: Tensor) -> NDArray[np.int64]:
    """Return how many finite elements are in each bin, by their exponents. Overwrites the magnitudes."""
    exponents = _exponents(magnitudes).clamp_(_FIRST, _LAST)
    size = exponents.numel()
    found: NDArray[np.int64]
    if size < _PAIRS_FROM:
        found = torch.bincount(exponents, minlength=_LAST + 1).numpy()[_FIRST:]
        return found
    # In pairs, since bincount takes its time for each number, the more so where many are equal.
    pairs = exponents[: size - size % 2].view(torch.int16).sub_(_FIRST << 8 | _FIRST)
    counts = torch.bincount(pairs, minlength=schema.NUM_BINS << 8).numpy().reshape(-1, 256)[:, : schema.NUM_BINS]
    found = counts.sum(0) + counts.sum(1)
    if size % 2:
        found[int(exponents[-1]) - _FIRST] += 1
    return found


def _exponents(magnitudes: Tensor) -> Tensor:
    """Return the exponent bits as float32 has them, in bytes, which bincount is quick on. Overwrites the magnitudes."""
    if magnitudes.dtype == torch.float32:
        return magnitudes.view(torch.int32).__irshift__(23).to(torch.uint8)
    exponents = magnitudes.view(torch.int64).__irshift__(52).sub_(1023 - _BIAS)
    return exponents.clamp_(0, 255).to(torch.uint8)
