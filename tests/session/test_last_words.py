"""What a session says when it ends, and when another one begins."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.nn.functional as F
from tests.waiting import PATIENCE_S
from torch import nn

import sonde


def train(path, *, clears):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with sonde.watch(model, optimizer, run=path) as session:
        for _ in range(12):
            x = torch.randn(16, 8)
            if clears:
                optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    return session


def test_findings_are_reported_when_the_run_ends_even_if_never_asked_for(tmp_path, caplog):
    train(tmp_path / "ill", clears=False)
    (told,) = [each.getMessage() for each in caplog.records if each.name == "sonde"]
    assert told.startswith(f"found in {tmp_path / 'ill'}: missing_zero_grad (critical)")
    assert told.endswith(f"Run: sonde diagnose {tmp_path / 'ill'}")


def test_a_sound_run_ends_in_silence(tmp_path, caplog):
    assert train(tmp_path / "well", clears=True).findings == []
    assert not caplog.records


def test_a_forgotten_session_is_named_when_its_model_is_watched_again(tmp_path, caplog):
    model = nn.Linear(2, 2)
    first = sonde.watch(model, run=tmp_path / "cell-*")
    again = sonde.watch(model, run=tmp_path / "cell-*")
    (told,) = [each.getMessage() for each in caplog.records]
    assert f"watched already, by a session that writes {tmp_path / 'cell-1'}" in told
    first.close()
    again.close()
    assert first.is_closed
    caplog.clear()
    sonde.watch(model, run=tmp_path / "cell-*").close()
    assert not caplog.records


def test_a_session_that_is_not_kept_leaves_a_whole_run_and_reports_what_was_found(tmp_path):
    code = """
import sys, torch, sonde
torch.set_num_threads(1)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sonde.watch(model, optimizer, run=sys.argv[1])
for _ in range(6):
    x = torch.randn(16, 8)
    torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    optimizer.step()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    run = sonde.open_run(tmp_path / "run")
    assert (run.status, run.steps.tolist()[-1]) == ("finished", 6)
    assert "missing_zero_grad (critical)" in ended.stderr
