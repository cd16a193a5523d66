"""Graphs that a program keeps from step to step, beside programs that keep numbers or the last step only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.core import signals
from sonde.record.governor import SENSORS_ALWAYS
from sonde.sensors.loop import MAX_GRAPHS

STEPS = 60
KEY = f"(loop):vital.{signals.GRAPHS_KEPT}"


def keeps_losses(kept, output, loss):
    kept.append(loss)


def sums_losses(kept, output, loss):
    kept[:] = [sum(kept) + loss]


def keeps_outputs(kept, output, loss):
    kept.append(output)


def keeps_numbers(kept, output, loss):
    kept.append(loss.item())


def keeps_detached_outputs(kept, output, loss):
    kept.append(output.detach())


def keeps_the_last_losses(kept, output, loss):
    kept[:] = [*kept, loss][-10:]


def train(folder, keep, scale=1.0, steps=STEPS):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    kept = []
    with sonde.watch(net, optimizer, run=folder / "run", on_error="raise", budget=None) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            output = net(torch.randn(6, 4))
            loss = F.cross_entropy(output, torch.randint(3, (6,)))
            (loss * scale).backward()
            optimizer.step()
            keep(kept, output, loss)
    counts = sonde.open_run(folder / "run").series(KEY, "mean").values
    return counts, {finding.kind: finding for finding in session.findings}


@pytest.mark.parametrize("keep", [keeps_losses, sums_losses, keeps_outputs])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_graphs_that_are_kept_are_counted_and_reported(tmp_path, keep, scale):
    counts, found = train(tmp_path, keep, scale)
    assert counts.tolist() == list(range(STEPS))
    assert found["retained_graph_leak"].exact
    assert found["retained_graph_leak"].step == 1


@pytest.mark.parametrize(
    ("keep", "most"), [(keeps_numbers, 0), (keeps_detached_outputs, 0), (keeps_the_last_losses, 10)]
)
def test_what_holds_no_graph_is_not_counted_and_a_few_graphs_are_not_reported(tmp_path, keep, most):
    counts, found = train(tmp_path, keep)
    assert counts.max() == most
    assert "retained_graph_leak" not in found


def test_graphs_are_counted_among_the_last_steps_only(tmp_path):
    counts, _ = train(tmp_path, keeps_losses, steps=MAX_GRAPHS + 100)
    assert counts[:SENSORS_ALWAYS].tolist() == [*range(MAX_GRAPHS)][:SENSORS_ALWAYS]
    assert counts[-1] == counts.max() == MAX_GRAPHS


def test_a_graph_counts_until_it_is_freed(tmp_path):
    def keeps_the_first_for_a_while(kept, output, loss):
        if len(kept) < 20:
            kept.append(None if kept else loss)
        else:
            kept[0] = None

    counts, _ = train(tmp_path, keeps_the_first_for_a_while, steps=30)
    assert counts.tolist() == [0, *[1] * 20, *[0] * 9]
