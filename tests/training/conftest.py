import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Spend no time on what these tests do not show.

    Only a loss of power needs fsync, and no test here has one. And a busy machine takes far longer over tiny networks
    with several threads, which wait for each other, than with one.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
