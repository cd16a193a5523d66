"""A loss that is NaN or infinite is shown as what it is: never as 0, and never as if it had not been measured."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys

import pytest

import sonde as library
from sonde.views.report import render_report

KILLED = """
import os, signal, sonde
session = sonde.open_session(run={path!r})
for loss in {losses!r}:
    session.log(loss=float(loss))
    session.step()
session.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def finished(path, losses):
    with library.open_session(run=path) as session:
        for loss in losses:
            session.log(loss=loss)
            session.step()


def killed(path, losses):
    code = KILLED.format(path=str(path), losses=[str(loss) for loss in losses])
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("end", [finished, killed])
@pytest.mark.parametrize(
    ("losses", "shown"),
    [([2.0, 1.0, math.nan], "NaN"), ([math.nan, math.nan], "NaN"), ([2.0, 1.0, math.inf], "inf")],
    ids=["became NaN", "always NaN", "became infinite"],
)
def test_the_last_loss_is_what_it_was(sonde, tmp_path, end, losses, shown):
    end(tmp_path / "run", losses)
    row = sonde("runs", tmp_path).output.splitlines()[1].split()
    assert row[3] == shown
    assert f"loss {shown}" in sonde("tail", "--once", tmp_path / "run").output
    assert shown in sonde("show", tmp_path / "run").output
    last = sonde("show", tmp_path / "run", "--site", "loss").output.splitlines()[1].split()
    assert last[2] == shown
    now = sonde("show", tmp_path / "run", "--step", len(losses)).output.splitlines()[-1].split()
    assert now[1] == shown
    going = {"NaN": "NaN", "inf": "infinite"}[shown]
    assert f"last loss: {shown}, loss is: {going} since step" in render_report(tmp_path / "run", "md")


def test_the_list_of_runs_in_the_browser_tells_nan_from_no_loss(tmp_path):
    pytest.importorskip("starlette")
    from tests.views.web.asking import client_of

    finished(tmp_path / "nan", [1.0, math.nan])
    finished(tmp_path / "none", [])
    finished(tmp_path / "well", [1.0, 0.5])
    answer = client_of(tmp_path).get("/api/runs")
    json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"not strict JSON: {word}"))
    assert {row["name"]: row["last_loss"] for row in answer.json()["runs"]} == {"nan": "NaN", "none": None, "well": 0.5}


def test_a_progress_line_shows_no_loss_before_there_is_one(tmp_path):
    import io

    from sonde.views.terminal import TrainingProgress, make_console

    out = io.StringIO()
    with TrainingProgress(2, console=make_console(file=out, width=80)) as bar:
        bar.update(1)
        bar.update(2, loss=math.nan)
    first, second = out.getvalue().splitlines()
    assert "loss" not in first
    assert "loss NaN" in second
