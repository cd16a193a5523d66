"""The same summaries as in `summary.cu`, in Triton. Simple rather than fast: all moments are added up in float64.

Triton's dialect is not typed Python, so neither mypy nor the annotation rules are asked about it.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

import triton
import triton.language as tl

try:
    from triton import errors
except ImportError:  # an older Triton
    from triton.compiler import errors

language = tl
Failure = getattr(errors, "TritonError", None) or errors.CompilationError
BINS = tl.constexpr(64)
COLUMNS = tl.constexpr(12)
ENTRY_WORDS = tl.constexpr(5)  # of a chunk: address, address of the shadow, length, row, change row
TENSOR_WORDS = tl.constexpr(4)  # of a tensor: first chunk, chunks, row, change row


@triton.jit
def _finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _codes(x, counted):
    """Return the bin of each element, and 64 for those that are in no bin."""
    if x.dtype == tl.float64:
        exponents = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - (1023 - 47)
    else:
        exponents = ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - (127 - 47)
    return tl.where(counted, tl.minimum(tl.maximum(exponents, 0), BINS - 1), BINS)


@triton.jit
def _add(x, inside, shift, sums, squares, sizes, low, high, nan, pos_inf, neg_inf, zero, ge_one):
    finite = inside & (tl.abs(x) < float("inf"))
    wide = tl.where(finite, x, 0.0).to(tl.float64)
    distance = tl.where(finite, wide - shift, 0.0)
    sums += distance
    squares += distance * distance
    sizes += tl.abs(wide)
    low = tl.minimum(low, tl.where(finite, x, float("inf")))
    high = tl.maximum(high, tl.where(finite, x, float("-inf")))
    nan += (inside & (x != x)).to(tl.int32)
    pos_inf += (inside & (x == float("inf"))).to(tl.int32)
    neg_inf += (inside & (x == float("-inf"))).to(tl.int32)
    zero += (finite & (x == 0.0)).to(tl.int32)
    ge_one += (finite & (tl.abs(x) >= 1.0)).to(tl.int32)
    return finite, sums, squares, sizes, low, high, nan, pos_inf, neg_inf, zero, ge_one


@triton.jit
def _store(to, length, shift, sums, squares, sizes, low, high, nan, pos_inf, neg_inf, zero, ge_one):
    """Reduce a chunk's lanes to its partial row."""
    count = length.to(tl.float64)
    nans, positive, negative = tl.sum(nan, 0), tl.sum(pos_inf, 0), tl.sum(neg_inf, 0)
    finite = count - (nans + positive + negative).to(tl.float64)
    divisor = tl.maximum(finite, 1.0)
    total = tl.sum(sums, 0)
    some = finite > 0
    lowest, highest = tl.min(low, 0).to(tl.float64), tl.max(high, 0).to(tl.float64)
    mean = tl.where(lowest == highest, lowest, shift + total / divisor)
    m2 = tl.where(lowest == highest, 0.0, tl.maximum(tl.sum(squares, 0) - total * (total / divisor), 0.0))
    tl.store(to, 0.0)
    tl.store(to + 1, count)
    tl.store(to + 2, nans.to(tl.float64))
    tl.store(to + 3, positive.to(tl.float64))
    tl.store(to + 4, negative.to(tl.float64))
    tl.store(to + 5, tl.sum(zero, 0).to(tl.float64))
    tl.store(to + 6, tl.sum(ge_one, 0).to(tl.float64))
    tl.store(to + 7, tl.where(some, lowest, 0.0))
    tl.store(to + 8, tl.where(some, highest, 0.0))
    tl.store(to + 9, tl.where(some, mean, 0.0))
    tl.store(to + 10, tl.where(some, m2, 0.0))
    tl.store(to + 11, tl.sum(sizes, 0))


@triton.jit
def _publish(bins, row, counts):
    place = tl.arange(0, 2 * BINS)
    tl.atomic_add(bins + row * BINS + place, counts.to(tl.int64), mask=(place < BINS) & (counts > 0))


