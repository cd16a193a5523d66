from __future__ import annotations

import contextlib
import os

import pytest
import torch

import sonde
from sonde.testing import MemorySink, assert_no_taps

# Deterministic matrix products need this before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Watched:
    """A session on a fresh run with a sink in memory; faults of Sonde are raised, not isolated."""

    def __init__(self, path, model, optimizer, **options):
        self.path = path
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
    torch.manual_seed(0)
    paths = (tmp_path / f"run{index}" for index in range(100))
    yield lambda model, optimizer=None, **options: Watched(next(paths), model, optimizer, **options)
    assert_no_taps()


@pytest.fixture
def no_waiting():
    """Give a context in which an operation that waits for the device raises."""

    @contextlib.contextmanager
    def context():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context
