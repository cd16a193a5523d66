import pytest
from tests.analysis.made_run import write_run

from sonde.store import open_run


@pytest.fixture(scope="session")
def run_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    write_run(path)
    return path


@pytest.fixture
def run(run_path):
    return open_run(run_path)
