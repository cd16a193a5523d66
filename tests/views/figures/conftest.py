import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly", reason="figures need the view extra: pip install 'sonde[view]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "analysis"))

from made_run import Recipe, write_run

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


@pytest.fixture(scope="session")
def empty_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "nothing"
    write_run(path, Recipe(steps=0, dies_at=None, nan_at=None))
    return open_run(path)


@pytest.fixture
def numbers():
    """Return a function that gives an array of a figure's JSON back as numpy, as a browser would decode it."""

    def decode(packed):
        if not isinstance(packed, dict):
            return np.asarray([np.nan if each is None else each for each in packed])
        flat = np.frombuffer(base64.b64decode(packed["bdata"]), dtype=np.dtype(packed["dtype"]))
        shape = [int(n) for n in packed["shape"].split(",")] if "shape" in packed else [-1]
        return flat.reshape(shape)

    return decode


@pytest.fixture
def strict_json():
    """Return a function that reads a figure's JSON and refuses what only Python's parser takes."""

    def refuse(word):
        raise AssertionError(f"not strict JSON: {word}")

    return lambda figure: json.loads(figure.to_json(), parse_constant=refuse)
