"""Sealed files: plain safetensors, and no byte of them is trusted."""

import json
import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.store.making import make_block, make_sites, measured_runs, write_run

from sonde.errors import RunDamaged
from sonde.store import open_run, verify
from sonde.store.log import codec, segment_format, table
from sonde.store.log.attempts import Attempt
from sonde.store.log.segment import Handles, Segment
from sonde.store.log.segment_format import NUM_SLICES, Origin, write_segment
from sonde.store.sealed import ITEM_BYTES

ORIGIN = Origin(sites=make_sites(5), attempts=[Attempt(0, None, 5.0)])
NAMES = ("site", "offset", "step", "span", "merged", "stats", "hist_lo", "hist_len", "hist_offset", "hist")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(measured_runs())
def test_tables_come_back_as_they_were(tmp_path, blocks):
    rows = table.from_blocks([codec.pack(block) for block in blocks])
    path = tmp_path / "seg-000000.safetensors"
    assert write_segment(path, rows, ORIGIN)
    opened = Segment(path)
    back = opened.table()
    for name in NAMES:
        np.testing.assert_array_equal(getattr(back, name), getattr(rows, name))
    for name in ("step", "time", "epoch", "skipped", "span"):
        np.testing.assert_array_equal(getattr(back.blocks, name), getattr(rows.blocks, name))
    assert opened.sites == ORIGIN.sites
    assert opened.attempts == [Attempt(0, blocks[0].step, 5.0)]
    opened.check_all(back)


@pytest.fixture
def sealed(tmp_path):
    write_run(tmp_path / "run", range(6), 3)
    path = tmp_path / "run/telemetry/r00000/seg-000000.safetensors"
    return path, path.read_bytes()


def test_any_safetensors_library_reads_a_segment(sealed):
    path, _ = sealed
    tensors = load_file(path)
    assert tensors["stats"].shape == (12, 18)
    assert tensors["site"].tolist() == [0, 1, 2]
    with safe_open(path, "np") as file:
        assert [site["name"] for site in json.loads(file.metadata()["sites"])] == [s.name for s in make_sites(3)]
        assert json.loads(file.metadata()["crc32"])["stats"] == zlib.crc32(tensors["stats"])


def test_arrays_start_where_their_items_align(sealed):
    path, _ = sealed
    for extent in Segment(path)._extents.values():
        assert extent.start % ITEM_BYTES[extent.dtype] == 0


def test_no_flipped_bit_of_a_segment_is_read_as_data(sealed):
    path, whole = sealed
    run = path.parents[2]
    pristine = open_run(run)
    keys = [site.key for site in pristine.sites]
    values = {key: pristine.series(key, "std").values for key in keys}
    shots = {site.key: reading for site, reading in pristine.at(3).items()}
    for at in random.Random(0).sample(range(len(whole)), 250):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        opened = open_run(run)
        for site in opened.sites:
            found = opened.series(site, "std").values
            assert len(found) == 0 or np.array_equal(found, values[site.key])
            steps, bins = opened.histogram(site)
            assert len(steps) == 0 or np.array_equal(bins, pristine_bins(pristine, site, path, whole))
        for site, reading in opened.at(3).items():
            np.testing.assert_array_equal(reading.row, shots[site.key].row)
        report = verify(run)
        assert not report.ok
        assert report.problems[0].file == path


_bins = {}


def pristine_bins(pristine, site, path, whole):
    key = (str(path), site.key)
    if key not in _bins:
        now = path.read_bytes()
        path.write_bytes(whole)
        _bins[key] = open_run(path.parents[2]).histogram(site)[1]
        path.write_bytes(now)
    return _bins[key]


