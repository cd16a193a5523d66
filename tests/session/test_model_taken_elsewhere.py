"""A watched model is still an ordinary model: it can be saved, copied and traced in the middle of a training."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import sonde
from sonde.testing import MemorySink, tiny_mlp


@pytest.fixture
def watched(tmp_path):
    torch.manual_seed(0)
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(5, 8)), torch.randint(0, 4, (5,))).backward()
            optimizer.step()
        yield model, session


def test_it_can_be_saved_whole(watched):
    model, _ = watched
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 8)
    assert torch.equal(loaded(x), model(x))


def test_a_copy_is_not_watched(watched, tmp_path):
    model, session = watched
    before = session.current_step
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        twin(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    assert session.current_step == before
    assert session.flush()
    assert sonde.open_run(tmp_path / "run").steps[-1] == before


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_it_can_be_traced_without_a_warning_about_us(watched):
    model, _ = watched
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, x)
    unwatched = torch.jit.trace(copy.deepcopy(model), x)
    assert str(traced.inlined_graph).count("aten::") == str(unwatched.inlined_graph).count("aten::")
    assert torch.equal(traced(x), model(x))


@pytest.mark.parametrize("on_error", ["isolate", "raise"])
def test_a_closed_session_holds_neither_model_nor_optimizer(tmp_path, on_error):
    model = tiny_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with sonde.watch(model, optimizer, run=tmp_path / "run", guard="skip", on_error=on_error) as session:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(5, 8)), torch.randint(0, 4, (5,))).backward()
            optimizer.step()
    gone = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert session.current_step == 3


def test_gradients_of_samples_and_tracing_leave_the_step_recorded(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 8)

    def loss_of_one(parameters, one):
        return torch.func.functional_call(model, parameters, (one,)).square().mean()

    sink = MemorySink()
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        session.subscribe(sink)
        for _ in range(3):
            parameters = {name: each.detach() for name, each in model.named_parameters()}
            torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))(parameters, x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.jit.trace(model, x)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for key in ("0:output", "2:output", "0.weight:gradient"):
        assert list(sink.readings(key)) == [1, 2, 3], key
    assert sink.readings("0:output")[2].count == 5 * 16
    assert {reading.mean for reading in sink.readings("(loop):vital.forwards").values()} == {1.0}
