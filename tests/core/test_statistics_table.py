"""One table of statistics: a row added to it appears everywhere, and no other list exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from tests.analysis.made_run import write_run
from typer.testing import CliRunner

from sonde.cli.main import app
from sonde.core import schema, statistics
from sonde.core.statistics import STATISTICS, Statistic
from sonde.store import open_run

SITE = "head.weight:gradient"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    write_run(path)
    return path


@pytest.fixture
def extent(monkeypatch):
    """A statistic that nobody has thought of: how far the smallest element is from the largest."""
    row = Statistic(
        "extent",
        (schema.MIN, schema.MAX),
        lambda rows: rows[..., schema.MAX] - rows[..., schema.MIN],
        "distance from minimum to maximum",
        shown="always",
    )
    monkeypatch.setitem(STATISTICS, row.name, row)
    return row


def expected(path):
    run = open_run(path)
    return run.series(SITE, "max").values - run.series(SITE, "min").values


def sonde(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="sonde", env={"COLUMNS": "100"})


def test_a_row_that_is_added_is_a_series_and_a_column_of_exports(extent, path, tmp_path):
    run = open_run(path)
    np.testing.assert_array_equal(run.series(SITE, "extent").values, expected(path))
    assert run.at(5)[run.site(SITE)].get("extent") == expected(path)[4]
    assert sonde("export", path, "--to", "csv", "--out", tmp_path / "run.csv").exit_code == 0
    assert "extent" in (tmp_path / "run.csv").read_text().splitlines()[0].split(",")


def test_a_row_that_is_added_is_in_the_help_and_the_tables_of_the_command_line(extent, path):
    assert "extent" in sonde("show", "--help").output
    assert "extent" in sonde("export", "--help").output
    result = sonde("show", path, "--stat", "extent", "--site", SITE)
    assert result.exit_code == 0
    assert extent.title in " ".join(result.output.split())


def test_a_row_that_is_added_is_drawn_and_served(extent, path):
    pytest.importorskip("plotly")
    pytest.importorskip("starlette")
    from tests.views.web.asking import client_of

    from sonde.views import figures

    drawn = figures.layer_heatmap(open_run(path), "*:gradient", stat="extent")
    assert drawn.layout.title.text.startswith("Distance from minimum to maximum of the gradient")
    client = client_of(path.parent)
    [run] = client.get("/api/runs").json()["runs"]
    served = client.get("/api/statistics").json()["statistics"]
    assert {"name": "extent", "title": extent.title, "unit": None, "shown": "always", "quantity": None} in served
    about = client.get(f"/api/run/{run['id']}/site", params={"site": SITE}).json()
    assert about["last"]["extent"] == pytest.approx(expected(path)[-1])
    curve = client.get(f"/api/run/{run['id']}/curve", params={"site": SITE, "stat": "extent"}).json()
    assert "distance from minimum to maximum" in curve["title"].lower()


def test_every_row_has_its_own_name_and_a_title_that_is_more_than_code():
    for name, row in STATISTICS.items():
        assert row.name == name
        assert "_" not in row.title
        assert (row.of is None) == (row.quantile is not None)
    titles = [row.title for row in STATISTICS.values()]
    assert len(set(titles)) == len(titles)
    assert set(statistics.USUAL.values()) <= set(STATISTICS)


def test_the_page_of_statistics_is_the_one_that_the_table_writes():
    made = runpy.run_path(str(ROOT / "docs" / "make_statistics.py"))
    assert made["PAGE"].read_text("utf-8") == made["page"](), "run: python docs/make_statistics.py"


def test_no_other_module_lists_the_statistics():
    """A list of five names or more beside each other is a copy of the table."""
    names = "|".join(STATISTICS)
    copy = re.compile(rf"(?:[\"'](?:{names})[\"'],\s*){{5,}}")
    known = {"debug/terminal_visualizer.py"}  # the table of one tensor that its user asked for
    found = {
        str(file.relative_to(ROOT / "src/sonde"))
        for ending in ("py", "js")
        for file in (ROOT / "src/sonde").rglob(f"*.{ending}")
        if copy.search(file.read_text("utf-8"))
    }
    assert found - known == set()
