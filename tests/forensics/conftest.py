"""What the tests of forensics share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_NAME = "forensics_programs"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("programs.py"))
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors on many threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
