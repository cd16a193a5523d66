import base64
import json

import numpy as np
import pytest

pytest.importorskip("plotly", reason="figures need the view extra: pip install 'sonde[view]'")

from tests.analysis.made_run import Recipe, write_run

from sonde.store import open_run


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