def test_a_segment_cut_at_any_byte_is_refused(sealed):
    path, whole = sealed
    for size in range(0, len(whole), 11):
        path.write_bytes(whole[:size])
        with pytest.raises(RunDamaged, match="seg-000000"):
            Segment(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(RunDamaged, match="its tensors end at"):
        Segment(path)


def forge(path, whole, change):
    """Change a header and make its checksum right again: what only somebody who means harm would do."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    header["__metadata__"]["check"] = "00000000"
    text = json.dumps(header, separators=(",", ":")).encode()
    at = len(b'{"__metadata__":{"check":"')
    text = text[:at] + f"{zlib.crc32(text):08x}".encode() + text[at + 8 :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


HOSTILE = {
    "huge shape": lambda h: h["stats"].update(shape=[12, 2**62]),
    "negative offset": lambda h: h["stats"].update(data_offsets=[-8, h["stats"]["data_offsets"][1]]),
    "offset past the end": lambda h: h["step"].update(data_offsets=[2**40, 2**40 + 144]),
    "overlap": lambda h: h["step"].update(data_offsets=h["block_step"]["data_offsets"], shape=[6]),
    "no tensor": lambda h: h.pop("stats"),
    "other dtype": lambda h: h["step"].update(dtype="F64"),
    "unknown dtype": lambda h: h["step"].update(dtype="BF16"),
    "dtype is a list": lambda h: h["step"].update(dtype=["F64"]),
    "entry is a number": lambda h: h.update(step=5),
    "shape of floats": lambda h: h["step"].update(shape=[18.0]),
    "other rank": lambda h: h["step"].update(shape=[2, 9]),
    "hist as numbers": lambda h: h["hist"].update(dtype="F64", shape=[h["hist"]["shape"][0] // 2]),
    "no metadata": lambda h: h["__metadata__"].clear(),
    "later version": lambda h: h["__metadata__"].update(schema_version="99"),
    "version of words": lambda h: h["__metadata__"].update(schema_version="one"),
    "endless window": lambda h: h["__metadata__"].update(window="9" * 400),
    "sites are no list": lambda h: h["__metadata__"].update(sites="{}"),
    "site without name": lambda h: h["__metadata__"].update(sites='[{"id":0}]'),
    "site with list for a name": lambda h: h["__metadata__"].update(sites='[{"id":0,"name":[],"quantity":"value"}]'),
    "deep sites": lambda h: h["__metadata__"].update(sites="[" * 100_000),
    "attempts of nothing": lambda h: h["__metadata__"].update(attempts="[1]"),
    "attempt at the end of time": lambda h: h["__metadata__"].update(
        attempts='[{"attempt":0,"start_step":0,"time":1' + "0" * 400 + "}]"
    ),
    "attempts are no list": lambda h: h["__metadata__"].update(attempts="1"),
    "no checksums": lambda h: h["__metadata__"].update(crc32="[]"),
    "checksums of words": lambda h: h["__metadata__"].update(crc32='{"site":"x"}'),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused_and_named(sealed, change):
    path, whole = sealed
    forge(path, whole, change)
    with pytest.raises(RunDamaged, match="seg-000000"):
        Segment(path)
    opened = open_run(path.parents[2])
    assert len(opened.steps) == 0
    assert "seg-000000" in opened.problems[0]
    assert not verify(path.parents[2]).ok


def rebuild(path, **changes):
    """Write a segment whose checksums are right and whose content is not."""
    rows = Segment(path).table()
    values = {name: np.array(getattr(rows, name)) for name in NAMES}
    for name, change in changes.items():
        change(values[name])
    hostile = table.Table(**values, blocks=rows.blocks)
    crcs = segment_format.slice_crcs
    segment_format.slice_crcs = lambda _: np.zeros((NUM_SLICES, len(values["site"])), np.uint32)
    try:
        write_segment(path, hostile, Origin(sites=make_sites(3), attempts=[Attempt(0, None, 0.0)]))
    finally:
        segment_format.slice_crcs = crcs


def put(at, value):
    def change(array):
        array[at] = value

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"hist_offset": put(3, 2**63)},
        {"hist_offset": put(-1, 2**63)},
        {"hist_len": put(0, 255)},
        {"hist_lo": put(0, 255)},
        {"step": put(slice(None), 7)},
    ],
    ids=",".join,
)
def test_hostile_content_is_never_used_as_a_bound(sealed, changes):
    path, _ = sealed
    rebuild(path, **changes)
    opened = open_run(path.parents[2])
    for site in opened.sites:
        opened.series(site, "abs_p50")
        opened.histogram(site)
    opened.at(3)
    assert opened.problems
    assert not verify(opened.path).ok


@pytest.mark.parametrize(
    "changes", [{"offset": put(1, 2**60)}, {"offset": put(-1, 5)}, {"site": put(0, 9)}], ids=",".join
)
def test_sites_and_offsets_out_of_order_are_refused(sealed, changes):
    path, _ = sealed
    rebuild(path, **changes)
    with pytest.raises(RunDamaged, match="rising order"):
        Segment(path)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_any_bytes_are_a_segment_or_refused(tmp_path, content):
    path = tmp_path / "seg-000000.safetensors"
    path.write_bytes(content)
    with pytest.raises(RunDamaged):
        Segment(path)


def test_one_damaged_segment_leaves_the_others_readable(tmp_path):
    run = tmp_path / "run"
    for attempt in range(3):
        write_run(run, range(attempt * 10, attempt * 10 + 10), resume=True)
    path = run / "telemetry/r00000/seg-000001.safetensors"
    whole = bytearray(path.read_bytes())
    whole[100] ^= 1
    path.write_bytes(whole)
    opened = open_run(run)
    assert opened.steps.tolist() == [*range(10), *range(20, 30)]
    assert len(opened.problems) == 1
    assert str(path) in opened.problems[0]


def _open_files():
    """Return how many files this process has open; -1 where the system does not tell."""
    here = Path("/proc/self/fd")
    return len(list(here.iterdir())) if here.is_dir() else -1


def test_open_files_and_tables_in_memory_are_bounded(tmp_path):
    handles = Handles(limit=2, max_bytes=1)
    opened = []
    for number in range(5):
        path = tmp_path / f"seg-{number:06d}.safetensors"
        write_segment(path, table.from_blocks([codec.pack(make_block(number))]), ORIGIN)
        opened.append(Segment(path, handles))
    before = _open_files()
    for one in (*opened, *opened):
        assert len(one.table()) == 3
        assert len(one.load(np.arange(2), (0, 3)).rows) == 2
    assert len(handles) == 2
    assert len(handles._tables) == 1
    assert _open_files() == before + 2 or before < 0


def test_a_segment_that_was_replaced_is_not_read(tmp_path):
    path = tmp_path / "seg-000000.safetensors"
    write_segment(path, table.from_blocks([codec.pack(make_block(0))]), ORIGIN)
    opened = Segment(path)
    write_segment(path, table.from_blocks([codec.pack(make_block(0, 2))]), ORIGIN)
    with pytest.raises(FileNotFoundError):
        opened.table()


def test_some_sites_of_a_segment_are_the_same_as_in_the_whole(tmp_path):
    path = tmp_path / "seg-000000.safetensors"
    write_segment(path, table.from_blocks([codec.pack(make_block(step, 9)) for step in range(700)]), ORIGIN)
    whole = Segment(path).read()
    for at in ([0], [8], [1, 2, 3], [0, 4, 8], [*range(9)]):
        loaded = Segment(path).load(np.array(at), (0, 3, 7), bins=True)
        assert loaded.sound.all()
        for place, site in enumerate(at):
            cut = slice(int(whole.offset[site]), int(whole.offset[site + 1]))
            mine = slice(int(loaded.rows.offset[place]), int(loaded.rows.offset[place + 1]))
            for name in ("step", "span", "merged", "hist_lo", "hist_len"):
                np.testing.assert_array_equal(getattr(loaded.rows, name)[mine], getattr(whole, name)[cut])
            np.testing.assert_array_equal(
                [loaded.rows.stats[each][mine] for each in (0, 3, 7)], whole.stats[[0, 3, 7], cut]
            )
            low, high = int(whole.hist_offset[cut.start]), int(whole.hist_offset[cut.stop])
            first, last = int(loaded.rows.hist_offset[mine.start]), int(loaded.rows.hist_offset[mine.stop])
            np.testing.assert_array_equal(loaded.rows.hist[first:last], whole.hist[low:high])


def test_a_segment_that_is_cut_while_it_is_open_is_named_and_ends_no_process(tmp_path):
    write_run(tmp_path / "run", range(300), 3)
    run = open_run(tmp_path / "run")
    site = run.sites[0]
    assert len(run.series(site, "mean").steps) == 300
    path = tmp_path / "run/telemetry/r00000/seg-000000.safetensors"
    os.truncate(path, 20_000)
    assert len(run.series(run.sites[2], "max").steps) == 0
    run.at(7)
    assert any("cut while it was read" in problem for problem in run.problems)
    run.refresh()
    assert any(str(path) in problem for problem in run.problems)


def test_writing_that_may_not_finish_leaves_nothing(tmp_path):
    path = tmp_path / "seg-000000.safetensors"
    rows = table.from_blocks([codec.pack(make_block(0))])
    assert not write_segment(path, rows, ORIGIN, may_finish=lambda: False)
    assert list(tmp_path.iterdir()) == []
