"""Many sites read at once: the same as one by one, damage left out and named, and each byte checked once."""

from __future__ import annotations

import numpy as np
import pytest
from making import HEADER, make_block, make_sites, write_run

from sonde.core import statistics
from sonde.records import Site
from sonde.store import RunWriter, open_run

RMS = statistics.find("rms").needs


def assert_same(run, columns=RMS, **bounds):
    together = list(run.stored_many(run.sites, columns, **bounds))
    assert len(together) == len(run.sites)
    for site, many in zip(run.sites, together, strict=True):
        one = run.stored(site, columns, bins=False, **bounds)
        for name in ("step", "span", "merged", "rows", "binned"):
            assert np.array_equal(getattr(many, name), getattr(one, name), equal_nan=name in ("merged", "rows")), name
        assert many.bins is None


@pytest.mark.parametrize("bounds", [{}, {"start": 40}, {"stop": 41}, {"start": 39, "stop": 42}, {"start": 900}])
def test_many_sites_read_as_one_by_one_from_segments_and_the_open_journal(tmp_path, bounds):
    write_run(tmp_path / "run", range(1, 60), 7)
    writer = write_run(tmp_path / "run", range(60, 90), 7, close=False, resume=True)
    writer.flush()
    run = open_run(tmp_path / "run")
    assert_same(run, **bounds)
    assert_same(run, statistics.find("nonfinite").needs, **bounds)
    assert_same(run, **bounds)  # what was checked once
    writer.close()


def test_a_later_attempt_that_went_back_replaces_what_it_wrote_again(tmp_path):
    write_run(tmp_path / "run", range(1, 40), 5)
    writer = RunWriter(tmp_path / "run", HEADER, resume=True)
    for step in range(20, 50):
        writer.take_block(make_block(step, 5, seed=7))
    writer.close()
    run = open_run(tmp_path / "run")
    assert_same(run)
    first = next(run.stored_many(run.sites, RMS))
    assert first.step.tolist() == list(range(1, 50))


def test_ranks_are_merged_as_they_are_one_by_one(tmp_path):
    for rank in range(2):
        write_run(tmp_path / "run", range(1, 20), 4, rank=rank)
    run = open_run(tmp_path / "run")
    assert run.ranks == [0, 1]
    assert_same(run)
    assert_same(run, rank=1)
    assert_same(run, rank=5)


def test_a_site_with_few_readings_and_one_without_any_are_among_them(tmp_path):
    writer = RunWriter(tmp_path / "run", HEADER)
    writer.take_sites([*make_sites(3), Site(id=9, name="never", quantity="gradient")])
    for step in range(1, 12):
        writer.take_block(make_block(step, 3 if step == 5 else 2))
    writer.close()
    run = open_run(tmp_path / "run")
    assert [len(each) for each in run.stored_many(run.sites, RMS)] == [11, 11, 1, 0]
    assert_same(run)
    assert list(run.stored_many([], RMS)) == []


def test_a_damaged_site_is_left_out_and_named_and_its_neighbours_are_not(tmp_path):
    write_run(tmp_path / "run", range(1, 30), 6, hist=False)
    (path,) = (tmp_path / "run" / "telemetry" / "r00000").glob("seg-*")
    good = {site.key: len(each) for run in [open_run(tmp_path / "run")]
            for site, each in zip(run.sites, run.stored_many(run.sites, RMS), strict=True)}  # fmt: skip
    content = bytearray(path.read_bytes())
    mean = open_run(tmp_path / "run").stored(make_sites(6)[3], RMS, bins=False).rows[:, RMS[4]]
    at = content.index(mean.tobytes())
    content[at + 3] ^= 0xFF
    path.write_bytes(content)
    run = open_run(tmp_path / "run")
    lengths = {s.key: len(each) for s, each in zip(run.sites, run.stored_many(run.sites, RMS), strict=True)}
    assert lengths == good | {"layer3.weight:gradient": 0}
    assert len(run.problems) == 1
    assert "site 3 do not match" in run.problems[0]
