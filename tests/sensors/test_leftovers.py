"""Left-over gradients: told from versions, checked against an oracle that compares values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.sensors.watching import Watching
from torch import nn

import sonde
from sonde.testing import tiny_mlp


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Oracle:
    """Says of each step which share of the parameters held the old gradient, by comparing values before backwards."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.shares = []
        self.missing = []
        self.stepped = set()
        self._forget()
        optimizer.register_step_pre_hook(lambda *_: self.judge() if not self.in_closure else None)
        optimizer.register_step_post_hook(lambda *_: self.end())
        self.in_closure = False

    def _forget(self):
        self.cleared = set()
        self.reached = set()

    def before_backward(self):
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None or not parameter.grad.any():
                self.cleared.add(index)

    def reach(self, before):
        for index, parameter in enumerate(self.parameters):
            now = parameter.grad
            if now is not None and (before[index] is None or not torch.equal(before[index], now)):
                self.reached.add(index)

    def judge(self):
        told = self.stepped & self.reached
        left = told - self.cleared
        self.shares.append(len(left) / len(told) if told else None)
        grads = [parameter.grad for parameter in self.parameters]
        self.missing.append(sum(grad is None or not grad.any() for grad in grads))

    def end(self):
        if self.in_closure:
            self.judge()
        self.stepped |= {index for index, parameter in enumerate(self.parameters) if parameter.grad is not None}
        self._forget()

    def backward(self, loss, **options):
        self.before_backward()
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        loss.backward(**options)
        self.reach(before)


def make(**options):
    model = tiny_mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, **options)


def loss_of(model):
    return F.cross_entropy(model(torch.randn(8, 8)), torch.randint(4, (8,)))


def never(model, optimizer, oracle):
    oracle.backward(loss_of(model))
    optimizer.step()


def first(model, optimizer, oracle):
    optimizer.zero_grad()
    never(model, optimizer, oracle)


def between(model, optimizer, oracle):
    loss = loss_of(model)
    optimizer.zero_grad()
    oracle.backward(loss)
    optimizer.step()


def last(model, optimizer, oracle):
    never(model, optimizer, oracle)
    optimizer.zero_grad()


def in_place(model, optimizer, oracle):
    optimizer.zero_grad(set_to_none=False)
    never(model, optimizer, oracle)


def in_place_last(model, optimizer, oracle):
    never(model, optimizer, oracle)
    optimizer.zero_grad(set_to_none=False)


def by_data(model, optimizer, oracle):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()
    never(model, optimizer, oracle)


def by_hand(model, optimizer, oracle):
    for parameter in model.parameters():
        parameter.grad = None
    never(model, optimizer, oracle)


def half(model, optimizer, oracle):
    model[0].zero_grad()
    never(model, optimizer, oracle)


def accumulated(model, optimizer, oracle):
    optimizer.zero_grad()
    for _ in range(3):
        oracle.backward(loss_of(model) / 3)
    optimizer.step()


def accumulated_never(model, optimizer, oracle):
    for _ in range(3):
        oracle.backward(loss_of(model) / 3)
    optimizer.step()


