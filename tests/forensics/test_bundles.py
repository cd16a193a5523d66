"""Bundles: everything to repeat a step is in the run, safe to open, and repeats it bit for bit."""

from __future__ import annotations

import json
import random
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import sonde
from sonde.cli.main import app
from sonde.errors import OptionError, RunDamaged, RunNotFound
from sonde.forensics.bundle import Packing, unpack
from sonde.testing import tiny_mlp

PROGRAMS = sys.modules["forensics_programs"].PROGRAMS  # made known by conftest.py


def run_program(name, path, **options):
    """Run a program of the collection; return its model."""
    models = []

    def watch(model, optimizer, **more):
        models.append(model)
        return sonde.watch(model, optimizer, run=path, on_error="raise", **more, **options)

    torch.manual_seed(0)
    PROGRAMS[name].run(watch)
    return models[0]


def spoilt(model):
    """The same model with other weights: a bundle must bring its own."""
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.123)
    return model.eval()


@pytest.mark.parametrize(
    "name",
    ["log_of_zero", "fully_masked_multihead", "dropout_then_log", "conv_of_a_flat_image", "lstm_then_log",
     "dict_batch_and_keywords", "under_autocast", "sqrt_backward", "custom_function", "checkpointed_block",
     "accumulated_micro_batches", "nan_in_one_sample", "nan_in_an_embedding", "fp16_matmul",
     "cross_entropy_by_hand", "bce_by_hand_in_a_function", "every_target_ignored", "infinite_target", "distance_loss"],
)  # fmt: skip
def test_a_bundle_confirms_the_operation_bit_for_bit(name, tmp_path):
    model = spoilt(run_program(name, tmp_path / "run"))
    bundle = sonde.load_bundle(tmp_path / "run")
    random.seed(99)
    torch.manual_seed(99)
    drawn = torch.get_rng_state()
    outcome = bundle.replay(model)
    assert outcome.confirmed, outcome.to_json()
    assert outcome.identical is True
    assert torch.equal(torch.get_rng_state(), drawn)
    assert outcome.finding.kind == bundle.finding.kind == PROGRAMS[name].kind
    if PROGRAMS[name].samples is not None:
        assert outcome.finding.data["origin"]["samples"] == PROGRAMS[name].samples


def test_a_repaired_model_is_not_confirmed(tmp_path):
    run_program("functional_model", tmp_path / "run")

    class Repaired(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 1))

        def forward(self, x):
            return torch.log((x @ self.w).clamp_min(1e-6))

    outcome = sonde.load_bundle(tmp_path / "run").replay(Repaired)
    assert not outcome.confirmed
    assert outcome.identical is False
    assert outcome.finding is None


def test_another_model_is_refused_by_name(tmp_path):
    run_program("functional_model", tmp_path / "run")
    with pytest.raises(RunDamaged, match="is not the one of the bundle"):
        sonde.load_bundle(tmp_path / "run").replay(nn.Linear(3, 1))
    with pytest.raises(OptionError, match=r"must be a torch\.nn\.Module"):
        sonde.load_bundle(tmp_path / "run").replay(lambda: 3)


