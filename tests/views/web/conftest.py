"""Runs to view, and a client that knows the token."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="the viewer needs the view extra: pip install 'sonde[view]'")
pytest.importorskip("plotly", reason="the viewer needs the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import write_run
from tests.views.web.asking import CALM, SMALL, client_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Two runs in a folder, one of them a level deeper, in a name that needs quoting."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "one", SMALL)
    write_run(root / "sweep" / "lr 0.1~b", CALM)
    return root


@pytest.fixture
def client(folder):
    return client_of(folder)
