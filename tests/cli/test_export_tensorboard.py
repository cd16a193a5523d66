"""Event files that TensorBoard itself reads back."""

from __future__ import annotations

import importlib
import math
import os
import sys

import numpy as np
import pytest

pytest.importorskip("tensorboard", reason="event files need the tensorboard extra: pip install 'sonde[tensorboard]'")

import sonde as library
from sonde.analysis import tag_of
from sonde.core import schema
from sonde.store import open_run


@pytest.fixture
def read_back():
    """Return a function that reads a folder with TensorBoard's own code."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")

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


@pytest.mark.filterwarnings("ignore")
def test_only_what_was_asked_for_is_written(sonde, first, tmp_path, strict, read_back):
    arguments = ("--site", "*.weight:update", "--stat", "norm", "--stat", "ratio", "--json")
    result = sonde("export", first, "--to", "tensorboard", "--out", tmp_path / "logs", *arguments)
    told = strict(result.output)
    assert told["sites"] == 14
    assert told["tags"] == 2 * 14 + 14  # norm and ratio, and a histogram each
    tags = read_back(tmp_path / "logs").Tags()
    assert (len(tags["scalars"]), len(tags["histograms"])) == (2 * 14, 14)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_is_not_finite_and_a_name_in_any_language_are_read_back(sonde, tmp_path, read_back):
    losses = [1.0, math.nan, math.inf, 1e300]
    with library.open_session(run=tmp_path / "run") as session:
        for loss in losses:
            session.log(**{"pérdida/loss": loss})
            session.step()
    assert sonde("export", tmp_path / "run", "--to", "tensorboard", "--out", tmp_path / "logs").exit_code == 0
    read = [event.value for event in read_back(tmp_path / "logs").Scalars("pérdida/loss")]
    assert np.array_equal(read, [1.0, math.nan, math.inf, math.inf], equal_nan=True), "beyond 32 bits is infinite"


def test_without_tensorboard_the_command_to_install_it_is_named(sonde, first, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    result = sonde("export", first, "--to", "tensorboard", "--out", tmp_path / "logs")
    assert result.exit_code == 2
    assert "pip install 'sonde[tensorboard]'" in result.output
    assert not (tmp_path / "logs").exists()


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
