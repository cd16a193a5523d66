"""The row and the bins of a list of numbers, the slow and obvious way: exact sums, one number at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sonde.core import schema


@dataclass(frozen=True)
class Bounds:
    """How far a kernel may be off. Counts, min, max and bins may not be off at all.

    The mean's error is bounded by `mean` times the mean magnitude: a mean of zero cannot be right to many digits.
    """

    mean: float
    m2: float
    abs_sum: float


# No float32 sum runs over more than 64 elements: 64 roundings of 2**-24 are 4e-6. Squares have twice that.
FLOAT32_SUMS = Bounds(mean=4e-6, m2=1e-5, abs_sum=4e-6)
# float64 sums run over thousands of elements; the shift of the first block may be off by as much as all of them.
FLOAT64_SUMS = Bounds(mean=1e-11, m2=1e-10, abs_sum=1e-12)


def oracle(values: np.ndarray, tensors: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact row and bins of float64 `values` that came as `tensors` tensors."""
    row, bins = _slow(values.astype(np.float64).tobytes())
    row = row.copy()
    row[schema.SEEN] = tensors
    return row, bins.copy()


@lru_cache(maxsize=512)  # every kernel is asked about the same numbers
def _slow(values: bytes) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.frombuffer(values).tolist()
    finite = [number for number in numbers if math.isfinite(number)]
    row = dict.fromkeys(schema.COLUMNS, 0.0)
    row["count"] = len(numbers)
    row["nan"] = sum(math.isnan(number) for number in numbers)
    row["pos_inf"], row["neg_inf"] = numbers.count(math.inf), numbers.count(-math.inf)
    row["zero"] = finite.count(0.0)
    row["ge_one"] = sum(abs(number) >= 1 for number in finite)
    if finite:
        row["min"], row["max"] = min(finite), max(finite)
        row["mean"] = mean = math.fsum(finite) / len(finite)
        with np.errstate(over="ignore"):
            row["m2"] = float(math.fsum(np.square(np.array(finite) - mean)))
        row["abs_sum"] = math.fsum(map(abs, finite))
    bins = np.zeros(schema.NUM_BINS, dtype=np.uint64)
    for number in finite:
        if number:
            exponent = math.frexp(number)[1] - 1  # 2**exponent <= |number| < 2**(exponent + 1)
            bins[min(max(exponent - schema.FIRST_EXPONENT, 0), schema.NUM_BINS - 1)] += 1
    return np.array([row[name] for name in schema.COLUMNS]), bins


EXACT = [column for column in range(schema.NUM_COLUMNS) if schema.COLUMNS[column] not in ("mean", "m2", "abs_sum")]


def assert_row(row: np.ndarray, expected: np.ndarray, bounds: Bounds = FLOAT32_SUMS) -> None:
    """Fail, naming the column, where a row differs from the oracle's by more than its bound."""
    for column in EXACT:
        assert row[column] == expected[column], f"{schema.COLUMNS[column]}: {row[column]} is not {expected[column]}"
    mean_magnitude = expected[schema.ABS_SUM] / max(1.0, float(schema.finite(expected)))
    limits = {
        schema.MEAN: bounds.mean * mean_magnitude,
        schema.M2: bounds.m2 * expected[schema.M2],
        schema.ABS_SUM: bounds.abs_sum * expected[schema.ABS_SUM],
    }
    for column, limit in limits.items():
        if row[column] == expected[column]:
            continue  # both may be infinite
        off = abs(row[column] - expected[column])
        name = schema.COLUMNS[column]
        assert off <= limit, f"{name}: {row[column]} is {off:.3g} off {expected[column]} (limit {limit:.3g})"
