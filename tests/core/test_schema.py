"""Rows merge exactly, in any order and grouping."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.core import schema, statistics
from sonde.errors import OptionError
from sonde.records import Event, Reading, Site, summarise

floats = st.floats(allow_nan=True, allow_infinity=True, width=32)
lists = st.lists(floats, max_size=30)


def close(left, right):
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-300)


def oracle(values):
    """The row of some numbers, slowly and with exact sums."""
    good = [v for v in values if math.isfinite(v)]
    mean = math.fsum(good) / len(good) if good else 0.0
    return {
        "count": len(values),
        "nan": sum(map(math.isnan, values)),
        "pos_inf": sum(v == math.inf for v in values),
        "neg_inf": sum(v == -math.inf for v in values),
        "zero": sum(v == 0 for v in good),
        "ge_one": sum(abs(v) >= 1 for v in good),
        "min": min(good, default=0.0),
        "max": max(good, default=0.0),
        "mean": mean,
        "m2": math.fsum((v - mean) ** 2 for v in good),
        "abs_sum": math.fsum(map(abs, good)),
    }


@given(lists)
def test_a_summary_is_what_it_says(values):
    row, bins = summarise(np.array(values, dtype=np.float64))
    for name, expected in oracle(values).items():
        scale = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
        tolerance = 1e-12 * scale * max(1, len(values)) if name in ("mean", "abs_sum") else 1e-300
        got = row[schema.COLUMNS.index(name)]
        assert got == pytest.approx(expected, rel=1e-9, abs=max(tolerance, 1e-12 * scale**2 if name == "m2" else 0))
    edges = schema.bin_edges()
    for k in range(schema.NUM_BINS):
        assert bins[k] == sum(math.isfinite(v) and v != 0 and edges[k] <= abs(v) < edges[k + 1] for v in values)


@given(lists, lists)
def test_rows_of_parts_merge_into_the_row_of_the_whole(left, right):
    parts = [summarise(np.array(part, dtype=np.float64)) for part in (left, right)]
    whole, bins = summarise(np.array(left + right, dtype=np.float64))
    merged = schema.merge_rows(parts[0][0], parts[1][0])
    assert merged[schema.SEEN] == 2
    exact = [c for c in range(schema.NUM_COLUMNS) if c not in (schema.SEEN, schema.MEAN, schema.M2, schema.ABS_SUM)]
    np.testing.assert_array_equal(merged[exact], whole[exact])
    scale = max((abs(v) for v in left + right if math.isfinite(v)), default=0.0)
    np.testing.assert_allclose(merged[schema.MEAN], whole[schema.MEAN], rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(merged[schema.M2], whole[schema.M2], rtol=1e-9, atol=1e-10 * scale**2)
    np.testing.assert_array_equal(parts[0][1] + parts[1][1], bins)


@given(lists)
def test_an_empty_row_is_neutral(values):
    row, _ = summarise(np.array(values, dtype=np.float64))
    nothing = np.zeros(schema.NUM_COLUMNS)
    np.testing.assert_array_equal(schema.merge_rows(row, nothing), row)
    np.testing.assert_array_equal(schema.merge_rows(nothing, row), row)


@given(st.lists(lists, min_size=1, max_size=6), st.data())
def test_groups_merge_like_their_members_one_by_one(parts, data):
    rows = np.stack([summarise(np.array(part, dtype=np.float64))[0] for part in parts])
    cuts = data.draw(st.sets(st.integers(1, len(parts) - 1))) if len(parts) > 1 else set()
    starts = np.array([0, *sorted(cuts)], dtype=np.intp)
    merged = schema.merge_groups(rows, starts)
    for group, (start, stop) in enumerate(zip(starts, [*starts[1:], len(parts)], strict=True)):
        expected = np.zeros(schema.NUM_COLUMNS)
        for row in rows[start:stop]:
            expected = schema.merge_rows(expected, row)
        np.testing.assert_array_equal(merged[group], expected)


@given(floats)
def test_one_number_is_a_row(value):
    np.testing.assert_array_equal(schema.row_of_value(value), summarise(np.array([value], dtype=np.float64))[0])


def test_implicit_zeros_can_be_added():
    row, _ = summarise(np.array([1.0, 2.0]))
    padded = schema.merge_rows(row, schema.row_of_zeros(2))
    expected, _ = summarise(np.array([1.0, 2.0, 0.0, 0.0]))
    close(padded, expected)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.sampled_from([0.5, 2.0, 1024.0]))
def test_scaled_rows_are_those_of_scaled_numbers(values, factor):
    row, _ = summarise(np.array(values))
    expected, _ = summarise(np.array(values) * factor)
    scaled = schema.scale_rows(row, factor)
    scaled[schema.GE_ONE] = expected[schema.GE_ONE]
    np.testing.assert_allclose(scaled, expected, rtol=1e-9, atol=1e-9)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_lies_within_its_bounds(values, q):
    reading = Reading.of(values)
    true = np.quantile(np.abs(np.array(values)), q, method="lower")
    estimate, low, high = reading.abs_quantile(q)
    assert low <= true <= high
    assert low <= estimate <= high
    if 2.0**-46 <= true < 2.0**16:
        assert high <= 2 * low


def test_measures_match_numpy():
    values = np.random.default_rng(0).normal(3, 2, 1000)
    reading = Reading.of(values)
    expected = {
        "mean": values.mean(),
        "std": values.std(ddof=1),
        "var": values.var(ddof=1),
        "norm": np.linalg.norm(values),
        "rms": np.sqrt(np.mean(values**2)),
        "l1": np.abs(values).sum(),
        "abs_mean": np.abs(values).mean(),
        "abs_max": np.abs(values).max(),
        "ge_one_share": np.mean(np.abs(values) >= 1),
    }
    for name, value in expected.items():
        assert reading.get(name) == pytest.approx(value, rel=1e-12)


def test_what_cannot_be_known_is_none():
    empty, one, lost = Reading.of([]), Reading.of([5.0]), Reading.of([math.nan])
    assert (empty.mean, empty.std, empty.get("zero_share"), empty.abs_quantile(0.5)) == (None, None, None, None)
    assert (one.mean, one.std) == (5.0, None)
    assert (lost.mean, lost.nonfinite, lost.finite) == (None, 1, 0)
    assert Reading(one.row).get("abs_p50") is None, "there is no histogram"


def test_every_measure_can_be_computed_for_many_rows():
    rows = np.stack([Reading.of(v).row for v in ([], [1.0], [1.0, -2.0, math.inf])])
    bins = np.stack([Reading.of(v).bins for v in ([], [1.0], [1.0, -2.0, math.inf])])
    for name in statistics.names():
        assert statistics.compute(name, rows, bins).shape == (3,)


def test_a_wrong_measure_names_the_nearest():
    with pytest.raises(OptionError, match=r"nearest: .*norm"):
        statistics.compute("nrom", np.zeros(schema.NUM_COLUMNS))
    with pytest.raises(OptionError, match="between 0 and 1"):
        Reading.of([1.0]).abs_quantile(50)


def test_sites_survive_json_and_have_readable_keys():
    site = Site(id=3, name="a.b", quantity="output", phase="eval", call=2, part="[1]", shape=(2, 3), aliases=("c",))
    assert site.key == "a.b:output[1]#2@eval"
    assert Site.from_json(site.to_json()) == site
    assert Site.from_json(site.to_json() | {"later": 1}) == site
    assert Site(id=0, name="w", quantity="gradient").to_json() == {"id": 0, "name": "w", "quantity": "gradient"}


def test_readings_merge_over_steps():
    window = Reading.of([1.0], step=4).merge(Reading.of([3.0], step=5))
    assert (window.step, window.span, window.mean, window.min, window.max) == (4, 2, 2.0, 1.0, 3.0)
    assert Event(event_type="a", message="b", timestamp=0.0).data == {}


def test_one_row_merges_bit_for_bit_as_many_do():
    rng = np.random.default_rng(0)
    left, right = (schema.rows_of_values(rng.normal(scale=1e6, size=2000)) for _ in range(2))
    together = schema.merge_rows(left, right)
    np.testing.assert_array_equal(together, [schema.merge_rows(a, b) for a, b in zip(left, right, strict=True)])
