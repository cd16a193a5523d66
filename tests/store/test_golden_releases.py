"""Runs that released versions wrote stay readable, and what a later version adds to them is not lost.

`golden_0_2` was written once by version 0.2.0: eight steps of a network whose gradients are not cleared, with a tape. A
change that breaks this test breaks the runs people have. Every release adds one such run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import sonde

HERE = Path(__file__).parent


@pytest.fixture
def golden(tmp_path):
    shutil.copytree(HERE / "golden_0_2", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_of_version_0_2_reads_as_it_was_written(golden):
    run = sonde.open_run(golden)
    assert (run.header.sonde_version, run.status, len(run.sites)) == ("0.2.0", "finished", 59)
    norms = run.series("0.weight:gradient", "norm").values
    np.testing.assert_allclose(norms[[0, -1]], [0.20562908476185238, 1.6295355090192347], rtol=1e-12)
    losses = run.series("loss:scalar", "value").values
    np.testing.assert_allclose(losses[[0, -1]], [0.8515439629554749, 1.259763240814209], rtol=1e-12)
    assert [finding.kind for finding in run.findings] == ["missing_zero_grad"]
    assert [finding.kind for finding in sonde.diagnose(run).findings] == ["missing_zero_grad"]
    assert run.tapes() == [2]
    assert sonde.verify(golden).ok


def test_fields_of_a_later_version_are_read_past_and_stay_in_the_files(golden):
    header = json.loads((golden / "run.json").read_text())
    (golden / "run.json").write_text(json.dumps({**header, "new_in_9": {"deep": [1]}}))
    for name in ("events.jsonl", "findings.jsonl"):
        lines = [json.loads(line) for line in (golden / name).read_text().splitlines()]
        (golden / name).write_text("".join(json.dumps({**line, "new_in_9": 1}) + "\n" for line in lines))
    before = {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()}

    run = sonde.open_run(golden)
    assert not run.problems
    assert [finding.kind for finding in run.findings] == ["missing_zero_grad"]
    assert len(run.events) == len((golden / "events.jsonl").read_text().splitlines())
    assert sonde.verify(golden).ok
    assert {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()} == before
