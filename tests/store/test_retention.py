"""A run that outgrows its budget gets coarser with age, and loses nothing."""

import numpy as np
import pytest
from tests.store.making import make_block, write_run

from sonde.core import schema
from sonde.records import Reading
from sonde.store import open_run, verify
from sonde.store.log.attempts import Attempt
from sonde.store.log.retention import (
    MAX_WINDOW,
    Entry,
    Room,
    estimate,
    folder_bytes,
    plan_windows,
    to_compact,
    to_join,
    to_thin,
)

BUDGET = 1 << 20


@pytest.fixture(scope="module")
def thinned(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "run"
    writer = write_run(path, range(1200), 12, max_disk_bytes=BUDGET)
    return path, writer


def test_the_budget_is_kept(thinned):
    path, writer = thinned
    assert folder_bytes(writer.folder) <= BUDGET
    assert verify(path).ok


def test_nothing_is_lost_by_thinning(thinned):
    path, _ = thinned
    run = open_run(path)
    assert len(run.steps) < 1200
    blocks = [make_block(step, 12) for step in range(1200)]
    for number in (0, 7):
        site = run.sites[number]
        whole = schema.merge_groups(np.array([b.rows[number] for b in blocks]), np.array([0]))[0]
        parts = list(run.readings(site))
        total = parts[0]
        for part in parts[1:]:
            total = total.merge(part)
        counts = [i for i, name in enumerate(schema.COLUMNS) if name not in ("mean", "m2", "abs_sum")]
        np.testing.assert_array_equal(total.row[counts], whole[counts])
        np.testing.assert_allclose(total.row, whole, rtol=1e-9)
        np.testing.assert_array_equal(total.bins, sum(b.bins[number] for b in blocks))
        assert total.span == 1200


def test_each_window_is_the_exact_merge_of_its_steps(thinned):
    path, _ = thinned
    run = open_run(path)
    for reading in run.readings(run.sites[3]):
        parts = [make_block(step, 12) for step in range(reading.step, reading.step + reading.span)]
        merged = Reading(parts[0].rows[3], parts[0].bins[3])
        for block in parts[1:]:
            merged = merged.merge(Reading(block.rows[3], block.bins[3]))
        np.testing.assert_allclose(reading.row, merged.row, rtol=1e-12)
        np.testing.assert_array_equal(reading.bins, merged.bins)


def test_old_steps_are_coarser_than_new_ones(thinned):
    path, _ = thinned
    run = open_run(path)
    spans = run.blocks.span
    assert spans[0] >= 4
    assert spans[-1] == 1
    assert spans.max() < 600
    assert run.blocks.step[0] == 0
    ends = run.blocks.step + spans
    np.testing.assert_array_equal(run.blocks.step[1:], ends[:-1])


def test_every_step_still_has_a_reading(thinned):
    path, _ = thinned
    run = open_run(path)
    for step in (0, 1, 5, 600, 1199):
        found = run.at(step)
        assert len(found) == 12
        assert all(reading.step <= step < reading.step + reading.span for reading in found.values())


def test_a_thinned_run_goes_on_after_its_last_step(tmp_path):
    from sonde.store.log.sealer import Sealer

    write_run(tmp_path / "run", range(10))
    folder = tmp_path / "run/telemetry/r00000"
    sealer = Sealer(folder, room=Room(folder, 10, int), report=lambda _: None, clock=lambda: 0.0)
    sealer.submit(99)
    assert sealer.close(30)
    assert open_run(tmp_path / "run").blocks.span.tolist() == [10]
    writer = write_run(tmp_path / "run", range(0), close=False, resume=True)
    assert writer.last_step == 9
    writer.close()


def test_thinning_does_not_show_as_a_jump(thinned):
    path, _ = thinned
    run = open_run(path)
    norms = run.series(run.sites[0], "norm")
    squares = [schema.merge_groups(make_block(step, 12).rows[:1], np.array([0]))[0] for step in range(norms.spans[0])]
    each = [row[schema.M2] + row[schema.COUNT] * row[schema.MEAN] ** 2 for row in squares]
    assert norms.values[0] == pytest.approx(np.sqrt(np.mean(each)))
    l1 = run.series(run.sites[0], "l1").values[0]
    assert l1 == pytest.approx(np.mean([row[schema.ABS_SUM] for row in squares]))


def test_thinning_is_never_silent(thinned):
    path, _ = thinned
    events = [event for event in open_run(path).events if event.event_type == "thinned"]
    assert events
    for event in events:
        assert event.data["bytes_after"] < event.data["bytes_before"]
        assert event.data["blocks_after"] < event.data["blocks_before"]
        assert f"windows of {event.data['window']}" in event.message


def test_a_budget_that_cannot_be_kept_is_reported(tmp_path):
    from sonde.store.log.sealer import Sealer

    write_run(tmp_path / "run", range(4), close=True)
    said = []
    folder = tmp_path / "run/telemetry/r00000"
    sealer = Sealer(folder, room=Room(folder, 10, int), report=said.append, clock=lambda: 0.0)
    sealer.submit(99)
    assert sealer.close(30)
    assert [event.event_type for event in said] == ["thinned", "over_budget"]
    assert open_run(tmp_path / "run").blocks.span.tolist() == [4]


def test_a_damaged_segment_is_not_rewritten(tmp_path):
    from sonde.store.log.sealer import Sealer

    write_run(tmp_path / "run", range(50), close=True)
    path = tmp_path / "run/telemetry/r00000/seg-000000.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1000] ^= 4
    path.write_bytes(whole)
    said = []
    sealer = Sealer(path.parent, room=Room(path.parent, 10, int), report=said.append, clock=lambda: 0.0)
    sealer.submit(99)
    assert sealer.close(30)
    assert said[0].event_type == "damaged"
    assert path.read_bytes() == whole


def entry(number, nbytes, *, window=1, attempts=(0,), steps=None, blocks=10):
    first_step, end = steps or (number * 10, number * 10 + 10)
    stated = [Attempt(a, first_step, 0.0) for a in attempts]
    return Entry(number, number, f"{number}", nbytes, 100, window, blocks, first_step, end, stated)


def test_what_is_compacted():
    small = [entry(i, 1000) for i in range(8)]
    assert to_compact(small, 1 << 20) == small
    assert to_compact(small[:7], 1 << 20) == []
    assert to_compact([entry(0, 40), entry(1, 40), entry(2, 40)], 100) == [entry(0, 40), entry(1, 40)]
    assert to_compact([entry(0, 80), entry(1, 40)], 100) == []
    assert to_compact([*small[:4], entry(4, 1000, window=2), *small[5:]], 1 << 20) == []
    assert to_compact([*small[:4], *small[5:], entry(8, 1000)], 1 << 20) == []
    later = [entry(i, 1000, attempts=(1,)) for i in (5, 6, 7)]
    assert to_compact([*small[:4], entry(4, 1000, attempts=(1,), steps=(20, 30)), *later], 1 << 20) == []
    on = [*small[:4], *[entry(i, 1000, attempts=(1,)) for i in (4, 5, 6, 7)]]
    assert to_compact(on, 1 << 20) == on


def test_what_is_joined_when_every_byte_counts():
    mixed = [
        entry(0, 1000),
        entry(1, 90_000),
        entry(2, 1000, window=2),
        entry(3, 500, window=2),
        entry(4, 10, window=2),
    ]
    assert to_join(mixed, 1 << 20) == mixed[2:]
    assert to_join(mixed[:2], 1 << 20) == mixed[:2]
    assert to_join(mixed[:2], 90_000) == []
    assert to_join([], 100) == []


def test_windows_grow_with_age_until_all_fits():
    assert plan_windows([], 100, 9999) == []
    fresh = [entry(i, 1100) for i in range(64)]
    assert plan_windows(fresh, 65 * 1100, 9999) == [1] * 64
    for budget in (50_000, 30_000, 15_000):
        windows = plan_windows(fresh, budget, 9999)
        assert windows == sorted(windows, reverse=True)
        assert windows[-1] == 1
        assert sum(estimate(e, w) for e, w in zip(fresh, windows, strict=True)) <= budget
    assert max(plan_windows(fresh, 50_000, 9999)) <= 8
    assert plan_windows(fresh, 10, 9999) == [MAX_WINDOW] * 64


def test_windows_never_shrink():
    mixed = [entry(0, 1100), entry(1, 1100, window=64), entry(2, 1100)]
    assert plan_windows(mixed, 3000, 9999)[1] == 64


def test_windows_reach_over_the_gaps_between_steps():
    sparse = [entry(0, 1100, steps=(0, 10_000)), entry(1, 1100, steps=(10_000, 20_000))]
    assert plan_windows(sparse, 2000, 9999)[0] > 1000


def test_small_neighbours_are_put_together_when_they_are_thinned():
    fresh = [entry(i, 1100) for i in range(6)]
    groups = to_thin(fresh, [4, 4, 4, 2, 1, 2], 600)
    assert [([e.first for e in group], window) for group, window in groups] == [
        ([0, 1], 4),
        ([2], 4),
        ([3], 2),
        ([5], 2),
    ]
    assert to_thin([entry(0, 100, blocks=1)], [8], 100) == []


def test_the_budget_is_kept_at_every_moment(tmp_path, monkeypatch):
    """Look at the folder whenever bytes were written: to a journal, to a segment that is made, to events."""
    from sonde.store import lines
    from sonde.store.log import segment_format

    path, sizes = tmp_path / "run", []

    def watching(function):
        def call(*args):
            function(*args)
            sizes.append(folder_bytes(path) + folder_bytes(path / "telemetry" / "r00000"))

        return call

    monkeypatch.setattr(lines.Appender, "append", watching(lines.Appender.append))
    monkeypatch.setattr(segment_format, "write_all", watching(segment_format.write_all))
    writer = write_run(path, range(700), 12, max_disk_bytes=BUDGET)
    assert writer.dropped_blocks == 0
    header = (path / "run.json").stat().st_size
    assert max(sizes) <= BUDGET + header
    assert max(sizes) > BUDGET // 2
