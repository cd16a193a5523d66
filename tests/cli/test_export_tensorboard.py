"""Event files that TensorBoard itself reads back."""

from __future__ import annotations

import io
import os
import struct
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde import schema
from sonde.cli.export_tensorboard import tag_of
from sonde.cli.tensorboard_events import EventWriter, crc32c
from sonde.store import open_run


def slow_crc32c(data: bytes) -> int:
    """The definition, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@given(st.lists(st.binary(min_size=7, max_size=7), min_size=1, max_size=5))
def test_checksums_are_those_of_the_definition(rows):
    array = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 7)
    assert crc32c(array).tolist() == [slow_crc32c(row) for row in rows]


def frames(data: bytes):
    """Yield the events of a file, checking lengths and checksums as the format says."""

    def masked(part):
        crc = slow_crc32c(part)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        event = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked(event)
        yield event
        data = data[16 + length :]


def test_frames_have_true_lengths_and_checksums():
    file = io.BytesIO()
    writer = EventWriter(file, 1.5)
    steps = np.array([0, 1, 127, 128, 16_383, 16_384, 3_000_000], np.int64)
    writer.scalars("é" * 100, steps, steps.astype(float), np.linspace(-1, 1, 7))
    events = list(frames(file.getvalue()))
    assert len(events) == 8
    assert b"brain.Event:2" in events[0]
    assert all("é".encode() * 100 in event for event in events[1:])


@pytest.fixture
def read_back():
    """Return a function that reads a folder with TensorBoard's own code."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard is not installed, so nobody can read the files back: pip install 'sonde[bench]'",
    )

    def read(folder):
        found = reader.EventAccumulator(os.fspath(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
        found.Reload()
        return found

    return read


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_every_curve_back(sonde, first, tmp_path, read_back):
    out = tmp_path / "logs"
    result = sonde("export", first, "--to", "tensorboard", "--out", out)
    assert result.exit_code == 0, result.output
    assert "tensorboard --logdir" in result.output
    found, run = read_back(out), open_run(first)
    tags = set(found.Tags()["scalars"])
    assert {"loss", "optimizer.group0.lr", "gradient_rms/head.weight", "update_ratio/head.weight"} <= tags
    assert len(tags) == len(run.sites)
    for tag, key, stat in (("loss", "loss", "value"), ("gradient_rms/head.weight", "head.weight:gradient", "rms")):
        events, series = found.Scalars(tag), run.series(key, stat)
        assert [event.step for event in events] == series.steps.tolist()
        assert np.array_equal([event.value for event in events], series.values.astype(np.float32), equal_nan=True)
        assert [event.wall_time for event in events] == run.blocks.time.tolist()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_histograms_of_magnitudes_back(sonde, first, tmp_path, read_back):
    sonde("export", first, "--to", "tensorboard", "--out", tmp_path / "logs", "--site", "head.weight:gradient")
    found = read_back(tmp_path / "logs")
    events = found.Histograms("gradient_log2_magnitude/head.weight")
    steps, bins = open_run(first).histogram("head.weight:gradient")
    assert [event.step for event in events] == steps.tolist()
    value = events[-1].histogram_value
    assert value.bucket == bins[-1].astype(float).tolist()
    assert value.bucket_limit == (np.arange(schema.NUM_BINS) + schema.FIRST_EXPONENT + 1.0).tolist()
    full = np.flatnonzero(bins[-1])
    assert (value.min, value.max) == (full[0] + schema.FIRST_EXPONENT, full[-1] + schema.FIRST_EXPONENT + 1)
    assert value.num == bins[-1].sum()


def test_only_what_was_asked_for_is_written(sonde, first, tmp_path, strict):
    arguments = ("--site", "*.weight:update", "--stat", "norm", "--stat", "ratio", "--json")
    result = sonde("export", first, "--to", "tensorboard", "--out", tmp_path / "logs", *arguments)
    told = strict(result.output)
    assert told["sites"] == 14
    assert told["tags"] == 2 * 14 + 14  # norm and ratio, and a histogram each
    (file,) = (tmp_path / "logs").glob("*tfevents*")
    assert len(list(islice(frames(file.read_bytes()), 200))) == 200


def test_a_folder_with_event_files_is_not_mixed_up_unless_forced(sonde, first, tmp_path):
    once = ("export", first, "--to", "tensorboard", "--site", "loss", "--out", tmp_path / "logs")
    assert sonde(*once).exit_code == 0
    again = sonde(*once)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert sonde(*once, "--force").exit_code == 0
    assert len(list((tmp_path / "logs").iterdir())) == 1
    (tmp_path / "file").touch()
    assert sonde("export", first, "--to", "tensorboard", "--out", tmp_path / "file").exit_code == 2
    assert sonde("export", first, "--to", "tensorboard", "--out", tmp_path / "no" / "where").exit_code == 2


def test_parts_calls_and_phases_keep_tags_apart():
    from sonde.records import Site

    sites = [Site(id=0, name="rnn", quantity="output", part="[0]", call=call, phase=phase) for call in (0, 1)
             for phase in ("train", "eval")]  # fmt: skip
    assert len({tag_of(site, "rms") for site in sites}) == 4
    assert tag_of(sites[3], "rms") == "output_rms/rnn[0]#1@eval"
