"""The same on a CUDA device: right numbers, times, memory, bit-identical steps, anomalies with their place."""

from __future__ import annotations

import math

import pytest
import torch
from tests.pytorch_debugging.conftest import batch, kinds, small_model
from torch import nn

from sonde.probes.readings import read_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_gradients_of_two_devices_are_checked_together(make):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.near, self.far = nn.Linear(4, 8), nn.Linear(8, 3).cuda()

        def forward(self, x):
            return self.far(self.near(x).cuda())

    model = Split()
    model(batch()[0]).square().sum().backward()
    expected = math.sqrt(sum(float(each.grad.double().square().sum()) for each in model.parameters()))
    assert make().check_gradients(model) == pytest.approx(expected, rel=1e-6)
    assert set(read_gradients(model)) == {"near.weight", "near.bias", "far.weight", "far.bias"}


def test_a_debugged_step_has_device_times_and_memory_and_is_bit_identical(make):
    def train(step):
        model = small_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for number in range(5):
            x, y = batch(number)
            step(model, x.cuda(), y.cuda(), optimizer)
        return [each.detach().clone() for each in model.parameters()]

    def plain(model, x, y, optimizer):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    debugger = make()

    def debugged(model, x, y, optimizer):
        debugger.debug_training_step(model, x, y, nn.functional.cross_entropy, optimizer)

    assert all(torch.equal(a, b) for a, b in zip(train(plain), train(debugged), strict=True))
    last = debugger.last_forward["2"]
    assert last["time_ms"] > 0
    assert last["cuda_bytes"] >= 6 * 3 * 4


def test_an_overflow_in_half_precision_is_reported(make):
    debugger, model = make(enable_anomaly_detection=True), small_model().cuda().half()
    with torch.no_grad():
        model[2].weight.fill_(60000.0)
    with debugger.anomaly_detection(), torch.no_grad():
        model(torch.full((2, 4), 100.0, device="cuda").half())
    assert "inf_forward_detected" in kinds(debugger)


def test_cuda_memory_is_in_the_snapshots(make):
    debugger = make(enable_memory_tracking=True)
    torch.ones(1, device="cuda")
    with debugger.memory_tracking():
        held = torch.ones(120 << 20, dtype=torch.uint8, device="cuda")
    assert debugger.memory_snapshots[-1]["cuda_allocated"] >= held.nbytes
    assert "excessive_memory_detected" in kinds(debugger)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_an_infinite_gradient_on_the_device_is_reported(make):
    debugger, model = make(enable_anomaly_detection=True), nn.Linear(4, 1).cuda()
    with debugger.anomaly_detection():
        model(torch.ones(2, 4, device="cuda")).sum().backward(torch.tensor(math.inf, device="cuda"))
    assert "inf_gradient_detected" in kinds(debugger)
