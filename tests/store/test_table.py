"""Sorting, merging and thinning keep every element counted."""

from functools import reduce
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.making import make_block, measured_runs

from sonde.records import Reading
from sonde.store.log import codec, retention, table


def readings(rows, site):
    """Read one site the slow way."""
    at = table.find_site(rows.site, site)
    if at is None:
        return []
    found = []
    for i in range(int(rows.offset[at]), int(rows.offset[at + 1])):
        cut = slice(i, i + 1)
        flat = rows.hist[int(rows.hist_offset[i]) : int(rows.hist_offset[i + 1])]
        bins, binned = codec.unpack_bins(rows.hist_lo[cut], rows.hist_len[cut], flat)
        found.append(Reading(rows.stats[:, i], bins[0] if binned[0] else None, int(rows.step[i]), int(rows.span[i])))
    return found


def expected(blocks, site):
    found = []
    for block in blocks:
        found += [
            Reading(block.rows[i], block.bins[i] if block.binned[i] else None, block.step, block.span)
            for i in np.flatnonzero(block.sites == site)
        ]
    return found


def assert_same(left, right):
    assert [(r.step, r.span) for r in left] == [(r.step, r.span) for r in right]
    for one, two in zip(left, right, strict=True):
        np.testing.assert_array_equal(one.row, two.row)
        assert (one.bins is None) == (two.bins is None)
        if one.bins is not None:
            np.testing.assert_array_equal(one.bins, two.bins)


@given(measured_runs())
def test_a_table_holds_what_its_blocks_held(blocks):
    rows = table.from_blocks([codec.pack(block) for block in blocks])
    for site in range(5):
        assert_same(readings(rows, site), expected(blocks, site))
    assert rows.blocks.step.tolist() == [block.step for block in blocks]


@given(measured_runs(), st.lists(st.integers(0, 20), max_size=3))
def test_merging_tables_is_sorting_all_blocks(blocks, cuts):
    packed = [codec.pack(block) for block in blocks]
    bounds = [0, *sorted(min(cut, len(packed)) for cut in cuts), len(packed)]
    parts = [table.from_blocks(packed[a:b]) for a, b in pairwise(bounds)]
    merged, whole = table.merge(parts), table.from_blocks(packed)
    for name in ("site", "offset", "step", "span", "stats", "hist_lo", "hist_len", "hist_offset", "hist"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(whole, name))


@settings(deadline=None)
@given(measured_runs(), st.sampled_from([2, 4, 8, 16, 64]))
def test_thinning_is_merging_the_readings_of_each_window(blocks, window):
    rows = table.from_blocks([codec.pack(block) for block in blocks])
    thinned = retention.thin(rows, window)
    for site in range(5):
        groups = {}
        for reading in expected(blocks, site):
            groups.setdefault(reading.step // window, []).append(reading)
        wanted = [reduce(Reading.merge, group) for group in groups.values()]
        found = readings(thinned, site)
        assert len(found) == len(wanted)
        for one, two, group in zip(found, wanted, groups.values(), strict=True):
            np.testing.assert_array_equal(one.row, two.row)
            assert (one.bins is None) == (two.bins is None)
            if one.bins is not None:
                np.testing.assert_array_equal(one.bins, two.bins)
            # It covers the steps of its window's blocks, which may be more than those of this site.
            assert one.step <= group[0].step
            assert group[-1].step < one.step + one.span
            assert one.step // window == (one.step + one.span - 1) // window
    assert thinned.merged.sum() == len(rows)


@settings(deadline=None)
@given(measured_runs())
def test_thinning_twice_is_thinning_wider(blocks):
    rows = table.from_blocks([codec.pack(block) for block in blocks])
    twice, once = retention.thin(retention.thin(rows, 4), 16), retention.thin(rows, 16)
    for name in ("site", "offset", "step", "span", "merged", "hist_lo", "hist_len", "hist"):
        np.testing.assert_array_equal(getattr(twice, name), getattr(once, name))
    np.testing.assert_allclose(twice.stats, once.stats, rtol=1e-9, atol=1e-9)
    for name in ("step", "time", "epoch", "skipped", "span"):
        np.testing.assert_array_equal(getattr(twice.blocks, name), getattr(once.blocks, name))


def test_thinning_works_in_pieces(monkeypatch):
    blocks = [codec.pack(make_block(step, 5)) for step in range(50)]
    rows = table.from_blocks(blocks)
    whole = retention.thin(rows, 4)
    monkeypatch.setattr(retention, "_ROWS_AT_ONCE", 7)
    pieces = retention.thin(rows, 4)
    np.testing.assert_array_equal(whole.hist, pieces.hist)
    np.testing.assert_array_equal(whole.hist_offset, pieces.hist_offset)


def test_of_two_readings_for_a_step_the_later_one_stays():
    blocks = [make_block(5, 2, seed=1), make_block(6, 2, seed=1), make_block(5, 1, seed=2)]
    rows = table.from_blocks([codec.pack(block) for block in blocks])
    np.testing.assert_array_equal(readings(rows, 0)[0].row, blocks[2].rows[0])
    np.testing.assert_array_equal(readings(rows, 1)[0].row, blocks[0].rows[1])
    assert rows.blocks.step.tolist() == [5, 6]


@given(measured_runs(), st.integers(-2, 70))
def test_rows_that_cover_a_step_are_found_in_all_sites_at_once(blocks, step):
    rows = retention.thin(table.from_blocks([codec.pack(block) for block in blocks]), 8)
    at, index = rows.covering(step)
    found = dict(zip(rows.site[at].tolist(), index.tolist(), strict=True))
    for site in range(5):
        covering = [r for r in readings(rows, site) if r.step <= step < r.step + r.span]
        assert (site in found) == bool(covering)
        if covering:
            assert rows.step[found[site]] == covering[0].step