def test_weights_that_do_not_fit_are_left_out_and_that_is_reported(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(600, 600)

        def forward(self, x):
            return torch.log(self.fc(x) * 0)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", max_bundle_mb=1):
        model(torch.randn(2, 600)).sum().backward()
        optimizer.step()
    bundle = sonde.load_bundle(tmp_path / "run")
    assert not bundle.has_weights
    assert bundle.info["left_out"] == "the weights do not fit into 1 MB"
    event = next(event for event in sonde.open_run(tmp_path / "run").events if event.event_type == "bundle")
    assert "without the weights: raise max_bundle_mb" in event.message
    model.load_state_dict(weights)
    assert bundle.replay(model).confirmed


def test_bundles_can_be_switched_off(tmp_path):
    run_program("functional_model", tmp_path / "run", bundles=False)
    assert not (tmp_path / "run" / "bundles").exists()
    with pytest.raises(RunNotFound, match="neither a bundle nor a run with bundles"):
        sonde.load_bundle(tmp_path / "run")


def test_a_bundle_by_hand_repeats_a_healthy_step(tmp_path):
    torch.manual_seed(1)
    np.random.seed(1)
    model = nn.Sequential(tiny_mlp(), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        with pytest.raises(OptionError, match="no training pass to save"):
            session.save_bundle()
        loss = model(torch.randn(4, 8)).sum()
        path = session.save_bundle("a spike")
        loss.backward()
        optimizer.step()
    bundle = sonde.load_bundle(path)
    assert bundle.info["reason"] == "a spike"
    outcome = bundle.replay(spoilt(model))
    assert outcome.identical is True
    assert outcome.finding is None
    tensors = bundle.tensors()
    if sys.platform == "linux":  # a file that is mapped ends the process when it is cut
        assert str(path) not in Path("/proc/self/maps").read_text()
    (path / "tensors.safetensors").write_bytes(b"")
    assert all(torch.isfinite(each.double()).all() for each in tensors.values())


def test_tied_weights_are_saved_once_and_come_back(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens):
            return torch.log(self.out(self.embed(tokens)) * 0)

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    bundle = sonde.load_bundle(tmp_path / "run")
    assert bundle.info["aliases"] == {"out.weight": "embed.weight"}
    assert bundle.replay(spoilt(Tied())).confirmed


def test_a_bundle_holds_no_pickle_and_no_draft_is_left(tmp_path):
    run_program("functional_model", tmp_path / "run")
    folder = sonde.load_bundle(tmp_path / "run").path
    assert sorted(each.name for each in folder.iterdir()) == ["bundle.json", "tensors.safetensors"]
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
    json.loads((folder / "bundle.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.mark.parametrize("damage", ["cut", "other_format", "no_tensors"])
def test_a_damaged_bundle_is_named(damage, tmp_path):
    run_program("functional_model", tmp_path / "run")
    folder = sonde.load_bundle(tmp_path / "run").path
    if damage == "cut":
        (folder / "bundle.json").write_text('{"format": 1, "ste')
    elif damage == "other_format":
        (folder / "bundle.json").write_text('{"format": 99}')
    else:
        (folder / "tensors.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(RunDamaged, match=folder.name):
        sonde.load_bundle(folder).replay(nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"precision": None}, r"\$\.precision"),
        ({"precision": {"device_type": "cpu", "enabled": False, "dtype": "no_such"}}, "no_such"),
        ({"random": {"python": [3, "words", None]}}, r"\$\.random\.python"),
        ({"step": -1}, r"\$\.step"),
        ({"gradients": {"first": "gradient.0"}}, r"\$\.gradients|key in `\$\.gradients`"),
    ],
)
def test_a_bundle_with_a_field_of_another_type_is_refused_by_name(change, says, tmp_path):
    run_program("functional_model", tmp_path / "run")
    folder = sonde.load_bundle(tmp_path / "run").path
    info = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(info | {"weights": False} | change))
    with pytest.raises(RunDamaged, match=says):
        sonde.load_bundle(folder).replay(nn.Linear(3, 1))


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(_plain)
def test_nested_arguments_come_back_as_they_were(value):
    packing = Packing("input")
    packed = json.loads(json.dumps(packing.pack((value, torch.ones(2), torch.float16)), allow_nan=False))
    back = unpack(packed, packing.tensors)
    assert back[0] == value
    assert type(back[0]) is type(value)
    assert back[1].tolist() == [1, 1]
    assert back[2] is torch.float16


def test_what_cannot_be_kept_is_named_when_it_is_needed():
    packing = Packing("input")
    packed = packing.pack([object()])
    assert packing.opaque == ["object"]
    with pytest.raises(RunDamaged, match="could not be kept in the bundle: 'object'"):
        unpack(packed, {})


SCRIPT = """
import torch, sonde, sys
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x):
        return torch.log(self.fc(x) * 0)

def build():
    return Net()

class Fixed(Net):
    def forward(self, x):
        return self.fc(x)

if __name__ == "__main__":
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run="run"):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def test_the_command_line_confirms_denies_and_explains_wrong_use(tmp_path, monkeypatch):
    (tmp_path / "mymodule.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the command looks for modules in the current folder
    monkeypatch.delitem(sys.modules, "mymodule", raising=False)  # and forgets this one afterwards
    runpy.run_path("mymodule.py", run_name="__main__")
    command = [sys.executable, "-m", "sonde", "replay", "run", "--model", "mymodule:build", "--json"]
    good = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)  # as a shell would
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["confirmed"] is True
    assert json.loads(good.stdout)["identical"] is True

    def replay(model):
        return CliRunner().invoke(app, ["replay", "run", "--model", model])

    denied = replay("mymodule:Fixed")
    assert denied.exit_code == 1
    assert "not confirmed" in denied.stdout
    assert "everything is finite" in denied.stdout
    wrong = replay("mymodule:biuld")
    assert wrong.exit_code == 2
    assert "there is no biuld in mymodule" in " ".join(wrong.stderr.split())


def test_bundles_are_few(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x, kind):
            h = self.fc(x)
            return (torch.log, torch.sqrt, torch.acos, torch.rsqrt)[kind](h * 0 - 2)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip"):
        for kind in range(4):
            for x in (torch.ones(2, 2),):
                F.mse_loss(model(x, kind), torch.ones(2, 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
                model.fc(x).sum().backward()  # finite: the training recovers
                optimizer.step()
    assert len(list(Path(tmp_path / "run" / "bundles").iterdir())) == 3
