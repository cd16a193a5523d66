"""Leaks: planted ones are found with their line, healthy programs are left alone."""

from __future__ import annotations

import gc
import inspect
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sonde.core.robust import growth
from sonde.hooks.source_search import feeding_lines
from sonde.probes import memory_scope
from sonde.probes.memory.leaks import Leak, TensorWatch

STEPS = 60
WIDTH = 256
BATCH = 64  # one pass keeps 64 * 256 floats and more: above 64 KB; three layers of it, 200 KB


@pytest.fixture(scope="module", autouse=True)
def _few_objects_and_one_thread():
    """Hide the hundreds of thousands of objects that torch is made of, which a walk would take seconds for."""
    torch.optim.SGD([torch.ones(1)], 0.1)  # imports half of torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def model():
    return nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


class Loop:
    """A training loop; a program does something of its own at each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def step(self, batch=BATCH):
        loss = self.model(torch.randn(batch, 32)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def evaluate(self):
        return self.model(torch.randn(BATCH, 32)).square().mean()  # somebody forgot no_grad


def losses_in_a_list():
    loop, losses = Loop(), []
    for _ in range(STEPS):
        loop.step()
        losses.append(loop.evaluate())  # LEAK


def cache_that_grows():
    loop, cache = Loop(), {}
    for index in range(STEPS):
        loop.step()
        cache[f"batch {index}"] = {"activations": torch.ones(200, 256)}  # LEAK


def hook_with_a_closure():
    loop, kept = Loop(), []

    def hook(module, args, output):
        kept.append(output.detach().clone())  # LEAK

    handle = loop.model[2].register_forward_hook(hook)
    for _ in range(STEPS):
        loop.step(batch=200)
    handle.remove()


def total_with_its_graph():
    loop, total = Loop(), torch.zeros(())
    for _ in range(STEPS):
        loop.step()
        total = total + loop.evaluate()  # LEAK
    return total


class Trainer:
    def __init__(self):
        self.history = {"outputs": []}

    def run(self):
        loop = Loop()
        for _ in range(STEPS):
            loop.step()
            self.history["outputs"].append((0, torch.ones(200, 256)))  # LEAK


def attribute_of_a_trainer():
    Trainer().run()


PLANTED = (
    losses_in_a_list,
    cache_that_grows,
    hook_with_a_closure,
    total_with_its_graph,
    attribute_of_a_trainer,
)


def leak_line(program):
    source, first = inspect.getsourcelines(Trainer.run if program is attribute_of_a_trainer else program)
    return next(first + index for index, line in enumerate(source) if line.rstrip().endswith("# LEAK"))


@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.__name__)
def test_a_planted_leak_is_found_with_its_line(program):
    with memory_scope(max_share=100.0) as scope:
        program()
    (leak,) = scope.leaks()
    assert leak.place == "process"
    assert leak.lines[0].file == __file__
    assert leak.lines[0].line == leak_line(program)
    assert f"test_leaks.py:{leak_line(program)}" in leak.text
    assert 100e3 < leak.growth.low <= leak.growth.per_step <= leak.growth.high < 500e3


def warming_cache():
    loop, cache = Loop(), {}
    for index in range(STEPS):
        loop.step()
        cache[index % 20] = torch.ones(200, 256)


def replay_buffer_that_fills_up():
    loop, buffer = Loop(), deque(maxlen=50)
    for _ in range(STEPS):
        loop.step()
        buffer.append(torch.ones(200, 256))


def epoch_list_that_is_freed():
    loop = Loop()
    for _ in range(5):
        outputs = []
        for _ in range(STEPS // 5):
            loop.step()
            outputs.append(loop.evaluate())
        del outputs


def variable_length():
    loop, lengths = Loop(), np.random.default_rng(0).integers(16, 512, STEPS)
    for length in lengths:
        loop.step(batch=int(length))


def loader_workers():
    loop = Loop()
    data = DataLoader(TensorDataset(torch.ones(STEPS * 8, 32)), batch_size=8, num_workers=1)
    for (x,) in data:
        loop.model(x).sum().backward()
        loop.optimizer.step()


def losses_as_numbers():
    loop, losses = Loop(), []
    for _ in range(STEPS):
        loss = loop.step()
        losses.append(loss.detach())


HEALTHY = (
    warming_cache,
    replay_buffer_that_fills_up,
    epoch_list_that_is_freed,
    variable_length,
    loader_workers,
    losses_as_numbers,
)


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_a_healthy_program_is_left_alone(program):
    with memory_scope(max_share=100.0) as scope:
        program()
    assert scope.leaks() == []


def test_leaks_are_found_while_the_scope_is_open_and_noted_in_a_session():
    noted = []

    class Session:
        path = None

        def event(self, event_type, message="", data=None):
            noted.append((event_type, message, data))

    with memory_scope(max_share=100.0, session=Session()) as scope:
        losses_in_a_list()
        assert scope.leaks()
    ((kind, message, data),) = noted
    assert kind == "leak"
    assert data["lines"][0].endswith(f"test_leaks.py:{leak_line(losses_in_a_list)}")
    assert "losses.append" in message


# ---------------------------------------------------------------------- the slope itself


STEP = np.arange(200.0)
NOISE = np.random.default_rng(1).normal(size=200)


@pytest.mark.parametrize(
    ("values", "leaks"),
    [
        (5 * STEP, True),
        (5 * STEP + 20 * NOISE, True),
        (5 * STEP + 100 * (STEP % 20), True),  # saw teeth on a slope
        (20 * NOISE, False),
        (np.full(200, 7.0), False),
        (np.minimum(STEP, 60) * 5, False),  # a cache that is full
        (100 * np.log1p(STEP), False),  # a cache that fills ever more slowly
        (5 * STEP - 300 * (STEP > 90), True),  # something else was let go of once
        (5 * STEP - 900 * (STEP > 150), False),  # and here there is less than before
        (100 * (STEP % 20), False),
        (100 * (STEP % 90), False),  # ends in the middle of a tooth
        (1000.0 * (STEP > 120) + NOISE, False),  # one allocation
        (-5 * STEP, False),
    ],
)
def test_only_a_steady_rise_is_called_one(values, leaks):
    assert growth(STEP, values).steady == leaks


def test_the_slope_is_the_median_of_all_pairs_with_sens_bounds():
    values = 5 * STEP + 20 * NOISE
    late = 0.2 * STEP[-1] <= STEP
    x, y = STEP[late], values[late]
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(len(x)) for j in range(i + 1, len(x)))
    found = growth(STEP, values)
    assert found.per_step == pytest.approx(np.median(slopes))
    assert found.low < 5 < found.high
    within = np.mean([found.low <= slope <= found.high for slope in slopes])
    n = len(x)
    assert within == pytest.approx(2.576 * np.sqrt(n * (n - 1) * (2 * n + 5) / 18) / len(slopes), abs=0.01)


def test_too_few_points_prove_nothing():
    assert not growth(np.arange(6.0), np.arange(6.0)).steady
    assert growth(np.array([]), np.array([])).points == 0
    assert np.isnan(growth(np.array([3.0]), np.array([1.0])).per_step)


def test_lines_that_feed_a_name_are_read_from_the_source(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        "xs = []\nxs.append(1)\nself.xs.extend([2])\nxs[0] = 3\nxs += [4]\nxs = xs + [5]\nys.append(xs)\n"
        "xs['a']['b'].append(6)\nxs = 7\nprint(xs)\n"
    )
    assert [line.line for line in feeding_lines(str(file), "xs")] == [2, 3, 4, 5, 6, 8]
    assert feeding_lines(str(file), "xs", 3, 4)[1].text == "xs[0] = 3"
    file.with_suffix(".txt").write_text("not python (")
    assert feeding_lines(str(file.with_suffix(".txt")), "xs") == []


def test_a_short_program_is_judged_without_any_options():
    with memory_scope() as scope:
        losses_in_a_list()
    (leak,) = scope.leaks()
    assert leak.lines[0].line == leak_line(losses_in_a_list)


def test_a_healthy_program_is_held_up_by_less_than_its_share():
    clock, walks = iter(range(10_000)), []
    watch = TensorWatch(lambda: float(next(clock)), max_share=0.01, heap=lambda: walks.append(1))
    watch.weigh()  # the clock says that a count takes a second
    for step in range(1, 400):
        watch.see(step)
    assert 1 <= len(walks) <= 8


def test_what_was_not_counted_is_not_denied():
    found = growth(np.arange(100.0), 1e6 * np.arange(100.0))
    leak = Leak(place="process", growth=found, phase="", counted=False)
    assert "counted too rarely" in leak.text
    assert "No tensors pile up" not in leak.text


def test_a_fault_of_the_scope_does_not_reach_training(caplog):
    def broken():
        if loop.steps > 3:
            raise RuntimeError("a fault of ours")
        return 1 << 20

    class Counting(Loop):
        steps = 0

        def step(self, batch=BATCH):
            self.steps += 1
            return super().step(batch)

    loop = Counting()
    with memory_scope(resident=broken) as scope:
        for _ in range(6):
            loop.step()
    assert loop.steps == 6
    assert scope.leaks() == []
    told = [each.message for each in caplog.records if "a fault of ours" in each.message]
    assert 1 <= len(told) <= 2  # each part once, not at every step
    assert all("training continues without it" in each for each in told)
