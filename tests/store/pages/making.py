"""Nested values of every kind, and ways to compare them and to write folders of pages."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sonde.store.pages import PageWriter

PLAIN = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"]
PLAIN += ["float64", "complex64", "complex128", ">f4", ">i2", "<U3", "S4", "M8[ns]", "m8[s]", "V5"]
ODD = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4]
RECORDS = [[("a", "<f4"), ("b", "<i8", (2,))], [("x", "U2"), ("y", [("z", "?")])]]
DTYPES = [np.dtype(each) for each in (*PLAIN, *ODD, *RECORDS)]

numbers = st.integers(-(2**70), 2**70) | st.integers(-5, 5) | st.floats(width=64)
keys = st.text(max_size=4) | st.integers(-3, 3) | st.sampled_from(["a/b", "a%2Fb", "~2", "padding", "__metadata__"])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    content = draw(st.binary(min_size=8, max_size=8))
    size = math.prod(shape) * dtype.itemsize
    if dtype.kind == "U":  # not every four bytes are a character
        return np.full(shape, draw(st.text(st.characters(exclude_characters="\0"), max_size=3)), dtype)
    if dtype.fields is not None:
        return np.zeros(shape, dtype)
    raw = (content * (size // 8 + 1))[:size]
    if dtype.name in ("bool", "int4"):
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype).reshape(shape).copy() if size else np.zeros(shape, dtype)


leaves = (
    st.none()
    | st.booleans()
    | numbers
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers()
    | arrays()
    | arrays().filter(lambda each: each.size and each.dtype.fields is None).map(lambda each: each.reshape(-1)[0])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(st.integers(0, 9), max_size=2)
    ),
    max_leaves=8,
)
datapoints = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=6)


def same(left: object, right: object) -> bool:
    """Return whether two values are equal in kind and to the bit."""
    if isinstance(left, np.ndarray | np.generic):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return repr(left) == repr(right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    return left == right


def capture(at: int) -> dict[str, object]:
    """Return the outputs of a datapoint, the same each time."""
    rng = np.random.default_rng(at)
    return {
        "features": {"layer1": [rng.normal(size=(3, 4, 5)).astype("f4"), np.arange(at % 4, dtype="u1")], "at": at},
        "stats": {"mean": 0.5 * at, "nan": math.nan, "names": ("a", None)},
        "logits": rng.normal(size=7).astype(ml_dtypes.bfloat16),
    }


def write(folder: Path, ids, *, page_bytes: int = 1 << 20, close: bool = True, **options) -> PageWriter:
    writer = PageWriter(folder, page_bytes=page_bytes, sync=False, clock=lambda: 1_700_000_000.0, **options)
    for each in ids:
        writer.add(each, capture(each), info={"score": each / 2})
    if close:
        writer.close()
    return writer