@triton.jit
def chunk_program(
    chunks,
    partials,
    bins,
    ELEMENT: tl.constexpr,
    REAL: tl.constexpr,
    CHANGE: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Summarise one chunk into a partial row and its row's bins; the change to the shadow as well, if CHANGE."""
    program = tl.program_id(0).to(tl.int64)
    entry = chunks + program * ENTRY_WORDS
    data = tl.load(entry).to(tl.pointer_type(ELEMENT))
    shadow = tl.load(entry + 1).to(tl.pointer_type(ELEMENT))
    length = tl.load(entry + 2).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    wide = tl.zeros([BLOCK], tl.float64)
    none = tl.zeros([BLOCK], tl.int32)
    highest = tl.full([BLOCK], float("-inf"), REAL)
    lowest = tl.full([BLOCK], float("inf"), REAL)
    has_some = length > 0
    start = tl.load(data, mask=has_some, other=0.0).to(REAL)
    shift = _finite_or_zero(start).to(tl.float64)
    s, q, a, low, high, nan, pos, neg, zero, one = wide, wide, wide, lowest, highest, none, none, none, none, none
    counts = tl.zeros([2 * BINS], tl.int32)
    if CHANGE:
        c_shift = _finite_or_zero(start - tl.load(shadow, mask=has_some, other=0.0).to(REAL)).to(tl.float64)
        tl.debug_barrier()  # all have read the first shadow before anyone overwrites it
        cs, cq, ca, c_low, c_high = wide, wide, wide, lowest, highest
        c_nan, c_pos, c_neg, c_zero, c_one = none, none, none, none, none
        c_counts = tl.zeros([2 * BINS], tl.int32)
    for offset in range(0, length, BLOCK):
        inside = offset + lanes < length
        raw = tl.load(data + offset + lanes, mask=inside, other=0.0)
        x = raw.to(REAL)
        finite, s, q, a, low, high, nan, pos, neg, zero, one = _add(
            x, inside, shift, s, q, a, low, high, nan, pos, neg, zero, one
        )
        if HISTOGRAM:
            counts += tl.histogram(_codes(x, finite & (x != 0.0)), 2 * BINS)
        if CHANGE:
            moved = x - tl.load(shadow + offset + lanes, mask=inside, other=0.0).to(REAL)
            tl.store(shadow + offset + lanes, raw, mask=inside)
            finite, cs, cq, ca, c_low, c_high, c_nan, c_pos, c_neg, c_zero, c_one = _add(
                moved, inside, c_shift, cs, cq, ca, c_low, c_high, c_nan, c_pos, c_neg, c_zero, c_one
            )
            if HISTOGRAM:
                c_counts += tl.histogram(_codes(moved, finite & (moved != 0.0)), 2 * BINS)
    ways: tl.constexpr = 2 if CHANGE else 1
    to = partials + program * ways * COLUMNS
    _store(to, length, shift, s, q, a, low, high, nan, pos, neg, zero, one)
    if HISTOGRAM:
        _publish(bins, tl.load(entry + 3), counts)
    if CHANGE:
        _store(to + COLUMNS, length, c_shift, cs, cq, ca, c_low, c_high, c_nan, c_pos, c_neg, c_zero, c_one)
        if HISTOGRAM:
            _publish(bins, tl.load(entry + 4), c_counts)


@triton.jit
def _column(partials, index, inside, WAYS: tl.constexpr, way, COLUMN: tl.constexpr):
    return tl.load(partials + (index * WAYS + way) * COLUMNS + COLUMN, mask=inside, other=0.0)


@triton.jit
def _finite_column(partials, index, inside, WAYS: tl.constexpr, way):
    count = _column(partials, index, inside, WAYS, way, 1)
    for column in tl.static_range(2, 5):
        count -= _column(partials, index, inside, WAYS, way, column)
    return count


@triton.jit
def merge_program(tensors, partials, rows, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Merge the partial rows of one tensor (or of its change) into its row."""
    way = tl.program_id(1)
    entry = tensors + tl.program_id(0).to(tl.int64) * TENSOR_WORDS
    first, chunks = tl.load(entry), tl.load(entry + 1)
    to = rows + tl.load(entry + 2 + way) * COLUMNS
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    none = tl.zeros([BLOCK], tl.float64)
    finite = none
    low, high = none + float("inf"), none + float("-inf")
    for start in range(0, chunks, BLOCK):
        inside = start + lanes < chunks
        index = first + start + lanes
        some = _finite_column(partials, index, inside, WAYS, way)
        finite += some
        low = tl.minimum(low, tl.where(some > 0, _column(partials, index, inside, WAYS, way, 7), float("inf")))
        high = tl.maximum(high, tl.where(some > 0, _column(partials, index, inside, WAYS, way, 8), float("-inf")))
    right = tl.sum(finite, 0)
    # A second and a third look, rather than sums that could cancel or overflow.
    means = none
    for start in range(0, chunks, BLOCK):
        inside = start + lanes < chunks
        index = first + start + lanes
        weight = _finite_column(partials, index, inside, WAYS, way) / tl.maximum(right, 1.0)
        means += weight * _column(partials, index, inside, WAYS, way, 9)
    lowest, highest = tl.min(low, 0), tl.max(high, 0)
    mean = tl.where(lowest == highest, lowest, tl.sum(means, 0))
    m2s = none
    for start in range(0, chunks, BLOCK):
        inside = start + lanes < chunks
        index = first + start + lanes
        some = _finite_column(partials, index, inside, WAYS, way)
        distance = tl.where(some > 0, _column(partials, index, inside, WAYS, way, 9) - mean, 0.0)
        m2s += _column(partials, index, inside, WAYS, way, 10) + some * distance * distance
    left = tl.load(to + 1) - tl.load(to + 2) - tl.load(to + 3) - tl.load(to + 4)
    if right > 0:
        if left > 0:
            weight = right / (left + right)
            before = tl.load(to + 9)
            delta = mean - before
            tl.store(to + 7, tl.minimum(tl.load(to + 7), lowest))
            tl.store(to + 8, tl.maximum(tl.load(to + 8), highest))
            tl.store(to + 9, before + delta * weight)
            tl.store(to + 10, tl.load(to + 10) + tl.sum(m2s, 0) + delta * delta * left * weight)
        else:
            tl.store(to + 7, lowest)
            tl.store(to + 8, highest)
            tl.store(to + 9, mean)
            tl.store(to + 10, tl.sum(m2s, 0))
    # Last, and the counts after everything that asked for what the row held before.
    tl.debug_barrier()
    tl.store(to, tl.load(to) + 1.0)
    for column in tl.static_range(1, 7):
        _add_column(to, partials, first, chunks, lanes, WAYS, way, column, BLOCK)
    _add_column(to, partials, first, chunks, lanes, WAYS, way, 11, BLOCK)


@triton.jit
def _add_column(to, partials, first, chunks, lanes, WAYS: tl.constexpr, way, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, chunks, BLOCK):
        total += _column(partials, first + start + lanes, start + lanes < chunks, WAYS, way, COLUMN)
    tl.store(to + COLUMN, tl.load(to + COLUMN) + tl.sum(total, 0))
