"""What is held until a step ends stays within the bounds that are stated, and no hook of the program runs for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.forensics import keeper, traps

WIDTH = 64


class Deep(nn.Module):
    """Returns all its hidden states, as language models do when asked."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x):
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            states.append(x)
        return x, tuple(states[:-1])


def live_bytes():
    """Return the bytes of all storages that Python knows a tensor of."""
    gc.collect()
    tensors = [
        each
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided and each.device.type == "cpu"
    ]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def train_deep(micro_batches, look, watch=None):
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = watch(model, optimizer) if watch else None
    for _ in range(2):
        for _ in range(micro_batches):
            out, states = model(torch.randn(32, WIDTH))
            loss = (out + 2).log().sum() + states[3].pow(2).mean()
            del out, states
            loss.backward()
        found = look(session)
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.close()
    return found


def watching(tmp_path, **options):
    return lambda *args: sonde.watch(*args, run=tmp_path / "run", on_error="raise", **options)


def kept_passes(session):
    return session._pipeline.forensics.watcher.keeper.passes


ONE = 32 * WIDTH * 4  # the bytes of one gradient at an output


@pytest.mark.parametrize(
    ("bound", "by_pass"),
    [(100 * ONE, [12] * 6), (30 * ONE, [0, 0, 0, 0, 12, 12]), (5 * ONE, [0, 0, 0, 0, 0, 5])],
)
def test_gradients_at_outputs_share_one_bound_and_the_last_pass_comes_first(bound, by_pass, tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_GRADIENT_BYTES", bound)

    def look(session):
        return [
            (sum(gradient.untyped_storage().nbytes() for gradient in kept.gradients.values()), kept.lacks_gradients)
            for kept in kept_passes(session)
        ]

    held = train_deep(6, look, watching(tmp_path, what=["gradients"]))
    assert sum(size for size, _ in held) <= bound
    assert [size // ONE for size, _ in held] == by_pass
    assert [lacks for _, lacks in held] == [count < 12 for count in by_pass]


def test_what_is_held_in_all_adds_up_to_what_is_stated(tmp_path, monkeypatch):
    """Live tensors of a watched program just before it steps, less those of the same program alone."""
    inputs, gradients, small = 3 * ONE, 20 * ONE, 2 * ONE
    monkeypatch.setattr(keeper, "MAX_INPUT_BYTES", inputs)
    monkeypatch.setattr(keeper, "MAX_GRADIENT_BYTES", gradients)
    monkeypatch.setattr(traps, "MAX_BYTES", small)
    alone = train_deep(8, lambda _: live_bytes())
    watched = train_deep(
        8, lambda _: live_bytes(), watching(tmp_path, what=["gradients"], diagnose=False, guard="skip")
    )
    states_of_generators = 9 * 8 << 10
    bound = inputs + gradients + small + ONE + states_of_generators
    assert ONE * 20 < watched - alone <= bound


def test_the_bounds_are_those_that_the_pages_state():
    assert keeper.MAX_GRADIENT_BYTES == 64 << 20
    assert keeper.MAX_INPUT_BYTES == 256 << 20
    assert traps.MAX_BYTES == 16 << 20
    assert "64 MB" in keeper.__doc__
    assert "256 MB" in keeper.__doc__
    assert "16 MB" in traps.__doc__


def test_slices_of_one_batch_are_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_INPUT_BYTES", 5 * ONE)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for part in torch.randn(4 * 32, WIDTH).chunk(4):
            model(part).sum().backward()
        assert len(kept_passes(session)) == 4
        optimizer.step()
        for _ in range(8):
            model(torch.randn(32, WIDTH)).sum().backward()
        assert len(kept_passes(session)) == 6


class Activation:
    """What a graph saved, so that its end can be seen."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_an_input_is_held_without_the_graph_that_computed_it(tmp_path):
    """Whoever evaluates without `no_grad` never runs the backward that would free it."""
    saved = []

    def pack(tensor):
        packed = Activation(tensor)
        saved.append(weakref.ref(packed))
        return packed

    encoder, decoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    with sonde.watch(decoder, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for by_name in (False, True):
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each.tensor):
                features = encoder(torch.randn(3, 4))
            out = decoder(input=features) if by_name else decoder(features)
            assert any(each() is not None for each in saved)
            del features, out
            gc.collect()
            assert len(kept_passes(session)) == 1, "nothing came of the first"
            assert all(each() is None for each in saved)
        assert all(tensor.requires_grad for kept in kept_passes(session) for _, tensor in kept.inputs)


def test_an_input_that_the_program_computed_is_traced_to_its_operation(reported):
    def program(watch):
        decoder = nn.Linear(4, 1)
        scale = nn.Parameter(torch.full((4,), -1.0))
        optimizer = torch.optim.SGD([*decoder.parameters(), scale], lr=0.1)
        with watch(decoder, optimizer):
            decoder(torch.log(scale * torch.ones(3, 4))).sum().backward()
            optimizer.step()

    (found,) = reported(program)
    assert found.data["origin"]["call"] == "log"
    assert found.data["origin"]["stage"] == "loss"


def test_a_parameter_that_the_model_returns_gathers_no_hooks(tmp_path):
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 2))

        def forward(self):
            return self.weight, self.weight * 2

    model = Embeddings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", what=["gradients"]):
        for _ in range(3):
            optimizer.zero_grad()
            sum(each.pow(2).sum() for each in model()).backward()
            optimizer.step()
            assert not model.weight._backward_hooks


# ---------------------------------------------------------------------- hooks of the program


def checkpointed(counts):
    def chunk(x):
        counts["chunk"] += 1
        return torch.log(x.sigmoid() + 1).sqrt().sum() / (x.abs().sum() + 1) + (x.exp() + 1).rsqrt().sum()

    def loss(out):
        return sum(checkpoint(chunk, part, use_reentrant=False) for part in out.chunk(2))

    return loss


def hooked(counts):
    def pack(tensor):
        counts["pack"] += 1
        return tensor

    def unpack(tensor):
        counts["unpack"] += 1
        return tensor

    def loss(out):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return (out.sigmoid().log() + (out.exp() + 1).sqrt() / (out.abs() + 1)).mean()

    return loss


@pytest.mark.parametrize("kind", [checkpointed, hooked])
@pytest.mark.parametrize("guard", [None, "skip"])
def test_no_hook_on_saved_tensors_runs_more_often_than_without_watching(kind, guard, tmp_path):
    def train(watch):
        counts = dict.fromkeys(("chunk", "pack", "unpack"), 0)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss_fn = kind(counts)
        session = watch(model, optimizer) if watch else None
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(model(torch.randn(4, 6))).backward()
            optimizer.step()
        if session is not None:
            session.close()
        return counts, [each.detach().clone() for each in model.parameters()]

    counts, weights = train(watching(tmp_path, guard=guard))
    bare_counts, bare_weights = train(None)
    assert any(bare_counts.values())
    assert counts == bare_counts
    assert all(torch.equal(one, two) for one, two in zip(weights, bare_weights, strict=True))


def test_a_checkpointed_loss_is_not_computed_again_even_when_it_is_not_finite(reported):
    """It is checkpointed because it does not fit into memory as a whole."""
    counts = {"chunk": 0}

    def chunk(x):
        counts["chunk"] += 1
        return torch.log(x.sigmoid() - 1).sum()

    def program(watch):
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer):
            out = model(torch.randn(4, 6))
            sum(checkpoint(chunk, part, use_reentrant=False) for part in out.chunk(4)).backward()
            optimizer.step()

    (found,) = reported(program)
    assert counts["chunk"] == 8  # forward, and again in the backward
    assert found.kind == "nan_in_loss"
    assert found.fix.startswith("Look at the code between the model's output and backward()")


def test_a_tensor_that_was_written_over_where_no_backward_comes_by_is_left_alone(tmp_path):
    """To read it is an error of torch's; the program's own backward stays out of that branch."""
    model = nn.Linear(3, 2)
    other = torch.rand(4, 2, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
        for _ in range(2):
            optimizer.zero_grad()
            out = model(torch.rand(4, 3))
            spoilt = other.exp()
            loss = out.sum() + spoilt.log().sum()
            spoilt.detach().zero_()
            loss.backward(inputs=list(model.parameters()))
            optimizer.step()


def tails_of(session):
    return session._pipeline.forensics.watcher._tails._tails


def test_what_is_remembered_of_losses_shares_one_bound(tmp_path, monkeypatch):
    one = 32 * WIDTH * 4
    monkeypatch.setattr(traps, "MAX_BYTES", 5 * one)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        for _ in range(6):
            out = model(torch.randn(32, WIDTH)).sigmoid()
            (out.log() + (out + 1).log()).sum().backward()  # keeps two tensors
        held = [sum(tail.storages.values()) for tail in tails_of(session)]
        assert held == [2 * one, 2 * one]
        out = model(torch.randn(32, WIDTH)).sigmoid()
        sum((out + shift).log().sum() for shift in range(9)).backward()
        assert sum(sum(tail.storages.values()) for tail in tails_of(session)) == 5 * one
        optimizer.step()
        assert not tails_of(session)


def test_a_small_view_of_a_large_tensor_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(traps, "MAX_TENSOR_BYTES", 1 << 10)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        F.softplus(model(torch.randn(32, WIDTH)))[:, 0].log().sum().backward()
        assert [sum(tail.storages.values()) for tail in tails_of(session)] == [0]
        (F.softplus(model(torch.randn(32, WIDTH)))[:, 0] * 1).log().sum().backward()
        assert [sum(tail.storages.values()) for tail in tails_of(session)] == [0, 32 * 4]
