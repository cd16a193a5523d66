"""The plugin of pytest: a test that trains fails with the finding."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from tests.waiting import PATIENCE_S

from sonde.integrations.pytest import TestWatcher

pytest_plugins = ["pytester"]

HEAD = """
import pytest, torch
import torch.nn.functional as F

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)

def make(*more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3), *more)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)

def train(model, optimizer, clear=True, steps=12):
    for step in range(steps):
        a, b = list(loader)[step % 4]
        if clear:
            optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
"""
LOADED = any(each.value == "sonde.integrations.pytest" for each in entry_points(group="pytest11"))


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the tests in a piece of code with the plugin, in a process: torch cannot be imported twice into one."""
    for variable in ("CI", "BUILD_NUMBER"):  # with these pytest repeats every message in its summary
        monkeypatch.delenv(variable, raising=False)

    def start(code, *options):
        pytester.makepyfile(HEAD + code)
        loaded = () if LOADED else ("-p", "sonde.integrations.pytest")
        return pytester.runpytest_subprocess(
            *loaded, "-p", "no:cacheprovider", "--strict-markers", *options, timeout=PATIENCE_S
        )

    return start


def test_a_test_fails_with_the_cause_the_evidence_and_the_fix(run):
    result = run(
        """
def test_healthy(sonde):
    model, optimizer = make()
    with sonde.watch(model, optimizer):
        train(model, optimizer)

def test_ill(sonde):
    model, optimizer = make()
    with sonde.watch(model, optimizer):
        train(model, optimizer, clear=False)

def test_left_open(sonde):
    model, optimizer = make()
    sonde.watch(model, optimizer)
    train(model, optimizer, clear=False)

@pytest.mark.sonde(allow=["missing_zero_grad"])
def test_allowed(sonde):
    model, optimizer = make()
    with sonde.watch(model, optimizer):
        train(model, optimizer, clear=False)

def test_own_failure(sonde):
    model, optimizer = make()
    with sonde.watch(model, optimizer):
        train(model, optimizer, clear=False)
        assert 1 == 2

def test_without_it():
    pass

def test_one_sample_depends_on_another(sonde):
    model, optimizer = make(torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    with sonde.watch(model, optimizer, loss_fn=torch.nn.CrossEntropyLoss(), loader=loader):
        pass
""",
        "--sonde-checkup",
    )
    result.assert_outcomes(passed=3, failed=4)
    result.stdout.fnmatch_lines([
        "Sonde found something wrong:",
        "critical missing_zero_grad",
        "  Gradients are not cleared between steps*",
        "  Fix: Call optimizer.zero_grad() once per step*",
        "  Evidence: *",
        "Run: sonde diagnose *run-1",
        "*assert 1 == 2*",
        "warning norm_on_wrong_dim",
        "  Fix: *",
    ])  # fmt: skip
    assert result.stdout.str().count("Sonde found something wrong") == 3, "a test's own failure is reported as it is"


def test_no_checkup_is_made_unless_asked_for(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3, track_running_stats=False))
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(3, (16,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    watcher = TestWatcher(tmp_path)
    watcher.watch(model, loss_fn=torch.nn.CrossEntropyLoss(), loader=loader)
    watcher.check()
    assert watcher.findings == []


def test_the_plugin_is_registered_and_loads_neither_torch_nor_sonde_until_it_is_used():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nsonde = "sonde.integrations.pytest"' in text
    from tests.architecture.test_without_torch import run_without_torch

    run_without_torch("import sonde.integrations.pytest; assert 'numpy' not in sys.modules")
