"""Ranks with other learning rates, loss scales or numbers of steps than the others; and ranks that agree."""

from __future__ import annotations

import pytest
from tests.parallel.made_ranks import write_beat

import sonde

KIND = "ranks_differ_in_settings"


def write(path, rates=(0.1, 0.1), scales=(1024.0, 1024.0), steps=(6, 6)):
    """Write what two ranks recorded of their settings, and that both have finished."""
    for rank in range(2):
        with sonde.open_session(run=path, rank=rank) as session:
            for step in range(steps[rank]):
                late = step >= 3
                session.log(
                    **{"optimizer.lr": rates[rank * late], "scaler.scale": scales[rank * late], "loss": rank + 1.0}
                )
                session.step()
        write_beat(path, rank, state="finished", step=steps[rank])


def found_in(path):
    return {finding.kind: finding for finding in sonde.diagnose(path).findings}.get(KIND)


@pytest.mark.parametrize(
    ("differs", "site", "step", "words"),
    [
        ({"rates": (0.1, 0.2)}, "optimizer", 4, "optimizer.lr is not the same"),
        ({"scales": (1024.0, 512.0)}, "scaler", 4, "scaler.scale is not the same"),
        ({"steps": (6, 5)}, "(loop)", 5, "Rank 1 ended after step 5, rank 0 after step 6"),
    ],
)
def test_ranks_that_differ_are_found_with_the_setting_and_the_step(tmp_path, differs, site, step, words):
    write(tmp_path / "run", **differs)
    found = found_in(tmp_path / "run")
    assert (found.sites, found.step) == ((site,), step)
    assert words in found.cause


def test_ranks_with_the_same_settings_and_other_losses_are_silent(tmp_path):
    write(tmp_path / "run")
    assert found_in(tmp_path / "run") is None
