"""Segments need no Sonde: the reader that docs/file-format.md prints is run as it stands."""

import re
import sys
from pathlib import Path

import numpy as np
from tests.store.making import write_run
from tests.waiting import run_to_end

from sonde.store import open_run

DOCUMENT = Path(__file__).parents[2] / "docs/file-format.md"


def test_a_run_can_be_read_without_sonde(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) <= 30
    write_run(tmp_path / "run", range(50), 4, journal_bytes=1 << 13)
    ask = f"""
import sys
steps, values = read_series({str(tmp_path / "run")!r}, "layer2.weight:gradient", "mean")
assert "sonde" not in sys.modules
np.savez({str(tmp_path / "out.npz")!r}, steps=steps, values=values)
"""
    assert run_to_end([sys.executable, "-c", code + ask]).returncode == 0
    found = np.load(tmp_path / "out.npz")
    ours = open_run(tmp_path / "run").series("layer2.weight:gradient", "mean")
    np.testing.assert_array_equal(found["steps"], ours.steps)
    np.testing.assert_array_equal(found["values"], ours.values)
