"""Vital signs on a device: nothing waits for it, and what is found is what the CPU finds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def program(tmp_path, device, *, strict=False, steps=12):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(64, 1, 6, 6, generator=generator), torch.randint(5, (64,), generator=generator)) for _ in range(4)
    ]
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    with Watching(tmp_path, model, optimizer) as seen:
        for step in range(steps):
            if strict and step == 1:  # the first pass allocates, and may wait for that
                torch.cuda.set_sync_debug_mode("error")
            x, y = batches[step % 4]
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    return seen


@pytest.fixture(autouse=True)
def _forgiving():
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device(tmp_path):
    seen = program(tmp_path, "cuda", strict=True)
    assert "loss_fn:vital.neighbour_agreement" in seen.keys


def test_what_is_found_is_what_the_cpu_finds(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cuda").mkdir()
    here, there = program(tmp_path / "cpu", "cpu"), program(tmp_path / "cuda", "cuda")
    keys = {key for key in here.keys if ":vital" in key and ".time" not in key and "_time" not in key}
    keys = {key for key in keys if not any(word in key for word in ("memory", "wait", "rss"))}
    assert keys <= there.keys
    for key in keys:
        assert list(there[key]) == list(here[key]), key
        ours, theirs = (next(iter(seen.means(key).values())) for seen in (here, there))
        assert theirs == pytest.approx(ours, rel=2e-3, abs=2e-3), key
    assert there.means("optimizer:vital.leftover") == dict.fromkeys(range(2, 13), 1.0)
