"""Where two runs part, held against readings that were changed at a known place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.analysis.made_run import Recipe, write_run

from sonde.analysis import divergence as module
from sonde.analysis.divergence import differences, divergence
from sonde.core import schema
from sonde.records import Site
from sonde.store import RunWriter, open_run

# In the order in which a step computes them.
CHANGED = ["head:output", "loss:scalar", "head.weight:gradient", "embed.weight:gradient", "head.weight:parameter"]
CALM = Recipe(steps=40, layers=3, dies_at=None, nan_at=None)


def write_changed(path, change, recipe=CALM):
    """Write the recipe's run with rows changed: `change(site, step, row)` alters a row in place."""
    writer = RunWriter(path, recipe.run_header())
    writer.take_sites(recipe.sites())
    for block in recipe.blocks():
        rows = block.rows.copy()
        for site, row in zip(recipe.sites(), rows, strict=True):
            change(site, block.step, row)
        writer.take_block(replace(block, rows=rows))
    writer.close()
    return open_run(path)


@pytest.fixture
def plain(tmp_path):
    write_run(tmp_path / "plain", CALM)
    return open_run(tmp_path / "plain")


def scaled(name, since, factor):
    def change(site, step, row):
        if site.key == name and step >= since:
            row[[schema.MEAN, schema.MIN, schema.MAX, schema.ABS_SUM]] *= factor
            row[schema.M2] *= factor**2

    return change


def test_a_run_and_its_copy_never_part(plain, tmp_path):
    found = divergence(plain, write_changed(tmp_path / "same", lambda *_: None))
    assert found.first is None
    assert found.complete
    assert found.steps == 40
    assert found.sites == len(plain.sites)


def test_the_first_changed_reading_is_found_with_both_values(plain, tmp_path):
    other = write_changed(tmp_path / "other", scaled("blocks.1.mlp.weight:gradient", 17, 1.5))
    found = divergence(plain, other)
    assert found.first is not None
    assert (found.first.site, found.first.step) == ("blocks.1.mlp.weight:gradient", 17)
    left = plain.series(found.first.site, "rms", start=17, stop=18).values[0]
    assert found.first.left == pytest.approx(left)
    assert found.first.right == pytest.approx(1.5 * left)
    assert found.first.difference == pytest.approx(1 / 3)
    assert [each.site for each in found.together] == ["blocks.1.mlp.weight:gradient"]
    assert found.steps == 17


def test_a_tolerance_lets_small_differences_pass(plain, tmp_path):
    def drift(site, step, row):
        scaled("head.weight:gradient", 5, 1.0005)(site, step, row)
        scaled("head.weight:gradient", 30, 1.5)(site, step, row)

    other = write_changed(tmp_path / "other", drift)
    assert divergence(plain, other).first.step == 5
    assert divergence(plain, other, tolerance=0.01).first.step == 30


def test_within_a_step_what_is_computed_first_is_named_first(plain, tmp_path):
    def change(site, step, row):
        for name in (
            "head:output",
            "embed.weight:gradient",
            "head.weight:gradient",
            "head.weight:parameter",
            "loss:scalar",
        ):
            scaled(name, 9, 2.0)(site, step, row)

    found = divergence(plain, write_changed(tmp_path / "other", change))
    assert [each.site for each in found.together] == CHANGED


def test_a_last_bit_and_a_lone_nan_are_differences(plain, tmp_path):
    def nudge(site, step, row):
        if site.key == "embed:output" and step == 12:
            row[schema.MAX] = np.nextafter(row[schema.MAX], np.inf)

    def spoil(site, step, row):
        if site.key == "embed:output" and step == 12:
            row[schema.NAN] += 1

    nudged = divergence(plain, write_changed(tmp_path / "nudged", nudge))
    assert (nudged.first.site, nudged.first.step) == ("embed:output", 12)
    spoilt = divergence(plain, write_changed(tmp_path / "spoilt", spoil), tolerance=0.5)
    assert spoilt.first.difference == np.inf


def test_what_the_machine_did_parts_no_runs(tmp_path):
    def write(path, memory):
        writer = RunWriter(path, CALM.run_header())
        writer.take_sites([*CALM.sites(), Site(id=len(CALM.sites()), name="process.rss", quantity="scalar")])
        for block in CALM.blocks():
            ids = np.arange(len(block.sites) + 1, dtype=np.uint32)
            rows = np.vstack([block.rows, schema.row_of_value(memory)])
            bins = np.vstack([block.bins, np.zeros((1, schema.NUM_BINS), np.uint64)])
            writer.take_block(replace(block, sites=ids, rows=rows, bins=bins, binned=np.append(block.binned, False)))
        writer.close()
        return open_run(path)

    assert divergence(write(tmp_path / "a", 1e9), write(tmp_path / "b", 2e9)).first is None


def test_runs_without_a_common_site_say_so(plain, tmp_path):
    writer = RunWriter(tmp_path / "none", CALM.run_header())
    writer.close()
    found = divergence(plain, open_run(tmp_path / "none"))
    assert (found.first, found.sites, found.steps) == (None, 0, 0)


def test_a_comparison_that_is_cut_short_says_so(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_STEPS", 8)
    monkeypatch.setattr(module, "_MOST_READINGS", 10 * len(plain.sites))
    other = write_changed(tmp_path / "late", scaled("head:output", 35, 2.0))
    found = divergence(plain, other)
    assert found.first is None
    assert not found.complete
    assert found.steps < 35


def test_a_late_parting_is_found_through_growing_windows(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_STEPS", 4)
    found = divergence(plain, write_changed(tmp_path / "late", scaled("head:output", 35, 2.0)))
    assert (found.first.site, found.first.step, found.complete) == ("head:output", 35, True)


def test_layers_are_sorted_by_how_much_they_differ_at_the_end(plain, tmp_path):
    def change(site, step, row):
        scaled("embed.weight:gradient", 1, 8.0)(site, step, row)
        scaled("head:output", 1, 0.25)(site, step, row)

    rows = differences(plain, write_changed(tmp_path / "other", change))
    assert [row.site for row in rows[:2]] == ["embed.weight:gradient", "head:output"]
    assert [row.doublings for row in rows[:2]] == pytest.approx([3.0, -2.0])
    assert all(row.doublings == 0 for row in rows[2:])
