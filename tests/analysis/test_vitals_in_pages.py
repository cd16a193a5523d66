"""Vitals and inputs lie beside the tensors of a run without being taken for layers that stand out."""

from __future__ import annotations

import numpy as np

from sonde.analysis import ModelOrder, summarise_layers, summarise_sites
from sonde.core import schema, signals
from sonde.records import Block, RunHeader, Site
from sonde.store import RunWriter, open_run


def test_a_vital_that_is_zero_or_jumps_is_not_a_mark_and_no_layer(tmp_path):
    sites = [
        Site(id=0, name="optimizer", quantity="vital", part=signals.part_of(signals.LEFTOVER)),
        Site(id=1, name="(loop)", quantity="vital", part=signals.part_of(signals.STEP_TIME)),
        Site(id=2, name="(model)", quantity="input", part="[0]", shape=(4, 4)),
    ]
    writer = RunWriter(
        tmp_path / "run", RunHeader(schema_version=schema.SCHEMA_VERSION, created=0.0, sonde_version="0")
    )
    writer.take_sites(sites)
    for step in range(1, 61):
        rows = schema.rows_of_values(np.array([0.0, 9.0 if step == 50 else 0.01, 1.0]))
        arrays = {"sites": np.arange(3, dtype=np.uint32), "rows": rows, "bins": np.zeros((3, 64), np.uint64)}
        writer.take_block(Block(step=step, time=float(step), binned=np.zeros(3, np.bool_), **arrays))
    writer.close()
    run = open_run(tmp_path / "run")
    rows = summarise_sites(run, run.sites)
    assert [row.mark.level for row in rows] == ["fine"] * 3
    assert [row.stat for row in rows] == ["mean", "mean", "rms"]
    assert summarise_layers(rows, ModelOrder(run.header, run.sites)) == []
