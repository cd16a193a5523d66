"""Previews: held to a slow, obvious oracle, and small."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sonde.core import schema
from sonde.records import summarise
from sonde.store.pages import PageWriter, load_debug_outputs, preview
from sonde.store.pages.preview import MAX_BYTES, NOT_FINITE, SIDE, STATS, measure, pack, unpack

floats = st.floats(width=32) | st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1.0])


def check_row(array):
    found = np.array([measure(array).stats[name] for name in schema.COLUMNS])
    expected, _ = summarise(array.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * max(1.0, np.abs(expected[schema.MAX])))


@settings(deadline=None, max_examples=80)
@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=6), elements=floats))
def test_the_statistics_are_those_of_the_elements(array):
    with np.errstate(all="ignore"):
        check_row(array)


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", "i4", "u1", "?", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=str
)
def test_large_arrays_are_measured_piece_by_piece(dtype):
    array = (np.random.default_rng(0).normal(size=(3, 200, 201)) * 3).astype(dtype)
    check_row(array)
    assert measure(array).stats["seen"] == 1


def test_quantiles_are_of_a_sample():
    stats = measure(np.arange(100_000.0)).stats
    assert stats["p50"] == pytest.approx(50_000, rel=0.01)
    assert stats["p01"] == pytest.approx(1000, rel=0.05)
    assert stats["p99"] == pytest.approx(99_000, rel=0.01)
    assert 2048 < stats["sampled"] <= 4096
    exact = measure(np.array([3.0, math.nan, 1.0, 2.0])).stats
    assert (exact["p01"], exact["p50"], exact["p99"], exact["sampled"]) == (1.0, 2.0, 3.0, 3.0)


def test_what_was_not_measured_is_not_there():
    empty = measure(np.zeros((0, 3)))
    assert empty.thumbnail is None
    assert math.isnan(empty.stats["p50"])
    assert empty.stats["count"] == 0
    assert measure(np.array(["a", "b"])).stats == {}


@pytest.mark.parametrize("shape", [(5, 7), (28, 28), (100, 3), (1, 1, 300, 300), (1, 64)], ids=str)
def test_a_plane_is_averaged_to_a_thumbnail(shape):
    array = np.random.default_rng(1).normal(size=shape)
    small = measure(array)
    high, wide = (min(SIDE, length) for length in shape[-2:])
    assert small.thumbnail.shape == (high, wide)
    assert small.channels == ()
    plane = array.reshape(shape[-2:])
    rows, columns = (np.arange(n + 1) * length // n for n, length in ((high, shape[-2]), (wide, shape[-1])))
    expected = np.array(
        [[plane[rows[i] : rows[i + 1], columns[j] : columns[j + 1]].mean() for j in range(wide)] for i in range(high)]
    )
    assert small.low == pytest.approx(expected.min())
    assert small.high == pytest.approx(expected.max())
    levels = (expected - expected.min()) / (expected.max() - expected.min()) * 254
    np.testing.assert_allclose(small.thumbnail, levels, atol=0.51)


def test_the_most_active_channels_come_first():
    array = np.zeros((6, 8, 8), np.float32)
    for channel, activity in enumerate([1, 5, 0, -9, 2, 3]):
        array[channel] = activity
    small = measure(array)
    assert small.channels == (3, 1, 5, 4, 0, 2)
    assert small.num_tiles == 4
    assert small.thumbnail.shape == (16, 16)
    tiles = [small.thumbnail[:8, :8], small.thumbnail[:8, 8:], small.thumbnail[8:, :8], small.thumbnail[8:, 8:]]
    shown = [tile[0, 0] / 254 * (small.high - small.low) + small.low for tile in tiles]
    np.testing.assert_allclose(shown, [-9, 5, 3, 2], atol=0.06)
    assert measure(np.ones((40, 4, 4))).channels == tuple(range(16))


def test_elements_that_are_not_finite_are_marked_and_rank_nothing():
    array = np.ones((3, 4, 4))
    array[1, 0, 0] = math.nan
    array[2] = math.inf
    small = measure(array)
    assert small.channels == (0, 1, 2)
    assert small.thumbnail[0, 4] == NOT_FINITE
    assert (small.thumbnail[4:, :4] == NOT_FINITE).all()
    assert measure(np.full((3, 3), math.nan)).thumbnail.min() == NOT_FINITE
    wide = measure(np.array([[-1.7e308, 1.7e308]]))
    assert wide.thumbnail.tolist() == [[0, 254]]


@pytest.mark.parametrize("shape", [(), (9,), (2048, 2048), (512, 56, 56), (2, 16, 40, 40)], ids=str)
def test_a_preview_takes_about_a_kilobyte_and_comes_back(shape):
    small = measure(np.random.default_rng(0).normal(size=shape).astype("f4"))
    packed = pack(small)
    assert len(packed) == small.nbytes <= MAX_BYTES <= 1024
    back = unpack(packed, small.shape, small.dtype)
    assert back.stats == small.stats
    assert (back.low, back.high) == pytest.approx((small.low, small.high), nan_ok=True)
    assert (back.channels, back.num_tiles) == (small.channels, small.num_tiles)
    np.testing.assert_array_equal(back.thumbnail, small.thumbnail)
    assert unpack(packed[:-1], (), "") is None
    assert unpack(packed[:10], (), "") is None


def test_complex_elements_show_their_magnitude():
    small = measure(np.full((2, 2), 3 + 4j))
    assert small.stats["mean"] == 5.0
    assert small.dtype == "complex128"


def test_browsing_opens_no_page(tmp_path):
    with PageWriter(tmp_path, page_bytes=1 << 20) as writer:
        writer.add(3, {"maps": {"layer1": np.ones((2, 5, 5), np.float32)}, "text": "x"})
    (tmp_path / "page_0.safetensors").unlink()
    small = load_debug_outputs(tmp_path).previews(3)
    assert list(small) == ["maps", "text"]
    assert small["maps"]["layer1"].shape == (2, 5, 5)
    assert small["maps"]["layer1"].dtype == "float32"
    assert small["maps"]["layer1"].stats["count"] == 50
    assert list(small["maps"]["layer1"].stats) == list(STATS) == list(preview.STATS)
