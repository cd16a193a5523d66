"""What kind of optimizer, wrapper and layout an object is, checked against what the objects really do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sonde.core.facts import Facts, OptimizerFacts, optimizer_traits
from sonde.hooks.names import is_wrapper, named_parameters, unwrap
from sonde.record.kinds import is_compiled, is_sharded, needs_other_ranks, see_through, step_count, traits_of
from sonde.testing import tiny_mlp

OPTIMIZERS = [
    each
    for name in sorted(torch.optim.__all__ if hasattr(torch.optim, "__all__") else dir(torch.optim))
    if isinstance(each := getattr(torch.optim, name), type)
    and issubclass(each, torch.optim.Optimizer)
    and each not in (torch.optim.Optimizer, torch.optim.SparseAdam)
]


def one_step(kind, gradient):
    """Return how far a fresh optimizer moves weights of 1 by a gradient."""
    parameter = nn.Parameter(torch.ones_like(gradient))
    options = {} if kind.__name__ == "Rprop" else {"weight_decay": 0.0} if takes(kind, "weight_decay") else {}
    optimizer = kind([parameter], lr=1e-3, **options)
    for _ in range(8):  # RAdam adapts from its sixth step on
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step(lambda: (parameter * gradient).sum())
    return parameter.detach() - before


def takes(kind, option):
    return option in kind.__init__.__code__.co_varnames


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_an_optimizer_is_adaptive_if_a_larger_gradient_makes_no_larger_step(kind):
    optimizer = kind([nn.Parameter(torch.ones(2, 2))])
    if traits_of(optimizer).searches:
        return  # it chooses the length of its steps by the loss
    gradient = torch.tensor([[0.3, -0.2], [0.1, 0.4]])
    ratio = float((one_step(kind, 100 * gradient).norm() / one_step(kind, gradient).norm()).detach())
    assert traits_of(optimizer).adaptive is (ratio < 2), ratio


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_an_even_first_step_moves_every_element_by_the_rate(kind):
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([parameter], lr=1e-3)
    if not traits_of(optimizer).even_first_step:
        return
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    parameter.grad = torch.tensor([[0.3, -0.2], [0.1, 0.4]])
    optimizer.step()
    moved = (parameter.detach() - 1).abs()
    assert torch.allclose(moved, moved[0, 0].expand(2, 2), rtol=1e-3)


@pytest.mark.parametrize("kind", [each for each in OPTIMIZERS if takes(each, "weight_decay")], ids=lambda k: k.__name__)
def test_decoupled_decay_shrinks_a_weight_by_rate_times_decay_whatever_the_gradient(kind):
    def shrinks(size):
        pair = [nn.Parameter(torch.full((2, 2), 3.0)) for _ in range(2)]
        for parameter, decay in zip(pair, (0.0, 0.1), strict=True):
            optimizer = kind([parameter], lr=1e-3, weight_decay=decay)
            for _ in range(8):
                parameter.grad = torch.full((2, 2), size)
                optimizer.step()
        return float((pair[0] - pair[1]).detach().mean()) / 8

    traits = traits_of(kind([nn.Parameter(torch.ones(2, 2))]))
    by_the_rate = all(shrinks(size) == pytest.approx(1e-3 * 0.1 * 3, rel=0.05) for size in (0.1, 10.0))
    if traits.adaptive:  # a plain step does the same whether or not the decay is in the gradient
        assert traits.decoupled_decay is by_the_rate


def test_a_subclass_has_the_traits_of_what_it_is_made_from():
    class Ours(torch.optim.AdamW):
        pass

    traits = traits_of(Ours([nn.Parameter(torch.ones(1))]))
    assert (traits.adaptive, traits.adam, traits.decoupled_decay) == (True, True, True)


def test_traits_travel_with_the_facts_and_follow_from_the_name_in_older_runs():
    traits = traits_of(torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9, fused=True))
    assert traits.late_momentum
    facts = Facts(optimizers=(OptimizerFacts(name="optimizer", kind="Mine", recorded_traits=traits),))
    assert Facts.from_json(facts.to_json()).optimizers[0].traits == traits
    plain = facts.to_json()
    del plain["optimizers"][0]["recorded_traits"]
    plain["optimizers"][0]["kind"] = "Adam"
    assert Facts.from_json(plain).optimizers[0].traits == optimizer_traits(["Adam"], [])


def test_the_step_count_is_read_where_there_is_one():
    parameter = nn.Parameter(torch.ones(2))
    adam, sgd = torch.optim.Adam([parameter]), torch.optim.SGD([parameter], lr=0.1)
    assert step_count(adam, parameter) is None
    for _ in range(3):
        parameter.grad = torch.ones(2)
        adam.step()
        sgd.step()
    assert step_count(adam, parameter) == 3
    assert step_count(sgd, parameter) is None


class Wrapper:
    def __init__(self, **inside):
        vars(self).update(inside)

    def step(self):
        """Stands for a step that is handed on."""


def test_optimizers_are_found_inside_objects_lists_dicts_and_other_wrappers():
    one, two = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    for holder in (Wrapper(o=one), Wrapper(inner=Wrapper(o=one)), Wrapper(all=[one]), Wrapper(by={"a": one})):
        given = see_through([holder])
        assert (given.optimizers, given.wrappers, given.opaque) == ([one], [holder], [])
    assert see_through([Wrapper(a=one, b=two)]).optimizers == [one, two]
    assert see_through([one, two]).optimizers == [one, two]


def test_an_object_that_holds_itself_is_looked_into_once():
    holder = Wrapper()
    holder.me = Wrapper(back=holder)
    assert see_through([holder]).opaque == [holder]


def test_an_optimizer_that_steps_more_than_the_one_inside_is_taken_itself():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    outer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    outer.other = inner
    assert see_through([outer]).optimizers == [outer]
    around = torch.optim.SGD(inner.param_groups[0]["params"])
    around.base = inner
    assert see_through([around]).optimizers == [inner]


def test_an_optimizer_without_the_hooks_of_torch_cannot_be_seen_through():
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

        def step(self):
            """Would step."""

    bare = Bare([nn.Parameter(torch.ones(1))])
    assert see_through([bare]).opaque == [bare]


def test_wrappers_are_looked_through_as_far_as_asked():
    model = tiny_mlp()
    compiled = torch.compile(model, backend="eager")
    parallel = nn.DataParallel(compiled)
    assert unwrap(parallel) is model
    assert unwrap(parallel, also_compiled=False) is compiled
    assert (is_compiled(compiled), is_compiled(parallel), is_compiled(model)) == (True, False, False)
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    assert is_compiled(in_place)


def test_fabrics_wrapper_leaves_names_as_the_user_wrote_them():
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    fabric = pytest.importorskip("lightning.fabric")
    model = tiny_mlp()
    wrapped = wrappers._FabricModule(model, fabric.Fabric(accelerator="cpu", devices=1).strategy)
    assert is_wrapper(wrapped)
    assert unwrap(wrapped) is model
    assert [name for name, _, _ in named_parameters({"": wrapped})] == [name for name, _ in model.named_parameters()]


def test_what_one_process_can_run_alone_needs_no_other_ranks():
    assert not needs_other_ranks(tiny_mlp())
    assert needs_other_ranks(nn.Sequential(nn.SyncBatchNorm(2)))
    assert not is_sharded(torch.ones(1))
