"""What the tests of forensics share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import sonde
from sonde.testing import MemorySink

_NAME = "forensics_programs"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("programs.py"))
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])


class Reports(MemorySink):
    """Keeps what forensics reports, before a diagnosis folds it under what explains it."""

    def __init__(self):
        super().__init__()
        self.origins = {}

    def take_finding(self, finding):
        # A cause that a diagnosis found takes the origin over from what it explains.
        if "origin" in finding.data and not finding.explains and not finding.withdrawn:
            self.origins.setdefault((finding.kind, finding.cause), finding)


@pytest.fixture
def reported(tmp_path):
    """Run a program under `sonde.watch` in tmp_path/run; return what was reported about non-finite values."""

    def run(program, **options):
        sink = Reports()

        def watch(model, optimizer=None, **more):
            session = sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", **more, **options)
            session.subscribe(sink)
            return session

        torch.manual_seed(0)
        program(watch)
        return list(sink.origins.values())

    return run


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors on many threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def as_if_on_a_device(monkeypatch):
    """Take the present step's numbers out of reach, as a GPU's are: only readings that arrive later tell of them."""
    monkeypatch.setattr("sonde.record.packer.Packer.nonfinite", lambda self, quantity: None)
    monkeypatch.setattr("sonde.forensics.watcher._is_on_host", lambda tensor: False)
