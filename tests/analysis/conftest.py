import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_run import write_run

from sonde.store import open_run


@pytest.fixture(scope="session")
def run_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    write_run(path)
    return path


@pytest.fixture
def run(run_path):
    return open_run(run_path)
