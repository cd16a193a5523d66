"""`run.show()`, `session.show()` and `%%sonde` in a browser, as a notebook puts them below a cell."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("plotly", reason="figures need the view extra: pip install 'sonde[view]'")

from tests.browser.sampled_runs import ROOT
from tests.views.report.hostile_run import write_hostile_run
from tests.waiting import PATIENCE_S

from sonde.store import open_run

EXECUTE = ROOT / "tests" / "browser" / "scripts" / "execute_notebook.py"
SETUP = """
import torch
import sonde
from IPython.display import DisplayHandle

torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
drawn = []
update = DisplayHandle.update
DisplayHandle.update = lambda handle, shown, **more: (update(handle, shown, **more), drawn.append(shown))


def train(log=lambda **values: None, draws=0):
    step = 0
    while step < 12 or (len(drawn) < draws and step < 100_000):
        step += 1
        x = torch.randn(16, 8)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        log(loss=loss)
"""
LIVE = """
with sonde.watch(model, optimizer, run="runs/first", tape=False) as session:
    session.show(every_s=0.05)
    train(session.log, draws=2)
"""
MAGIC = """%%sonde --run runs/magic
train()
"""
TWICE = """
def trained():
    torch.manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.1)
            each.grad = None
    train()
    print(repr([each.tolist() for each in model.parameters()]))
"""


def test_the_frame_draws_its_figures_and_cannot_reach_the_notebook(offline, tmp_path):
    write_hostile_run(tmp_path / "run", steps=6)
    cell = f"<!doctype html><body data-secret='token'>{open_run(tmp_path / 'run').show()._repr_html_()}</body>"
    (tmp_path / "notebook.html").write_text(cell, encoding="utf-8")
    page = offline.open(tmp_path / "notebook.html")
    frame = page.query_selector("iframe").content_frame()
    frame.wait_for_selector("html[data-ready]", state="attached")
    assert frame.locator("[data-figure] svg.main-svg").count() >= 8
    reached = "() => { try { return parent.document.body.dataset.secret; } catch { return null; } }"
    assert frame.evaluate(reached) is None
    assert page.locator("body > :not(p, iframe)").count() == 0
    assert offline.errors == []
    assert offline.requests == []


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """Execute a notebook in a real kernel; return the outputs of its cells, and all HTML that each has shown."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="it needs the notebook extra: pip install 'sonde[notebook]'")
    alike = (TWICE, "trained()", "%%sonde\ntrained()")
    first = (SETUP, LIVE, 'sonde.open_run("runs/first")', "%load_ext sonde", MAGIC, "%%sonde\nprint('no training')")
    codes = (*first, *alike)
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tests" / "browser" / "scripts" / "execute_notebook.py",
            tmp_path_factory.mktemp("book"),
            "120",
        ],
        input=json.dumps(codes),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    told = json.loads(done.stdout)
    return told["outputs"], told["pages"]


def page_in(cell):
    (source,) = re.findall(r'srcdoc="([^"]*)"', cell)
    return html.unescape(source)


def test_a_session_is_drawn_again_while_it_trains_in_the_cell(notebook):
    outputs, shown = notebook
    drawn = [page_in(each) for each in shown[1]]
    assert len(drawn) >= 4, "at once, twice while it trained, and when it was closed"
    assert ["<b>live</b>" in page for page in drawn] == [True] * (len(drawn) - 1) + [False]
    assert len(set(drawn)) == len(drawn), "each shows more than the one before"
    assert "<b>finished</b>" in drawn[-1]
    assert all(len(page) < 1_000_000 for page in shown[1])
    (output,) = [each for each in outputs[1] if each["output_type"] == "display_data"]
    assert output["data"]["text/html"] == shown[1][-1], "one output, replaced in place"
    assert "<Run runs/first (finished" in output["data"]["text/plain"]


def test_the_last_line_of_a_cell_and_a_cell_magic_show_a_run(notebook):
    outputs, shown = notebook
    assert "Missing zero grad" in page_in(shown[2][0]), "a run as the value of a cell"
    assert "Missing zero grad" in page_in([page for page in shown[4] if "srcdoc" in page][-1])
    printed = "".join(each.get("text", "") for each in outputs[4])
    assert "sonde: 12 steps recorded in runs/magic, 1 finding" in printed
    printed = "".join(each.get("text", "") for each in outputs[5])
    assert "no training\nsonde: nothing was recorded: " in printed


def test_a_cell_trains_bit_identically_under_the_magic(notebook):
    outputs, _ = notebook
    bare, recorded = ("".join(each.get("text", "") for each in outputs[cell]) for cell in (7, 8))
    assert bare.startswith("[[[")
    assert recorded.startswith(bare)
    assert "sonde: 12 steps recorded in runs/notebook-1" in recorded


def test_the_live_page_is_drawn_by_the_browser_alone(notebook, offline, tmp_path):
    _, shown = notebook
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{shown[1][-1]}</body>", encoding="utf-8")
    page = offline.open(tmp_path / "notebook.html")
    frame = page.query_selector("iframe").content_frame()
    frame.wait_for_selector("article.finding.critical")
    assert "Call optimizer.zero_grad() once per step" in frame.inner_text("article.finding.critical")
    curve = frame.query_selector(".curves svg")
    assert curve.bounding_box()["height"] > 20
    assert len(frame.query_selector(".curves polyline").get_attribute("points").split()) >= 12
    assert offline.errors == []
    assert offline.requests == []