def clipped(model, optimizer, oracle):
    optimizer.zero_grad()
    oracle.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clipped_never(model, optimizer, oracle):
    oracle.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clipped_each_time_never(model, optimizer, oracle):
    for _ in range(2):
        oracle.backward(loss_of(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def scaled_by_hand(model, optimizer, oracle):
    optimizer.zero_grad()
    oracle.backward(loss_of(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
    optimizer.step()


def scaled_by_hand_never(model, optimizer, oracle):
    oracle.backward(loss_of(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
    optimizer.step()


def two_roots(model, optimizer, oracle):
    optimizer.zero_grad()
    out = model(torch.randn(8, 8))
    oracle.backward(out.square().mean(), retain_graph=True)
    oracle.backward(out.sum())
    optimizer.step()


def other_backward_first(model, optimizer, oracle):
    oracle.backward(loss_of(model))  # that of another network, which reaches these parameters
    first(model, optimizer, oracle)


PROGRAMS = [
    never,
    first,
    between,
    last,
    in_place,
    in_place_last,
    by_data,
    by_hand,
    half,
    accumulated,
    accumulated_never,
    clipped,
    clipped_never,
    clipped_each_time_never,
    scaled_by_hand,
    scaled_by_hand_never,
    two_roots,
    other_backward_first,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True, "momentum": 0.9}], ids=["plain", "fused"])
def test_the_share_of_gradients_left_over_is_that_of_a_comparison_by_value(tmp_path, program, options):
    model, optimizer = make(**options)
    oracle = Oracle(optimizer)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(5):
            program(model, optimizer, oracle)
    expected = {step: share for step, share in enumerate(oracle.shares, 1) if share is not None}
    assert len(expected) == 4, "from the second step on it can be told"
    found = seen.means("optimizer:vital.leftover")
    if program is half:  # the probes of the first steps lay in the half that was cleared
        assert found
        assert found.items() <= expected.items()
    else:
        assert found == expected


def test_the_oracle_can_tell_programs_apart():
    """Guards the test above: a leftover share of 1 and of 0 both occur."""
    shares = {}
    for program in (never, first, half):
        model, optimizer = make()
        oracle = Oracle(optimizer)
        for _ in range(3):
            program(model, optimizer, oracle)
        shares[program] = oracle.shares[-1]
    assert shares == {never: 1, first: 0, half: 0.5}


@pytest.mark.filterwarnings("ignore:.*create_graph")
def test_a_gradient_that_is_replaced_by_its_sum_is_not_judged(tmp_path):
    model, optimizer = make()
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            loss_of(model).backward(create_graph=True)
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.detach()
    assert "optimizer:vital.leftover" not in seen.keys
    assert seen.means("optimizer:vital.backwards_seen") == {1: 1, 2: 1, 3: 1}


def test_sparse_gradients_are_not_judged(tmp_path):
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "optimizer:vital.leftover" not in seen.keys


@pytest.mark.parametrize("clears", [True, False])
def test_a_closure_is_judged_after_its_evaluations(tmp_path, clears):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def closure():
        if clears:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            optimizer.step(closure)
    assert seen.means("optimizer:vital.leftover") == {2: 1.0 - clears, 3: 1.0 - clears}
    assert all(count >= 2 for count in seen.means("optimizer:vital.backwards_seen").values())


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_a_gradient_scaler_does_not_confuse_it(tmp_path, clears, unscales):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Watching(tmp_path, model, optimizer, scaler=scaler) as seen:
        for step in range(4):
            if clears:
                optimizer.zero_grad()
            loss = loss_of(model) * (float("inf") if step == 1 else 1)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert seen.means("optimizer:vital.leftover") == dict.fromkeys((2, 3, 4), 1.0 - clears)


def test_a_gan_is_healthy_though_one_backward_reaches_the_others_parameters(tmp_path):
    generator, judge = nn.Linear(4, 8), tiny_mlp(8, 8, 1)
    one = torch.optim.Adam(judge.parameters(), 1e-3)
    two = torch.optim.Adam(generator.parameters(), 1e-3)
    with Watching(tmp_path, {"generator": generator, "judge": judge}, [one, two]) as seen:
        for _ in range(3):
            one.zero_grad()
            fake = generator(torch.randn(6, 4))
            (judge(fake.detach()).mean() - judge(torch.randn(6, 8)).mean()).backward()
            one.step()
            two.zero_grad()
            (-judge(fake).mean()).backward()
            two.step()
    assert seen.means("optimizer:vital.leftover") == {2: 0.0, 3: 0.0}
    assert seen.means("optimizer2:vital.leftover") == {2: 0.0, 3: 0.0}
    assert seen.means("optimizer:vital.backwards_seen") == {1: 1.0, 2: 2.0, 3: 2.0}
    assert seen.means("optimizer2:vital.backwards_seen") == {1: 1.0, 2: 1.0, 3: 1.0}


def test_parameters_without_a_gradient_are_counted(tmp_path):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    model = Partly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert seen.means("optimizer:vital.no_gradient") == {1: 2.0, 2: 2.0}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_cleared_after_the_backward_count_as_missing(tmp_path, set_to_none):
    model, optimizer = make()
    oracle = Oracle(optimizer)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            oracle.backward(loss_of(model))
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
    assert oracle.missing == [4, 4, 4]
    assert seen.means("optimizer:vital.no_gradient") == {1: 4.0, 2: 4.0, 3: 4.0}


def test_gradients_changed_by_hand_do_not_count_as_missing(tmp_path):
    model, optimizer = make()
    oracle = Oracle(optimizer)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(5):
            scaled_by_hand(model, optimizer, oracle)
    assert seen.means("optimizer:vital.no_gradient") == {1: 0.0, 2: 0.0, 3: 0.0}, "read in the first steps only"


def test_forwards_and_backwards_are_counted(tmp_path):
    model, optimizer = make()
    with Watching(tmp_path, model, optimizer) as seen:
        for count in (1, 3, 2):
            optimizer.zero_grad()
            for _ in range(count):
                loss_of(model).backward()
            with torch.no_grad():
                model(torch.randn(1, 8))
            optimizer.step()
    expected = {1: 1.0, 2: 3.0, 3: 2.0}
    assert seen.means("(loop):vital.forwards") == expected
    assert seen.means("(loop):vital.backwards") == expected
    assert seen.means("optimizer:vital.backwards_seen") == expected


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_checkpoint_is_not_a_pass_of_its_own(tmp_path, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.one, x, use_reentrant=reentrant)
            return torch.utils.checkpoint.checkpoint(self.two, x, use_reentrant=reentrant)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4, requires_grad=True)).sum().backward()
            optimizer.step()
    assert seen.means("(loop):vital.forwards") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert seen.means("(loop):vital.backwards") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert seen.means("optimizer:vital.leftover") == {2: 0.0, 3: 0.0}


def test_an_optimizer_that_is_found_later_is_judged_too(tmp_path):
    model, optimizer = make()
    with Watching(tmp_path, model) as seen:
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
    assert seen.means("optimizer:vital.leftover") == {2: 1.0, 3: 1.0}
    assert seen.means("optimizer:vital.backwards_seen") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert seen.facts.optimizers[0].kind == "SGD"
    assert seen.facts.parameters[0].owners == ("optimizer",)


@pytest.mark.parametrize("clears", [True, False])
def test_in_a_large_model_a_part_of_the_parameters_tells(tmp_path, clears):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(4):
            if clears:
                optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
    assert seen.means("optimizer:vital.leftover") == dict.fromkeys((2, 3, 4), 0.0 if clears else 1.0)
    assert seen.means("optimizer:vital.no_gradient") == dict.fromkeys((1, 2, 3, 4), 0.0)
    assert seen.means("optimizer:vital.backwards_seen") == dict.fromkeys((1, 2, 3, 4), 1.0)


def test_in_a_large_model_gradients_cleared_before_the_step_count_for_all(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watching(tmp_path, model, optimizer) as seen:
        for _ in range(3):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    assert seen.means("optimizer:vital.no_gradient") == dict.fromkeys((1, 2, 3), 120.0)


def test_gradients_of_zeros_that_ranks_reduce_were_not_cleared(tmp_path):
    """The reduction writes to a gradient after it was accumulated, as clearing does; one class has no gradient."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise"):
            for _ in range(6):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.rand(16, 8)), torch.rand(16, 1)).backward()
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert {finding.kind for finding in sonde.diagnose(tmp_path / "run").findings} == {"single_class_output"}
