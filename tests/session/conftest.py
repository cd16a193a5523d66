from __future__ import annotations

import pytest
import torch

import sonde
from sonde.testing import MemorySink, assert_no_taps


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Watched:
    """A session on a fresh run with a sink in memory; faults of Sonde are raised, not isolated."""

    def __init__(self, path, model, optimizer, **options):
        self.models = list(model.values()) if isinstance(model, dict) else [model]
        self.sink = MemorySink()
        self.session = sonde.watch(model, optimizer, run=path, **{"on_error": "raise", **options})
        self.session.subscribe(self.sink)

    def __enter__(self):
        self.session.__enter__()
        return self

    def __exit__(self, *exc):
        self.session.__exit__(*exc)

    def log(self, **scalars):
        self.session.log(**scalars)

    def __getitem__(self, key):
        """Readings of a site by step, as far as they have come."""
        return self.sink.readings(key)


@pytest.fixture
def watched(tmp_path):
    made = []

    def make(model, optimizer=None, **options):
        made.append(Watched(tmp_path / f"run{len(made)}", model, optimizer, **options))
        return made[-1]

    yield make
    for model in (model for each in made for model in each.models):
        assert_no_taps(model)
