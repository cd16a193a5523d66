import io

import pytest
from rich.console import Console
from tests.analysis.made_run import write_run

from sonde.store import open_run


@pytest.fixture(scope="session")
def run_path(tmp_path_factory):
    """A run with a layer whose gradients die at step 30, and NaN in another from step 45."""
    path = tmp_path_factory.mktemp("runs") / "first"
    write_run(path)
    return path


@pytest.fixture
def run(run_path):
    return open_run(run_path)


@pytest.fixture
def draw():
    """Return a function that gives what a renderable looks like, as plain lines."""

    def drawn(*renderables, width=80):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        for renderable in renderables:
            console.print(renderable)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    return drawn
