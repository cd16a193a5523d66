"""`sonde replay`: what builds the model is the user's own file."""

import sys

import pytest
import torch

import sonde as library

SCRIPT = """
import torch, sonde

def build():
    return torch.nn.Linear(3, 1)

{rest}
"""


@pytest.fixture
def ill(tmp_path, monkeypatch):
    """A run with a bundle of a step whose batch was infinite, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with library.watch(model, optimizer, run="runs/ill"):
        model(torch.full((2, 3), torch.inf)).mean().backward()
        optimizer.step()
    return "runs/ill"


def test_a_step_is_repeated_with_what_the_file_builds(sonde, ill, tmp_path):
    (tmp_path / "guarded_script.py").write_text(SCRIPT.format(rest=""))
    result = sonde("replay", ill, "--model", "guarded_script:build")
    assert result.exit_code == 0, result.stderr
    assert "step 1: confirmed" in result.stdout
    wrong = sonde("replay", ill, "--model", "guarded_script:biuld")
    assert wrong.exit_code == 2
    assert "(nearest: build)" in wrong.stderr


def test_a_file_that_trains_when_it_is_imported_gets_advice(sonde, ill, tmp_path):
    rest = "sonde.watch(build(), run='runs/ill')"
    (tmp_path / "bare_script.py").write_text(SCRIPT.format(rest=rest))
    result = sonde("replay", ill, "--model", "bare_script:build")
    assert result.exit_code == 2
    assert "runs/ill holds a run already" in result.stderr
    assert "if __name__ == '__main__':" in result.stderr
