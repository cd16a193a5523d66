"""A small model, data, and a debugger that is closed when its test ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.pytorch_debugging import PyTorchDebugger


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny here, and waking threads on a busy machine is not
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make(tmp_path):
    made = []

    def debugger(**options):
        options = {"debug_mode": True, "enable_gradient_checking": True, "log_dir": tmp_path / "logs"} | options
        made.append(PyTorchDebugger(**options))
        return made[-1]

    yield debugger
    for each in made:
        each.close()


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def kinds(debugger):
    return [event["event_type"] for event in debugger.debug_events]
