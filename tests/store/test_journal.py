"""What can be read from a journal after any accident to its bytes."""

import os
import zlib

import numpy as np
import pytest
from tests.store.making import make_block, make_sites, write_run

from sonde.store import framing, open_run, verify
from sonde.store.log.codec import Kind
from sonde.store.log.journal import JournalSource


@pytest.fixture
def small(tmp_path):
    write_run(tmp_path / "run", range(4), 2, close=False)
    path = tmp_path / "run/telemetry/r00000/journal-000000.bin"
    return path, path.read_bytes()


def ends_of_blocks(whole):
    return {record.end: record.step for record in framing.scan(whole) if record.kind == Kind.BLOCK}


def test_a_journal_cut_at_any_byte_gives_every_whole_record(small):
    path, whole = small
    ends = ends_of_blocks(whole)
    assert sorted(ends.values()) == [0, 1, 2, 3]
    for size in reversed(range(len(whole) + 1)):
        os.truncate(path, size)
        source = JournalSource(path)
        source.refresh()
        found = sorted(step for part in source.tables for step in part.blocks.step.tolist())
        assert found == [step for end, step in ends.items() if end <= size]
        assert not source.problems


def test_a_journal_cut_at_any_byte_is_whole_but_for_its_tail(small):
    path, whole = small
    run = path.parents[2]
    starts = {record.offset for record in framing.scan(whole)} | {len(whole)}
    for size in range(len(whole), -1, -7):
        os.truncate(path, size)
        report = verify(run)
        assert report.ok
        assert bool(report.torn_tails) == (size not in starts)
        for tail in report.torn_tails:
            assert tail.file == path
            assert tail.offset == max(start for start in starts if start <= size)


def test_no_flipped_bit_is_read_as_data(small):
    path, whole = small
    run = path.parents[2]
    original = _contents(run)
    for at in range(0, len(whole), 3):
        _put(path, at, whole[at] ^ 1 << (at % 8))
        for step, values in _contents(run).items():
            np.testing.assert_array_equal(values, original[step])
        report = verify(run)
        assert report.problems or report.torn_tails
        assert all(found.file == path for found in (*report.problems, *report.torn_tails))
        _put(path, at, whole[at])
    assert path.read_bytes() == whole


def _put(path, at, byte):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte]))


def _contents(run):
    opened = open_run(run)
    folder = opened._ranks.folders[0]
    return {
        int(step): np.stack(
            [part.rows().stats[:, part.rows().step == step] for part in folder.parts if step in part.blocks.step]
        )
        for step in opened.steps
    }


def test_reading_goes_on_after_damage_in_the_middle(small):
    path, whole = small
    records = list(framing.scan(whole))
    second = next(record for record in records if record.step == 1 and record.kind == Kind.BLOCK)
    damaged = bytearray(whole)
    damaged[second.offset + 60] ^= 0xFF
    path.write_bytes(damaged)
    run = open_run(path.parents[2])
    assert run.steps.tolist() == [0, 2, 3]
    assert str(path) in run.problems[0]
    report = verify(run.path)
    assert [(p.file, p.offset) for p in report.problems] == [(path, second.offset)]


def test_a_missing_record_is_named(small):
    path, whole = small
    records = list(framing.scan(whole))
    gone = records[3]
    path.write_bytes(whole[: gone.offset] + whole[gone.end :])
    assert "record 4 where 3 should be" in str(verify(path.parents[2]).problems[0])


def test_headers_that_promise_much_do_not_cost_much():
    header = framing.HEADER.pack(framing.MAGIC, 3, 1, 0, 100_000, 0, 0, 0)
    assert list(framing.scan(header * 50_000)) == []


def test_records_of_later_versions_are_skipped(small):
    path, whole = small
    head = bytearray(framing.HEADER.pack(framing.MAGIC, 77, 9, 0, 0, 6, 0, 0))
    head[36:] = zlib.crc32(bytes(head[:36])).to_bytes(4, "little")
    path.write_bytes(whole + bytes(head))
    source = JournalSource(path)
    source.refresh()
    assert source.end == len(whole) + 40
    assert not source.problems


def test_a_whole_record_that_makes_no_sense_is_named_and_skipped(small):
    path, whole = small
    path.write_bytes(whole + framing.encode(Kind.BLOCK, 9, 6, [b"x" * 16]))
    run = open_run(path.parents[2])
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert "too short" in run.problems[0]
    assert verify(run.path).problems[0].offset == len(whole)


def test_following_a_journal_reads_only_what_is_new(tmp_path):
    writer = write_run(tmp_path / "run", range(0), 2, close=False)
    source = JournalSource(tmp_path / "run/telemetry/r00000/journal-000000.bin")
    source.refresh()
    for step in range(100):
        writer.take_block(make_block(step, 2))
        assert source.refresh()
        assert not source.refresh()
    assert sum(len(part.blocks) for part in source.tables) == 100
    assert len(source.tables) <= 8
    assert sorted(source.sites.values(), key=lambda s: s.id) == make_sites(2)
    writer.close()


def test_long_journals_are_read_in_pieces(small, monkeypatch):
    path, whole = small
    wanted = [(record.offset, record.end) for record in framing.scan(whole)]
    for piece in (64, 100, 1000):
        monkeypatch.setattr(framing, "_PIECE", piece)
        with path.open("rb") as file:
            assert [(record.offset, record.end) for record in framing.follow(file, 0)] == wanted
    damaged = bytearray(whole)
    damaged[wanted[2][0] + 60] ^= 1
    path.write_bytes(damaged)
    with path.open("rb") as file:
        found = list(framing.follow(file, 0))
    assert [type(item) for item in found].count(framing.Gap) == 1
    assert sum(isinstance(item, framing.Record) for item in found) == len(wanted) - 1
