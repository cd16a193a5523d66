"""A run that is not there: the error says what is."""

from __future__ import annotations

import pytest
from tests.store.making import write_run

from sonde.errors import RunNotFound
from sonde.store import open_run


def told(path):
    with pytest.raises(RunNotFound) as caught:
        open_run(path)
    return str(caught.value)


def test_the_nearest_run_is_named(tmp_path):
    write_run(tmp_path / "first", range(2))
    assert told(tmp_path / "frist").endswith(f"Nearest: {tmp_path / 'first'}.")
    assert told(tmp_path).endswith("It holds runs: first.")
    assert "has no run.json" in told(tmp_path / "first" / "telemetry")
    assert told(tmp_path / "a" / "b").endswith(f"There is no folder {tmp_path / 'a'} either.")
    assert told(tmp_path / "unlike") == f"There is no run at {tmp_path / 'unlike'}. Runs beside it: first."
