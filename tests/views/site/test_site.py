"""`sonde export RUN --to site`: what is written, what is refused, and that the copy says what the server says."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("plotly")
pytest.importorskip("starlette")

from tests.analysis.made_run import Recipe, write_run
from tests.views.report.hostile_run import write_hostile_run
from typer.testing import CliRunner

from sonde.cli.main import app
from sonde.errors import OptionError, RunNotFound
from sonde.store import open_run
from sonde.views.site import Limits, write_site
from sonde.views.site.ask import spell

SMALL = Recipe(steps=8, layers=1)
FEW = Limits(sites=2, steps=2)


def answers_of(site):
    """Read a copy as a browser would: question by question."""
    found = {}
    for file in (site / "data").glob("[0-9]*.js"):
        for line in file.read_text().splitlines():
            question, kind, body = json.loads(f"[{re.fullmatch(r'sondeCopy.put[(](.*)[)];', line)[1]}]")
            found[question] = (kind, body)
    return found


def index_of(site):
    text = (site / "data" / "index.js").read_text()
    about, index = re.fullmatch(r"window.sondeCopy = \{ about: (\".*\"), index: (\".*\") \};\n", text).groups()
    return json.loads(json.loads(about)), dict(json.loads(json.loads(index)))


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    write_run(folder, SMALL)
    return folder


@pytest.fixture(scope="module")
def few(first, tmp_path_factory):
    """A copy of it with a few of its sites and steps, and what was said of the copy."""
    site = tmp_path_factory.mktemp("copies") / "few"
    return site, write_site(first, site, limits=FEW)


def test_every_question_of_the_index_is_answered_in_its_file_with_what_the_run_says(first, few):
    site, done = few
    answers, (about, index) = answers_of(site), index_of(site)
    assert set(index) == set(answers)
    assert done.answers == len(answers)
    assert about["name"] == "first"
    assert about["command"] == "sonde view first"
    run = open_run(first)
    reply = json.loads(answers[spell("run/0-first", {})][1])
    assert reply["facts"]["num_steps"] == len(run.steps) == 8
    events = json.loads(answers[spell("run/0-first/events", {})][1])["events"]
    assert [event["message"] for event in events] == [event.message for event in run.events]


def test_limits_are_kept_and_reported(first, few, tmp_path):
    site, done = few
    asked = [question for question in answers_of(site) if question.startswith('["api/run/0-first/site"')]
    assert len(asked) == 2
    assert any(re.fullmatch(r"Of 16 sites, 2 can be looked at one by one\.", line) for line in done.left_out)
    small = write_site(first, tmp_path / "small", limits=Limits(sites=0, steps=0, total_bytes=4000))
    kept = sum(len(body) for _, body in answers_of(tmp_path / "small").values())
    assert kept <= 4000
    assert any("had no room in this copy" in line for line in small.left_out)


def test_a_copy_replaces_a_copy_and_nothing_else(first, few, tmp_path):
    shutil.copytree(few[0], tmp_path / "site")
    (tmp_path / "site" / "old").write_text("old")
    write_site(first, tmp_path / "site", limits=Limits(sites=0, steps=0))
    assert not (tmp_path / "site" / "old").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("dear")
    with pytest.raises(OptionError, match="holds other files and will not be touched"):
        write_site(first, tmp_path / "mine")
    with pytest.raises(OptionError, match="is a file; --out names a folder"):
        write_site(first, tmp_path / "mine" / "thesis.tex")
    with pytest.raises(RunNotFound):
        write_site(tmp_path / "mine", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "site"]


def test_nothing_of_a_stranger_is_code_in_the_files(tmp_path):
    write_hostile_run(tmp_path / "run", steps=4)
    write_site(tmp_path / "run", tmp_path / "site", limits=Limits(sites=3))
    for file in (tmp_path / "site" / "data").glob("[0-9]*.js"):
        for line in file.read_text().splitlines():
            # Three strings and nothing else.
            assert len(json.loads(f"[{line.removeprefix('sondeCopy.put(').removesuffix(');')}]")) == 3
    page = (tmp_path / "site" / "index.html").read_text()
    assert "alert" not in page
    assert "script-src 'self'" in page


def test_the_command_writes_it_and_says_what_it_holds(first, tmp_path):
    out = tmp_path / "site"
    done = CliRunner().invoke(app, ["export", str(first), "--to", "site", "--out", str(out), "--json"])
    reply = json.loads(done.output)
    assert reply["format"] == "site"
    assert reply["bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert (out / "index.html").is_file()
