"""`sonde diagnose --format github|sarif|junit`: findings for continuous integration."""

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.analysis.made_run import Recipe, write_run

from sonde.analysis.source_lines import locate, relative_to_checkout
from sonde.diagnosis import Diagnosis
from sonde.records import Finding
from sonde.store import open_run
from sonde.views import ci

PROGRAM = """
import torch, sonde
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3), torch.nn.Softmax(-1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with sonde.watch(model, optimizer, run="ill") as session:
    for step in range(25):
        x = torch.randn(16, 8)
        scores = model(x)
        loss = F.cross_entropy(scores, x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if step == 20:
            raise RuntimeError("50%, no\\nmore")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A script in a checkout: a softmax before cross entropy, and an exception at the end."""
    folder = tmp_path_factory.mktemp("checkout")
    file = folder / "src" / "train.py"
    file.parent.mkdir()
    file.write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["src/train.py"])
        patch.setenv("SONDE_EXAMINE", "0")
        with pytest.raises(RuntimeError):
            runpy.run_path(str(file))
    return folder


@pytest.fixture
def printed(program, sonde, monkeypatch):
    monkeypatch.chdir(program)

    def run(form):
        result = sonde("diagnose", "ill", "--no-examine", "--format", form)
        assert result.exit_code == 1
        assert result.stderr == ""
        return result.stdout

    return run


def line_number(text):
    return 1 + next(index for index, line in enumerate(PROGRAM.splitlines()) if text in line)


def test_github_gets_a_command_a_line_with_the_users_file_and_line(printed):
    commands = [line.partition("::")[2].partition("::") for line in printed("github").splitlines()]
    about = {}
    for given, _, message in commands:
        level, _, properties = given.partition(" ")
        values = dict(each.split("=", 1) for each in properties.split(","))
        about[values["title"].rpartition("(")[2].rstrip(")")] = (level, values["file"], values.get("line"), message)
    raised = about["training_failed"]
    assert raised[:3] == ("error", "src/train.py", str(line_number("raise RuntimeError")))
    assert "RuntimeError: 50%25, no more" in raised[3]
    softmax = about["double_softmax"]
    assert softmax[:3] == ("warning", "src/train.py", str(line_number("scores = model(x)")))
    assert "%0AFix: Remove the softmax" in softmax[3]
    assert "%0AEvidence: " in softmax[3]


def test_a_stranger_cannot_add_a_command(tmp_path):
    write_run(tmp_path / "run", Recipe(steps=5, layers=1, dies_at=None, nan_at=None))
    evil = Finding(kind="a,b::c", severity="warning", step=1, last_step=1, cause="x\n::error::y\r::stop-commands::z")
    text = ci.to_github(open_run(tmp_path / "run"), Diagnosis((evil,), {}, {}, 5, 1))
    assert len(text.splitlines()) == 1
    assert "\r" not in text
    assert "title=A%2Cb%3A%3Ac (a%2Cb%3A%3Ac)::x%0A" in text


def test_sarif_has_what_its_schema_requires_and_a_location_in_the_checkout(printed, strict):
    log = strict(printed("sarif"))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "Sonde"
    assert all(rule["shortDescription"]["text"].endswith(".") for rule in driver["rules"])
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        assert set(result) <= {"ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints",
                               "properties"}  # fmt: skip
        (place,) = [each["physicalLocation"] for each in result["locations"]]
        assert place["artifactLocation"] == {"uri": "src/train.py", "uriBaseId": "%SRCROOT%"}
    places = {each["ruleId"]: each["locations"][0]["physicalLocation"].get("region") for each in run["results"]}
    assert places["double_softmax"] == {"startLine": line_number("scores = model(x)")}
    assert places["training_failed"] == {"startLine": line_number("raise RuntimeError")}


def test_junit_is_xml_with_a_case_for_each_rule(printed):
    root = ElementTree.fromstring(printed("junit"))
    assert root.tag == "testsuites"
    (suite,) = root
    cases = {case.get("name"): case for case in suite}
    assert len(cases) == int(suite.get("tests")) > 100
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert len(suite.findall(f"testcase/{tag}")) == int(suite.get(count)) > 0
    failure = cases["double_softmax"].find("failure")
    assert failure.get("type") == "warning"
    assert "Fix: Remove the softmax" in failure.text
    assert (cases["double_softmax"].get("file"), cases["double_softmax"].get("line")) == (
        "src/train.py",
        str(line_number("scores = model(x)")),
    )
    assert "no more" in cases["training_failed"].find("error").text
    assert cases["slow_rank"].find("skipped").get("message") == "not measured: step times of more than one rank"
    assert len(cases["missing_zero_grad"]) == 0, "it was judged, and nothing is wrong"


def test_junit_leaves_out_what_xml_cannot_hold(tmp_path):
    write_run(tmp_path / "run", Recipe(steps=5, layers=1, dies_at=None, nan_at=None))
    evil = Finding(kind="nan_in_loss", severity="warning", step=1, last_step=1, cause="\x1b[2J\x00 ]]> <b>&")
    text = ci.to_junit(open_run(tmp_path / "run"), Diagnosis((evil,), {}, {}, 5, 1))
    found = ElementTree.fromstring(text).find("testsuite/testcase/failure")
    assert found.text.startswith("\ufffd[2J\ufffd ]]> <b>&")


def test_a_sound_run_has_no_results_and_exits_with_zero(sonde, folder, strict):
    for form in ("github", "sarif", "junit"):
        result = sonde("diagnose", folder / "well", "--format", form)
        assert result.exit_code == 0
        if form == "github":
            assert not [line for line in result.stdout.splitlines() if not line.startswith("::notice ")]
        elif form == "sarif":
            assert {each["level"] for each in strict(result.stdout)["runs"][0]["results"]} <= {"note"}
        else:
            assert ElementTree.fromstring(result.stdout)[0].get("failures") == "0"


def test_a_part_that_cannot_be_read_is_a_result(tmp_path, sonde):
    write_run(tmp_path / "cut", Recipe(steps=5, layers=1, dies_at=None, nan_at=None))
    (segment,) = (tmp_path / "cut" / "telemetry" / "r00000").glob("seg-*")
    segment.write_bytes(segment.read_bytes()[:-50])
    result = sonde("diagnose", tmp_path / "cut", "--format", "github")
    assert result.exit_code == 1
    assert "::warning title=The run is damaged (run_damaged)::Parts of the run cannot be read" in result.stdout


def test_a_path_of_another_machine_is_written_relative_to_its_checkout(program):
    run = open_run(program / "ill")
    file = str(program / "src" / "train.py")
    assert relative_to_checkout(run, file, Path("/elsewhere")) == "src/train.py"
    assert relative_to_checkout(run, "/opt/lib/model.py", Path("/elsewhere")) == "/opt/lib/model.py"


def test_a_finding_without_a_line_names_the_script(program):
    finding = Finding(kind="lr_too_high", severity="warning", step=1, last_step=2, cause="The loss rises.")
    found = locate(open_run(program / "ill"), finding)
    assert (found.file, found.line) == (str(program / "src" / "train.py"), None)
