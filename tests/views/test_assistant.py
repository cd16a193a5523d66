"""`sonde mcp`: runs for coding assistants, asked through the client of the official SDK."""

from __future__ import annotations

import asyncio
import os
import sys

import psutil
import pytest

pytest.importorskip("mcp", reason="it needs the mcp extra: pip install 'sonde[mcp]'")

import json

import torch
from mcp import Client, MCPError, StdioServerParameters
from tests.analysis.made_run import Recipe, write_run
from tests.browser.sampled_runs import write_header
from tests.cli.conftest import SOURCE

import sonde
from sonde.views.assistant import make_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mcp")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a sound run, a later one whose gradients are never cleared, and a secret beside the folder."""
    folder = tmp_path_factory.mktemp("project")
    write_run(folder / "runs" / "well", Recipe(steps=25, layers=1, dies_at=None, nan_at=None))
    write_run(folder / "secret", Recipe(steps=5, layers=1, dies_at=None, nan_at=None))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sonde.watch(model, optimizer, run=folder / "runs" / "sweep" / "ill", tape=False) as session:
        for _ in range(12):
            x = torch.randn(16, 8)
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return folder / "runs"


def ask(root, *questions):
    """Ask a server in this process, and return the answers; an error is returned as its text."""

    async def talk():
        async with Client(make_server(root)) as client:
            return [await client.call_tool(name, given) for name, given in questions]

    answers = asyncio.run(talk())
    return [each.content[0].text if each.is_error else json.loads(each.content[0].text) for each in answers]


def seconds_of_children():
    """Return the time that the server has computed: on a busy machine an answer takes longer by the clock."""
    spent = [each.cpu_times() for each in psutil.Process().children()]
    return sum(each.user + each.system for each in spent)


def test_what_is_wrong_with_the_last_run_is_answered_over_stdio_in_less_than_a_second(root):
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "sonde", "mcp", str(root)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )

    async def talk():
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            begun = seconds_of_children()
            answer = await client.call_tool("diagnose", {})
            return tools, seconds_of_children() - begun, answer

    tools, seconds, answer = asyncio.run(talk())
    assert {tool.name for tool in tools} == {
        "list_runs", "diagnose", "explain", "series", "compare", "first_divergence", "sample"
    }  # fmt: skip
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
    reply = json.loads(answer.content[0].text)
    assert reply["run"] == "sweep/ill"
    finding = reply["findings"][0]
    assert finding["kind"] == "missing_zero_grad"
    assert finding["cause"].startswith("Gradients are not cleared between steps")
    assert any("gradient still held" in line for line in finding["evidence"])
    assert finding["fix"].startswith("Call optimizer.zero_grad()")
    assert 0 < seconds < 1


def test_every_tool_answers(root):
    runs, explained, sites, loss, compared, parted = ask(
        root,
        ("list_runs", {}),
        ("explain", {"kind": "missing_zero_grad"}),
        ("series", {}),
        ("series", {"site": "loss", "points": 5}),
        ("compare", {"run": "well", "other": "sweep/ill"}),
        ("first_divergence", {"run": "well", "other": "well"}),
    )
    assert [each["run"] for each in runs["runs"]] == ["sweep/ill", "well"]
    assert "missing_zero_grad" in runs["runs"][0]["findings"]
    assert explained["finding"]["evidence"]
    assert "**To prove it wrong:**" in explained["about"]
    assert "weight:gradient" in sites["sites"]
    (curve,) = loss["series"]
    read = sonde.open_run(root / "sweep" / "ill").series("loss", "value")
    assert set(zip(curve["steps"], curve["values"], strict=True)) <= set(
        zip(read.steps.tolist(), read.values.tolist(), strict=True)
    )
    assert 2 <= len(curve["steps"]) <= 6
    assert {row["name"] for row in compared["settings"]} >= {"model"}
    assert parted["exact"]["first"] is None
    assert parted["exact"]["steps"] == 25


def test_samples_are_found_by_expression_and_by_id(tmp_path):
    write_header(tmp_path / "scored")
    scores = {"per_datapoint": {"loss": [0.5, 2.0, 0.25]}, "aggregated": {"loss": 0.9}}
    (tmp_path / "scored" / "epoch_0").mkdir()
    (tmp_path / "scored" / "epoch_0" / "validation_scores.json").write_text(json.dumps(scores))
    picked, one, neither = ask(
        tmp_path, ("sample", {"expression": "loss > 0.4"}), ("sample", {"idx": "1"}), ("sample", {})
    )
    assert [each["idx"] for each in picked["samples"]] == [1, 0]
    assert one["idx"] == "1"
    assert one["epochs"][0]["scores"]["loss"] == 2.0
    assert "Name a sample by idx" in neither


def test_wrong_questions_get_a_sentence(root, tmp_path):
    missing, site, kind = ask(
        root, ("diagnose", {"run": "swep"}), ("series", {"site": "nope"}), ("explain", {"kind": "no_such_kind"})
    )
    assert missing.endswith("There is no run 'swep' here. There are: sweep/ill, well.")
    assert "matches 'nope'" in site
    assert "There is no rule for 'no_such_kind'" in kind
    assert "There is no run below" in ask(tmp_path, ("diagnose", {}))[0]


@pytest.mark.parametrize("name", ["../secret", "../../etc", "/etc", "0-..~2Fsecret", "%2e%2e/secret"])
def test_no_name_leads_out_of_the_folder(root, name):
    (reply,) = ask(root, ("diagnose", {"run": name}))
    assert "There is no run" in reply


def test_no_link_leads_out_of_the_folder(tmp_path):
    secret = tmp_path / "secret"
    write_run(secret, Recipe(steps=5, layers=1, dies_at=None, nan_at=None))
    root = tmp_path / "runs"
    root.mkdir()
    (root / "linked").symlink_to(secret)
    write_run(root / "inner", Recipe(steps=5, layers=1, dies_at=None, nan_at=None))
    (root / "inner" / "tapes").symlink_to(secret)
    listed, linked, inner = ask(
        root, ("list_runs", {}), ("diagnose", {"run": "linked"}), ("diagnose", {"run": "inner"})
    )
    assert [each["run"] for each in listed["runs"]] == ["inner"]
    assert "There is no run 'linked'" in linked
    assert "is a link that leads out" in inner
    assert "is a link that leads out" in listed["runs"][0]["problem"]


def test_pages_are_resources(root):
    async def talk():
        async with Client(make_server(root)) as client:
            read = [
                (await client.read_resource(uri)).contents[0].text
                for uri in ("sonde://findings", "sonde://findings/double_softmax", "sonde://runs/0-sweep~2Fill")
            ]
            with pytest.raises(MCPError, match="no rule for 'nothing'"):
                await client.read_resource("sonde://findings/nothing")
            with pytest.raises(MCPError):
                await client.read_resource("sonde://runs/..%2Fsecret")
            return read

    index, page, report = asyncio.run(talk())
    assert "- `missing_zero_grad`: " in index
    assert page.startswith("# Double softmax (`double_softmax`)")
    assert "{" not in page
    assert report.startswith("# ill")
    assert "Missing zero grad" in report


def test_a_missing_sdk_names_the_command_that_installs_it(root, monkeypatch):
    from tests.cli import conftest  # the same runner as all commands

    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    result = conftest.CliRunner().invoke(conftest.app, ["mcp", str(root)], prog_name="sonde")
    assert result.exit_code == 2
    assert "pip install 'sonde[mcp]'" in result.stderr.replace("\n", " ")
