"""Whatever is handed in as the optimizer, the one that steps is watched, and an iteration is one step."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonde
from sonde.testing import tiny_mlp

STEPS = 30
SEVERE = ("warning", "critical")


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its usual implementation has it: another optimizer does the step."""

    def __init__(self, parameters, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()
        for each in parameters:
            self.state[each]["old"] = each.data.clone()
            each.add_(each.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.data = self.state[each]["old"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Own:
    """A class of the user's with an optimizer inside."""

    def __init__(self, inner):
        self.inner = inner

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class Signs(torch.optim.SGD):
    """Calls the step of its base class, for which torch calls the hooks once more."""

    def step(self, closure=None):
        return super().step(closure)


class ByHand:
    """No torch optimizer at all."""

    def __init__(self, parameters, through_data=False):
        self.parameters, self.through_data = list(parameters), through_data

    @torch.no_grad()
    def step(self):
        for each in self.parameters:
            (each.data if self.through_data else each).sub_(0.1 * each.grad)

    def zero_grad(self):
        for each in self.parameters:
            each.grad = None


def batches():
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=generator)
        yield x, x[:, :4].argmax(1)


def plain(make, hand_in=lambda optimizer: optimizer):
    def program(model, attach):
        optimizer = make(model)
        with attach(hand_in(optimizer)) as session:
            for x, y in batches():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                yield [copy.deepcopy(each.grad) for each in model.parameters()]
                optimizer.step()
                session.log({"loss": loss}, step=3)

    return program


def sam(hand_in, with_closure):
    def program(model, attach):
        optimizer = Sam(model.parameters(), lr=0.1, momentum=0.9)
        with attach(optimizer if hand_in else None):
            for x, y in batches():

                def loss(x=x, y=y):
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                loss()
                if with_closure:
                    optimizer.step(loss)
                else:
                    optimizer.first_step()
                    loss()
                    optimizer.second_step()
                yield [copy.deepcopy(each.grad) for each in model.parameters()]
                optimizer.zero_grad()

    return program


def two(hand_in):
    def program(model, attach):
        weights = torch.optim.SGD([each for each in model.parameters() if each.dim() > 1], lr=0.1, momentum=0.9)
        others = torch.optim.AdamW([each for each in model.parameters() if each.dim() < 2], lr=1e-2)
        with attach([weights, others] if hand_in else None):
            for x, y in batches():
                weights.zero_grad()
                others.zero_grad()
                F.cross_entropy(model(x), y).backward()
                yield [copy.deepcopy(each.grad) for each in model.parameters()]
                weights.step()
                others.step()

    return program


def in_backward(model, attach):
    optimizers = {each: torch.optim.Adam([each], lr=1e-2) for each in model.parameters()}
    gradients = {}

    def step(parameter):
        gradients[parameter] = parameter.grad.clone()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    with attach(None):
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            yield [gradients[each] for each in model.parameters()]


def one_per_parameter(model, attach):
    optimizers = [torch.optim.Adam([each], lr=1e-2) for each in model.parameters()]
    with attach(optimizers):
        for x, y in batches():
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            yield [copy.deepcopy(each.grad) for each in model.parameters()]
            for each in optimizers:
                each.step()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def accelerated(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(adam(model))


def schedule_free(model):
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    return optimizer


def compiled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


PROGRAMS = {
    "plain": plain(adam),
    "not handed in": plain(adam, lambda _: None),
    "another one is handed in": plain(adam, lambda each: torch.optim.SGD(each.param_groups[0]["params"], lr=1.0)),
    "accelerate": plain(accelerated),
    "schedule-free": plain(schedule_free),
    "own class": plain(lambda model: Own(adam(model))),
    "own class with a list": plain(lambda model: Own(adam(model)), lambda own: {"a": Own([own.inner])}),
    "super().step()": plain(lambda model: Signs(model.parameters(), lr=0.1)),
    "LR scheduler": plain(lambda model: torch.optim.lr_scheduler.LambdaLR(adam(model), lambda _: 1.0).optimizer),
    "sam": sam(hand_in=True, with_closure=False),
    "sam found": sam(hand_in=False, with_closure=False),
    "sam with a closure": sam(hand_in=True, with_closure=True),
    "sam with a closure found": sam(hand_in=False, with_closure=True),
    "two": two(hand_in=True),
    "two found": two(hand_in=False),
    "in the backward pass": in_backward,
    "one for each parameter": one_per_parameter,
}
BY_HAND = {
    "by hand": plain(lambda model: ByHand(model.parameters())),
    "by hand, not handed in": plain(lambda model: ByHand(model.parameters()), lambda _: None),
    "by hand through p.data": plain(lambda model: ByHand(model.parameters(), through_data=True)),
    "a compiled step": plain(compiled),
}


def train(program, attach):
    torch.manual_seed(3)
    model = tiny_mlp()
    gradients = list(program(model, functools.partial(attach, model)))
    return [each.detach().clone() for each in model.parameters()], gradients


class Unwatched:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def log(self, *_, **__):
        pass


def watch_in(folder, sessions, **options):
    def attach(model, optimizer):
        sessions.append(sonde.watch(model, optimizer, run=folder, on_error="raise", budget=None, **options))
        return sessions[-1]

    return attach


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("name", [*PROGRAMS, *BY_HAND])
def test_an_iteration_is_a_step_with_the_gradients_that_torch_has(name, tmp_path):
    program, sessions = (PROGRAMS | BY_HAND)[name], []
    bare, gradients = train(program, Unwatched)
    weights, _ = train(program, watch_in(tmp_path / "run", sessions))
    assert all(torch.equal(a, b) for a, b in zip(bare, weights, strict=True)), "training is not altered"
    run = sonde.open_run(tmp_path / "run")
    steps = STEPS - (name == "a compiled step")  # the first is given to the optimizer that was handed in
    assert run.steps.tolist() == list(range(steps + 1))
    assert [each.kind for each in sessions[0].findings if each.severity in SEVERE] == []
    for index, (parameter, _) in enumerate(tiny_mlp().named_parameters()):
        norms = run.series(f"{parameter}:gradient", "norm")
        expected = [gradient[index].norm().item() for gradient in gradients][-len(norms.values) :]
        assert len(norms.values) >= steps - 2
        assert norms.values.tolist() == pytest.approx(expected, rel=1e-4)
        assert len(run.series(f"{parameter}:update", "norm").values) >= steps - 2


@pytest.mark.parametrize("name", ["accelerate", "own class", "sam", "another one is handed in", "super().step()"])
def test_the_optimizer_that_steps_is_the_only_one_in_the_run(name, tmp_path):
    sessions = []
    train(PROGRAMS[name], watch_in(tmp_path / "run", sessions))
    assert sessions[0].optimizer_steps == {"optimizer": STEPS}
    keys = {site.key for site in sonde.open_run(tmp_path / "run").sites}
    assert "optimizer.group0.lr:scalar" in keys
    assert not any(key.startswith("optimizer2") for key in keys)


class Lookahead(torch.optim.Optimizer):
    """As in timm: it does not call torch's `__init__`, so hooks are called only after the first `zero_grad`."""

    def __init__(self, base):
        self.base = base
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, {}

    def step(self, closure=None):
        return self.base.step(closure)


@pytest.mark.parametrize("given", ["nothing", "the inner one", "both"])
@pytest.mark.parametrize("wrap", [Lookahead, Sam], ids=["lookahead", "sam"])
def test_a_wrapper_beside_its_own_optimizer_is_one_optimizer(wrap, given, tmp_path):
    model = tiny_mlp()
    wrapper = Lookahead(adam(model)) if wrap is Lookahead else Sam(model.parameters(), lr=0.01)
    inner = wrapper.base if wrap is Lookahead else wrapper.base_optimizer
    optimizers = {"nothing": None, "the inner one": inner, "both": [wrapper, inner]}[given]
    with sonde.watch(model, optimizers, run=tmp_path / "run", budget=None) as session:
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            if wrap is Sam:
                wrapper.first_step()
                F.cross_entropy(model(x), y).backward()
                wrapper.second_step()
            else:
                wrapper.step()
            wrapper.zero_grad()
    assert session.optimizer_steps == {"optimizer": STEPS}
    assert sonde.open_run(tmp_path / "run").series("loss").steps.tolist() == list(range(1, STEPS + 1))
    assert [each.kind for each in session.findings if each.severity in SEVERE] == []


def test_steps_that_cannot_be_seen_are_stated_once(tmp_path, caplog):
    train(BY_HAND["by hand"], watch_in(tmp_path / "run", []))
    told = [record.message for record in caplog.records if "cannot be seen" in record.message]
    assert len(told) == 1
    assert "the steps of ByHand cannot be seen" in told[0]
    assert "session.step()" in told[0]


def test_an_optimizer_that_holds_none_of_the_parameters_is_ignored(tmp_path):
    model, other = tiny_mlp(), nn.Linear(2, 2)
    optimizer, foreign = adam(model), adam(other)
    with sonde.watch(model, run=tmp_path / "run") as session:
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            other(torch.ones(1, 2)).sum().backward()
            foreign.step()
    assert session.optimizer_steps == {"optimizer": STEPS}
    assert session.current_step == STEPS


@pytest.mark.parametrize("number", [None, 100])
def test_iterations_can_be_ended_by_hand(number, tmp_path):
    model = tiny_mlp()
    optimizer = adam(model)
    with sonde.watch(model, optimizer, run=tmp_path / "run", steps_by_hand=True) as session:
        for index, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if index % 2:
                session.step(None if number is None else number + index // 2)
    assert session.optimizer_steps == {"optimizer": STEPS}
    first = 1 if number is None else number
    assert sonde.open_run(tmp_path / "run").steps.tolist() == [0, *range(first, first + STEPS // 2)]


def test_a_call_of_step_after_an_iteration_that_has_ended_only_confirms_it(tmp_path):
    model = tiny_mlp()
    optimizer = adam(model)
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            session.step()
            session.log(after=1.0)
    run = sonde.open_run(tmp_path / "run")
    assert run.steps.tolist() == list(range(STEPS + 1))
    assert run.series("after").steps.tolist() == list(range(1, STEPS + 1))


def test_critic_steps_are_iterations_and_the_generator_joins_the_last(tmp_path):
    generator, critic = tiny_mlp(4, 8, 8), tiny_mlp(8, 8, 1)
    of_generator, of_critic = adam(generator), adam(critic)
    with sonde.watch({"g": generator, "c": critic}, run=tmp_path / "run", budget=None) as session:
        for _ in range(6):
            for _ in range(3):
                of_critic.zero_grad()
                fake = generator(torch.randn(5, 4)).detach()
                (critic(fake).mean() - critic(torch.randn(5, 8)).mean()).backward()
                of_critic.step()
            of_generator.zero_grad()
            (-critic(generator(torch.randn(5, 4))).mean()).backward()
            of_generator.step()
    run = sonde.open_run(tmp_path / "run")
    assert session.current_step == 18
    assert run.series("g.0.weight:gradient").steps.tolist() == [3, 6, 9, 12, 15, 18]
    assert run.series("c.0.weight:gradient").steps.tolist() == list(range(1, 19))
    assert run.series("optimizer2:vital.steps_taken").values.tolist() == [1, 2, 3, 4, 5, 6]
