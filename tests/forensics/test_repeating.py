"""Repeating a pass: gradients come out as they were, and no other process is ever left waiting for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sonde
from sonde.errors import OptionError
from sonde.forensics import keeper
from sonde.forensics.repeat import repeat
from sonde.forensics.values import badness
from sonde.record.kinds import needs_other_ranks


class Branching(nn.Module):
    """Returns what its outputs are made of, too; once twice."""

    def __init__(self, middle=torch.tanh):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.middle = middle

    def forward(self, x):
        h = self.fc(x)
        out = self.head(self.middle(h))
        return {"out": out, "hidden": h, "again": out}


def test_gradients_at_outputs_that_lead_to_each_other_count_once(tmp_path):
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        found = model(torch.randn(5, 3))
        (found["out"].pow(2).sum() + found["hidden"].pow(3).mean() + found["again"].sum()).backward()
        (kept,) = session._pipeline.forensics.watcher.keeper.passes
        repeated = dict(repeat(kept, {}, backward=True).gradients)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(repeated[name], parameter.grad, rtol=1e-6, atol=1e-7)
            assert not parameter._backward_hooks


def sqrt_of_zero(h):
    return torch.sqrt(h * 0)


def test_a_derivative_inside_the_model_is_not_taken_for_the_losss_because_an_inner_tensor_is_returned(reported):
    def program(watch):
        model = Branching(sqrt_of_zero)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer):
            model(torch.randn(5, 3))["out"].sum().backward()
            optimizer.step()

    (found,) = reported(program)
    assert found.kind == "nan_backward"
    assert found.data["origin"]["node"] == "SqrtBackward0"
    assert found.data["origin"]["line"]["text"].startswith("return torch.sqrt(h * 0)")


def test_a_loss_whose_derivative_is_bad_at_an_inner_tensor_is_still_distinguished_from_the_model(reported):
    def program(watch):
        model = Branching()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer):
            found = model(torch.randn(5, 3))
            (found["out"].sum() + (found["hidden"] * 0).sqrt().sum()).backward()
            optimizer.step()

    (found,) = reported(program)
    assert found.data["origin"]["node"] == "SqrtBackward0"
    assert "sqrt()" in found.data["origin"]["line"]["text"]


@pytest.mark.usefixtures("as_if_on_a_device")
def test_an_operation_of_the_forward_is_named_even_where_gradients_were_too_large_to_keep(reported, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_GRADIENT_BYTES", 8)

    def program(watch):
        model = Branching(torch.log)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer):
            F.mse_loss(model(torch.randn(5, 3))["out"], torch.ones(5, 2)).backward()
            optimizer.step()

    (found,) = reported(program, guard="skip")
    assert found.data["origin"]["op"] == "aten.log.default"


# ---------------------------------------------------------------------- other processes


@pytest.fixture
def one_rank():
    """A group of one rank, without a network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Talking(nn.Module):
    """Asks the other ranks for something in its forward, as contrastive models do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.arrived = 0

    def forward(self, x):
        total = x.detach().sum()
        dist.all_reduce(total)
        self.arrived += 1
        return torch.log(self.fc(x) * 0 + total * 0 - 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("guard", [None, "skip"])
def test_a_forward_that_talks_to_other_ranks_is_not_repeated(guard, reported, tmp_path):
    model = Talking()

    def program(watch):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer) as session:
            loss = model(torch.randn(4, 3)).sum()
            with pytest.raises(OptionError, match="talks to other processes"):
                session.save_bundle()
            loss.backward()
            optimizer.step()

    found = reported(program, guard=guard)
    assert model.arrived == 1
    assert not list((tmp_path / "run").glob("bundles/*"))
    assert found
    assert all(not each.data["origin"].get("module") for each in found), "it says no more than it knows"


def test_a_sharded_model_is_neither_repeated_nor_asked_with_a_collective(one_rank, tmp_path, monkeypatch):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=one_rank)
    assert needs_other_ranks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise", guard="skip") as session:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        before = [each.to_local().detach().clone() for each in model.parameters()]
        optimizer.zero_grad()
        model(torch.full((2, 3), float("nan"))).sum().backward()
        with pytest.raises(OptionError, match="talks to other processes"):
            session.save_bundle()
        gradients = [each.grad for each in model.parameters()]
        for name in ("full_tensor", "redistribute"):
            monkeypatch.setattr(type(gradients[0]), name, None)  # what needs the other ranks
        assert all(badness(each) for each in gradients[:1])
        optimizer.step()
        assert all(torch.equal(one, two.to_local()) for one, two in zip(before, model.parameters(), strict=True))
    assert [each for each in session.findings if "origin" in each.data]
    assert not list((tmp_path / "run" / "bundles").glob("*"))


def test_one_rank_alone_looks_into_its_shard_while_the_other_trains_on(run_two_ranks, tmp_path):
    """Whatever one rank asks of the other here would be answered by another question, or never."""
    run_two_ranks(
        "import sonde\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard",
        """
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
for module in (model[0], model):
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with sonde.watch(model, optimizer, run=f"{folder}/{rank}", on_error="raise", guard="skip") as session:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.rand(2, 4)).sum().backward()
        if rank == 1 and step == 1:
            model[0].weight.grad.to_local().fill_(float("nan"))
        optimizer.step()
assert all(torch.isfinite(each.to_local()).all() for each in model.parameters())
assert any("origin" in each.data for each in session.findings) == (rank == 1)
""",
        tmp_path,
    )


def test_an_update_of_a_shard_is_described_by_what_lies_here(one_rank, tmp_path, monkeypatch):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    fully_shard(model, mesh=one_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        model(torch.rand(2, 3)).sum().backward()
        for name in ("full_tensor", "redistribute"):
            monkeypatch.setattr(type(model.weight), name, None)
        optimizer.step()
    (found,) = [each for each in session.findings if each.kind == "nan_in_optimizer"]
    assert (found.data["origin"]["count"], found.data["origin"]["total"]) == (3, 3)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_a_wrapper_that_shards_a_model_from_outside_is_known_by_its_mark():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    wrapped = fsdp.FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 1)), device_id=torch.device("cpu"))
    assert needs_other_ranks(wrapped.module)
    assert not needs_other_ranks(nn.Sequential(nn.Linear(3, 1)))
