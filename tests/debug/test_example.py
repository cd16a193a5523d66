"""The example of a debug session runs and shows what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="dashboards need the view extra: pip install 'sonde[view]'")
EXAMPLE = Path(__file__).parents[2] / "examples" / "debug_session_demo.py"


def test_the_example_shows_a_watched_model_and_handed_in_values(tmp_path, capsys):
    runpy.run_path(str(EXAMPLE))["main"](tmp_path)
    shown = capsys.readouterr().out
    for words in (
        "units of layer 1 were never active",
        "outputs beyond 30",
        "16 of 64 units of 0.weight are dead",
        "throughput (samples per second) fell from 1000 to 500",
        "far above its usual",
        "exploding gradient",
        "after clear() 0 tensors",
    ):
        assert words in shown
    assert "head" not in shown, "a layer that is not selected"
    for name in ("attached", "handed-in"):
        assert (tmp_path / name / "session-1" / "dashboard.html").is_file()
        assert (tmp_path / name / "session-1" / "debug_report.json").is_file()
