"""The code in README and guides runs as it stands, and says what it is said to say."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sonde
from sonde.cli.main import app

ROOT = Path(__file__).parents[2]
EVERY = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
ELSEWHERE = {"training.md": "tests/training/test_docs.py"} | dict.fromkeys(
    ("transformers.md", "lightning.md", "accelerate.md", "ignite.md", "trackers.md"), "tests/integrations/test_pages.py"
)
GUIDES = [page for page in EVERY if "```python" in page.read_text() and page.parent.name != "findings"]
COMMAND = re.compile(r"^(?:    |\$ )?(sonde [a-z-]+ [^#\n]+)", re.MULTILINE)


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


@pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in ELSEWHERE], ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "page-format.md":
        with sonde.Capture(page_bytes=1 << 20) as capture:
            capture.open("epoch_4/debugger")
            capture.add(17, {"features": {"layer1": [torch.ones(2)]}})
    names: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_guides_that_run_elsewhere_do(page, test):
    assert page in (ROOT / test).read_text()


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_guide_is_on_the_map():
    linked = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / "README.md").read_text()))
    missing = {page.name for page in ROOT.glob("docs/*.md")} - linked - {"README.md"}
    assert not missing, f"add a line to docs/README.md for {sorted(missing)}"


@functools.cache
def help_of(verb):
    return CliRunner().invoke(app, [verb, "--help"], prog_name="sonde", env={"COLUMNS": "200"}).stdout


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_commands_exist_with_their_options(page):
    verbs = {each.name or each.callback.__name__: each for each in app.registered_commands}
    for line in COMMAND.findall(page.read_text()):
        words = shlex.split(line.partition(" | ")[0].partition(" && ")[0], comments=True)
        assert words[1] in verbs, line
        told = help_of(words[1])
        for option in (word.partition("=")[0] for word in words[2:] if word.startswith("--")):
            assert f"{option} " in told, f"{line}: there is no {option}"


def test_the_readme_prints_what_it_says(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    torch.manual_seed(0)
    exec(compile(python_blocks(ROOT / "README.md")[0], "README.md", "exec"), {})
    told = [record.getMessage() for record in caplog.records if record.name == "sonde"]
    said = "found in runs/first: missing_zero_grad (critical)"  # what else is found may depend on the machine
    assert said in text
    assert any(line.startswith(said) and line.endswith(". Run: sonde diagnose runs/first") for line in told)
    printed = CliRunner().invoke(app, ["diagnose", "runs/first"], prog_name="sonde", env={"COLUMNS": "80"}).stdout
    shown = re.search(r"```text\n(.*?)```", text, flags=re.S)[1]
    assert shown.splitlines() == [line.rstrip() for line in printed.splitlines() if line.rstrip() in shown.splitlines()]


def test_the_costs_in_the_readme_are_those_that_were_measured():
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    costs = (ROOT / "README.md").read_text().partition("## What it costs")[2].partition("\n## ")[0]
    ratios = re.findall(r"\d+\.\d{3}", costs)
    assert len(ratios) > 15
    for ratio in ratios:
        assert ratio in measured, f"README.md says {ratio}; benchmarks/README.md does not"


def test_every_public_name_is_on_its_page_and_in_an_example():
    page = ROOT / "docs" / "api.md"
    tables = "\n".join(line for line in page.read_text().splitlines() if line.startswith("| `"))
    listed = re.findall(r"`sonde\.(\w+)`", tables)
    assert sorted(listed) == sorted(sonde.__all__)
    code = "\n".join(python_blocks(page))
    unused = [name for name in sonde.__all__ if f"sonde.{name}" not in code]
    assert not unused
    for name in sonde.__all__:
        assert name == "__version__" or (getattr(sonde, name).__doc__ or "").strip(), f"{name} has no docstring"
