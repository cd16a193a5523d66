import json
import os
import sys
from pathlib import Path

import pytest
from tests.analysis.made_run import Recipe, write_run
from tests.waiting import run_to_end
from typer.testing import CliRunner

from sonde.cli.main import app

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with two finished runs: one with trouble in it, one without."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    write_run(folder / "well", Recipe(steps=25, layers=1, dies_at=None, nan_at=None))
    return folder


@pytest.fixture
def first(folder):
    return str(folder / "first")


@pytest.fixture
def sonde():
    """Return a function that runs the command line in this process."""

    def invoke(*arguments, **environment):
        return CliRunner().invoke(app, [str(each) for each in arguments], env=environment or None, prog_name="sonde")

    return invoke


@pytest.fixture
def strict():
    """Return a function that parses JSON and refuses what only Python's parser takes."""

    def refuse(word):
        raise AssertionError(f"not strict JSON: {word}")

    return lambda text: json.loads(text, parse_constant=refuse)


@pytest.fixture
def process():
    """Return a function that runs Python in a process of its own, as a user's shell would."""

    def start(*arguments, **environment):
        variables = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "80", **environment}
        variables = {name: value for name, value in variables.items() if value is not None}
        return run_to_end([sys.executable, *arguments], env=variables)

    return start
