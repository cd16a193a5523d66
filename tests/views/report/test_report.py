"""The report of a run: what it says, and that it says it safely."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

pytest.importorskip("plotly", reason="HTML reports need the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import BROKEN, DYING, Recipe, write_run
from tests.views.html_tags import Tags
from tests.views.report.hostile_run import ATTACKS, write_hostile_run

from sonde.cli.main import app
from sonde.errors import OptionError
from sonde.records import Evidence, Finding
from sonde.store import open_run
from sonde.store.timeline import encode_finding
from sonde.views.report import read_report, render_report

FINDINGS = (
    Finding(kind="dead_relu", severity="warning", confidence=0.6, step=10, last_step=20, sites=("blocks.2.mlp",)),
    Finding(
        kind="missing_zero_grad",
        severity="critical",
        confidence=0.9,
        step=2,
        last_step=60,
        sites=("optimizer",),
        evidence=(Evidence(name="share left over", value=1.0, threshold=0.9, relation=">="),),
        cause="Gradients are never cleared.",
        fix="Call optimizer.zero_grad().",
    ),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    write_run(path)
    (path / "findings.jsonl").write_bytes(b"".join(encode_finding(finding) for finding in FINDINGS))
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "hostile"
    write_hostile_run(path)
    return open_run(path)


def test_the_gravest_finding_comes_first_and_before_all_plots(path):
    html = render_report(open_run(path))
    text = Tags(html).text
    assert text.index("Missing zero grad") < text.index("Dead ReLU") < text.rindex("Metrics")
    assert "Call optimizer.zero_grad()." in text
    assert "share left over: 1 (>= 0.9)" in text


def test_html_holds_every_figure_and_the_library_once(path):
    html = render_report(open_run(path))
    tags = Tags(html).tags
    assert sum(tag == "div" and "data-figure" in attrs for tag, attrs in tags) >= 8
    assert sum(tag == "script" for tag, _ in tags) == 3  # data, plotly.js, our own
    data = json.loads(re.search(r'id="figures">(.*?)</script>', html, re.S).group(1))
    assert len(data["figures"]) == sum("data-figure" in attrs for _, attrs in tags)
    assert set(data["templates"]) == {"light", "dark"}


def test_html_refers_to_nothing_outside_itself(path):
    html = render_report(open_run(path))
    for tag, attrs in Tags(html).tags:
        assert not {"src", "srcset", "data", "action"} & set(attrs), (tag, attrs)
        assert attrs.get("href", "#").startswith("#")
    policy = next(attrs["content"] for tag, attrs in Tags(html).tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_names_of_a_stranger_are_text_and_nothing_else(hostile):
    html = render_report(hostile)
    tags = Tags(html).tags
    assert sum(tag == "script" for tag, _ in tags) == 3
    assert not [
        tag for tag, attrs in tags if tag in ("img", "iframe", "object") or any(k.startswith("on") for k in attrs)
    ]
    assert not [attrs for tag, attrs in tags if tag == "a" and not attrs["href"].startswith("#")]
    assert ATTACKS[0] in Tags(html).text


def test_markdown_of_a_stranger_holds_no_markup(hostile):
    text = render_report(hostile, "md")
    assert "<" not in text.partition("## Environment")[0]
    assert "\x1b" not in text
    assert "\u2028" not in text
    fence = ""
    for line in text.partition("## Environment")[2].splitlines():
        if set(line) == {"`"} and fence in ("", line):
            fence = "" if fence else line
        else:
            assert fence or not line or line.startswith("## Config")
    assert not fence


def test_markdown_says_what_html_says(path):
    text = render_report(open_run(path), "md")
    assert "### Missing zero grad (critical)" in text
    assert "- **Fix:** Call optimizer.zero\\_grad()." in text
    assert DYING in text
    assert BROKEN in text


def test_json_is_strict_and_complete(path, hostile):
    def refuse(word):
        raise AssertionError(f"not strict JSON: {word}")

    plain = json.loads(render_report(open_run(path), "json"), parse_constant=refuse)
    assert [finding["kind"] for finding in plain["findings"]] == ["missing_zero_grad", "dead_relu"]
    assert plain["run"]["num_steps"] == 60
    assert {layer["layer"] for layer in plain["layers"] if layer["level"] != "fine"} >= {DYING, BROKEN}
    plain = json.loads(render_report(hostile, "json"), parse_constant=refuse)
    assert plain["findings"][0]["evidence"][0]["value"] is None


def test_an_empty_run_has_a_report_that_says_so(tmp_path):
    write_run(tmp_path / "nothing", Recipe(steps=0, dies_at=None, nan_at=None))
    run = open_run(tmp_path / "nothing")
    text = Tags(render_report(run)).text
    assert "No finding was recorded in this run." in text
    assert "Nothing was logged" in text
    assert "0 steps" in render_report(run, "md")
    assert read_report(run).metrics == []


def test_an_unknown_format_is_refused(path):
    with pytest.raises(OptionError, match="html, md, json"):
        render_report(open_run(path), "pdf")


def sonde(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="sonde")


def test_the_verb_writes_a_file_named_after_the_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sonde("report", path)
    assert result.exit_code == 0
    assert "first.html" in result.output
    assert (tmp_path / "first.html").read_text().startswith("<!doctype html>")
    assert sonde("report", path).exit_code == 2  # it will not write over what is there
    assert sonde("report", path, "--force").exit_code == 0


def test_the_ending_of_the_file_is_the_format_and_a_dash_is_standard_output(path, tmp_path):
    assert sonde("report", path, "--out", tmp_path / "r.md").exit_code == 0
    assert sonde("report", path, "--out", tmp_path / "r.pdf").exit_code == 2
    assert (tmp_path / "r.md").read_text().startswith("# first")
    assert json.loads(sonde("report", path, "--format", "json", "--out", "-").output)["run"]["name"] == "first"


def test_a_report_of_no_run_says_where_runs_are(path):
    result = sonde("report", path.parent / "frist")
    assert result.exit_code == 2
    assert "first" in result.output


def failed_run(path, message="shapes <b>do not</b> fit | at `all`"):
    write_run(path)
    trace = f'Traceback\n  File "/home/me/train.py", line 7, in <module>\n    step()\nRuntimeError: {message}\n'
    event = {"event_type": "exception", "message": f"RuntimeError: {message}", "step": 60, "timestamp": 0.0}
    with (path / "events.jsonl").open("a") as events:
        events.write(json.dumps(event | {"data": {"traceback": trace}}) + "\n")
    writer = path / "telemetry" / "r00000" / "writer.json"
    writer.write_text(json.dumps(json.loads(writer.read_text()) | {"state": "failed"}))
    return open_run(path)


def test_the_report_of_a_failed_run_names_the_exception_its_step_its_line_and_where_the_traceback_is(tmp_path):
    run = failed_run(tmp_path / "failed")
    markdown = render_report(run, "md")
    assert markdown.index("## How it ended") < markdown.index("## Findings")
    words = r"RuntimeError: shapes &lt;b&gt;do not&lt;/b&gt; fit \| at \`all\` (train.py:7)."
    assert f"At step 60: The training raised {words} The traceback is in the run's events.jsonl." in markdown
    assert '\n  File "/home/me/train.py", line 7, in <module>\n' in markdown, "as code, which shows it as it is"
    page = Tags(render_report(run, "html"))
    assert (
        "At step 60: The training raised RuntimeError: shapes <b>do not</b> fit | at `all` (train.py:7)." in page.text
    )
    assert 'File "/home/me/train.py", line 7' in page.text
    assert not any(tag == "b" and not attributes for tag, attributes in page.tags[:5])
    ending = json.loads(render_report(run, "json"))["ending"]
    assert (ending["exception"], ending["step"], ending["place"]) == ("RuntimeError", 60, "train.py:7")
    assert ending["message"] == "shapes <b>do not</b> fit | at `all`"
    assert ending["traceback"].startswith("Traceback")


def test_a_run_that_finished_has_no_ending_to_report(path):
    run = open_run(path)
    assert "How it ended" not in render_report(run, "md")
    assert json.loads(render_report(run, "json"))["ending"] is None


def test_a_run_that_was_killed_or_stopped_is_described_in_a_sentence(tmp_path):
    run = failed_run(tmp_path / "killed")
    writer = run.path / "telemetry" / "r00000" / "writer.json"
    (run.path / "events.jsonl").write_text("")
    endings = {"live": "The process ended without recording why", "interrupted": "The training was interrupted."}
    for state, words in endings.items():
        plain = json.loads(writer.read_text()) | {"state": state, "pid": 2**22 + 1, "process_start": "0"}
        writer.write_text(json.dumps(plain))
        markdown = render_report(open_run(run.path), "md")
        assert words in markdown
        assert "traceback" not in markdown


def test_a_report_is_made_of_the_run_at_a_path(path):
    assert render_report(path, "json") == render_report(open_run(path), "json")
    with pytest.raises(OptionError, match="takes the folder of a run, such as 'runs/first'; got None"):
        render_report(None, "md")
