"""What real training programs do, and what must be recorded then."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonde.testing import tiny_mlp


def step(model, optimizer, x=None):
    loss = model(torch.randn(6, 8) if x is None else x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class Returns(nn.Module):
    """A module that returns what it is told to."""

    def __init__(self, make):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.inner = _Wrap(make)

    def forward(self, x):
        return self.inner(self.fc(x))


class _Wrap(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x * 2)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    aux: object = None


class ModelOutput(OrderedDict):
    """Like Hugging Face's: a mapping whose entries are also attributes."""


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda x: (x, x + 1), ["[0]", "[1]"]),
        (lambda x: [x, {"a": x + 1}], ["[0]", "[1]['a']"]),
        (lambda x: {"loss": x.sum(), "logits": x}, ["['loss']", "['logits']"]),
        (lambda x: Output(x, (x + 1,)), [".logits", ".aux[0]"]),
        (lambda x: ModelOutput(logits=x), ["['logits']"]),
        (lambda x: Pair(x, x + 1), [".first", ".second"]),
        (lambda x: (x, None, "text", 3), ["[0]"]),
        (lambda x: None, []),
        (lambda x: object(), []),
    ],
)
def test_tensors_in_nested_outputs_are_found(watched, make, parts):
    with watched(Returns(make)) as seen:
        seen.models[0](torch.randn(3, 8))
        seen.session.step()
    assert {key for key in seen.sink.keys if key.startswith("inner:")} == {f"inner:output{part}" for part in parts}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.bool,
        torch.uint8,
        torch.complex64,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
    ],
)
def test_outputs_of_every_dtype_are_recorded(watched, dtype):
    values = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with watched(Returns(lambda x: values.to(dtype))) as seen:
        seen.models[0](torch.randn(3, 8))
        seen.session.step()
    reading = seen["inner:output"][1]
    assert reading.max == (1.0 if dtype == torch.bool else 3.0)
    assert reading.count == (8 if dtype.is_complex else 4)


@pytest.mark.parametrize(
    ("tensor", "count", "nonfinite", "mean"),
    [
        (torch.zeros(0, 5), 0, 0, None),
        (torch.tensor(2.5), 1, 0, 2.5),
        (torch.tensor([float("nan"), float("inf"), -float("inf"), 4.0]), 4, 3, 4.0),
        (torch.tensor([float("nan")]), 1, 1, None),
        (torch.eye(3).to_sparse(), 9, 0, 1 / 3),
        (torch.ones(2).expand(3, 2), 6, 0, 1.0),
        (torch.arange(6.0).reshape(2, 3).t(), 6, 0, 2.5),
        (torch.arange(10.0)[::3], 4, 0, 4.5),
    ],
)
def test_unusual_tensors_are_summarised_or_reported_as_empty(watched, tensor, count, nonfinite, mean):
    with watched(Returns(lambda x: tensor)) as seen:
        seen.models[0](torch.randn(3, 8))
        seen.session.step()
    reading = seen["inner:output"][1]
    assert (reading.count, reading.nonfinite) == (count, nonfinite)
    assert reading.mean == (pytest.approx(mean) if mean is not None else None)


def test_tensors_without_memory_are_left_out_and_do_no_harm(watched):
    with watched(Returns(lambda x: torch.empty(4, device="meta"))) as seen:
        seen.models[0](torch.randn(3, 8))
        seen.session.step()
    assert "inner:output" not in seen.sink.keys
    assert "fc:output" in seen.sink.keys


def test_sparse_gradients_count_their_implicit_zeros(watched):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with watched(model, optimizer) as seen:
        model(torch.tensor([1, 1, 3])).sum().backward()
        dense = model.weight.grad.to_dense()
        optimizer.step()
    reading = seen["weight:gradient"][1]
    assert reading.count == 40
    assert reading.get("zero") == (dense == 0).sum().item()
    assert reading.norm == pytest.approx(dense.norm().item())
    assert seen["weight:update"][1].norm > 0


def test_calls_of_a_module_in_one_step_are_numbered(watched):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.unused = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.fc(x)) + self.fc(x)

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
        step(model, optimizer)
    assert {key for key in seen.sink.keys if "output" in key} - {"loss_fn:output"} == {
        "fc:output",
        "fc:output#1",
        "fc:output#2",
        "(model):output",
    }
    assert list(seen["fc:output#2"]) == [1, 2]
    assert "unused.weight:gradient" not in seen.sink.keys, "a gradient that is None was not measured"


def test_many_calls_share_the_last_number(watched):
    cell = nn.Linear(8, 8)
    with watched(cell, max_calls=3) as seen:
        h = torch.randn(2, 8)
        for _ in range(10):
            h = cell(h)
        seen.session.step()
    assert {key for key in seen.sink.keys if "output" in key} == {
        "(model):output",
        "(model):output#1",
        "(model):output#2",
    }
    assert seen["(model):output#2"][1].count == 8 * 16


def test_shared_modules_and_tied_weights_are_one_site_with_all_names(watched):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 8)
            self.first = nn.Linear(8, 8)
            self.again = self.first
            self.head = nn.Linear(8, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.again(self.first(self.embed(x))))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer, torch.tensor([1, 2]))
    by_key = {site.key: site for site in seen.sink.sites.values()}
    assert by_key["embed.weight:gradient"].aliases == ("head.weight",)
    assert "head.weight:gradient" not in by_key
    assert by_key["first:output"].aliases == ("again",)
    assert "first:output#1" in by_key


def test_frozen_parameters_are_seen_once_and_have_no_gradient(watched):
    model = tiny_mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
        step(model, optimizer)
    assert list(seen["0.weight:parameter"]) == [0], "it did not change since"
    assert seen["0.weight:gradient"] == {}
    assert list(seen["2.weight:parameter"]) == [0, 1, 2]


def test_a_parameter_no_optimizer_owns_still_shows_its_gradient(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
    assert seen["2.weight:gradient"][1].norm > 0
    assert seen["2.weight:update"] == {}


def test_micro_batches_of_an_accumulated_step_are_merged(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            for size in (4, 6):
                (model(torch.randn(size, 8)).square().mean() / 2).backward()
            optimizer.step()
    reading = seen["0:output"]
    assert list(reading) == [1, 2]
    assert reading[1].count == (4 + 6) * 16
    assert not any("#" in key for key in seen.sink.keys)


def test_a_gan_with_two_optimizers_counts_iterations_and_keeps_their_parameters_apart(watched):
    generator, discriminator = tiny_mlp(4, 8, 8), tiny_mlp(8, 8, 1)
    g_opt = torch.optim.Adam(generator.parameters())
    d_opt = torch.optim.Adam(discriminator.parameters())
    with watched({"g": generator, "d": discriminator}, [g_opt, d_opt], every=2) as seen:
        for _ in range(4):
            fake = generator(torch.randn(5, 4))
            d_loss = discriminator(fake.detach()).mean() - discriminator(torch.randn(5, 8)).mean()
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
            g_loss = -discriminator(fake).mean()
            g_opt.zero_grad()
            g_loss.backward()
            g_opt.step()
    # Both step once in each of 4 iterations, every second of which is recorded.
    assert list(seen["d.0.weight:gradient"]) == [2, 4]
    assert list(seen["g.0.weight:gradient"]) == [2, 4]
    assert list(seen["g.0.weight:update"]) == [2, 4]
    assert seen["d.2:output#1"], "the real batch is the second call before a backward"
    assert seen["d.2:output#2"], "the call for the generator is not merged with those for the discriminator"
    assert "optimizer2.group0.lr:scalar" in seen.sink.keys


def test_lbfgs_closures_are_one_step_with_the_gradients_of_its_last_evaluation(watched):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        calls.append(model.weight.grad.norm().item())
        return loss

    with watched(model, optimizer) as seen:
        optimizer.step(closure)
        optimizer.step(closure)
    assert list(seen["weight:gradient"]) == [1, 2]
    assert seen["weight:gradient"][2].norm == pytest.approx(calls[-1], rel=1e-4)
    assert seen["weight:update"][1].norm > 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_shows_unscaled_gradients_and_marks_skipped_steps(watched, fused):
    model = tiny_mlp()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(6, 8)
    plain(x).square().mean().backward()
    with watched(model, optimizer, scaler=scaler, what=["gradients", "output_gradients", "parameters"]) as seen:
        for index in range(3):
            loss = model(x).square().mean()
            if index == 1:
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "step" not in vars(scaler)
    expected = plain[0].weight.grad
    assert seen["0.weight:gradient"][1].norm == pytest.approx(expected.norm().item(), rel=1e-4)
    assert (
        seen["0.weight:gradient"][1].abs_quantile(0.5)[1]
        <= expected.abs().flatten().sort()[0][(expected.numel() - 1) // 2]
    )
    assert seen["0:output_gradient"][1].get("abs_max") < 1.0, "unscaled too"
    assert seen["0.weight:gradient"][2].nonfinite > 0
    assert [block.skipped for block in seen.sink.blocks if block.step > 0] == [False, True, False]
    assert [r.mean for r in seen["scaler.scale:scalar"].values()] == [1024.0, 1024.0, 512.0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_checkpoint_is_not_counted_again(watched, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def forward(self, x):
            return checkpoint(self.block, self.stem(x), use_reentrant=reentrant)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
        step(model, optimizer)
    assert seen["block.0:output"][2].count == 6 * 8
    assert not any("#" in key or "@eval" in key for key in seen.sink.keys)


def test_in_place_operations_afterwards_do_not_change_a_reading(watched):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
    assert seen["0:output"][1].min < 0
    assert seen["1:output"][1].min == 0


def test_a_container_that_hands_on_its_childs_tensor_is_not_recorded_twice(watched):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
    by_key = {site.key: site for site in seen.sink.sites.values()}
    assert {key for key in seen.sink.keys if "output" in key} == {"0:output", "1.0:output", "loss_fn:output"}
    assert by_key["1:output"].same_as == by_key["1.0:output"].id == by_key["(model):output"].same_as


def test_evaluation_under_no_grad_is_a_phase_of_its_own(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(5, 8))
        with torch.inference_mode():
            model(torch.randn(5, 8))
        model.train()
        step(model, optimizer)
        with torch.no_grad():
            model(torch.randn(7, 8))
    assert {step: r.count for step, r in seen["0:output@eval"].items()} == {1: 4 * 5 * 16, 2: 7 * 16}, (
        "an evaluation belongs to the step whose weights it uses"
    )
    assert seen["0:output"][2].count == 6 * 16


def test_a_forward_that_raises_leaves_the_next_ones_in_order(watched):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.fail = True

        def forward(self, x):
            x = self.fc(x)
            if self.fail:
                raise RuntimeError("out of memory")
            return x + 1

    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        with pytest.raises(RuntimeError, match="out of memory"), torch.no_grad():
            model(torch.randn(2, 8))
        model.fail = False
        step(model, optimizer)
    assert seen["(model):output"][1].count == 6 * 8


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_shows_parameters_gradients_and_its_own_output(watched, caplog):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    model = tiny_mlp()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counters.clear()
    with watched(compiled, optimizer) as seen:
        for _ in range(4):
            step(compiled, optimizer)
    assert "compiled" in caplog.text
    assert len([r for r in caplog.records if "compiled" in r.message]) == 1
    assert list(seen["0.weight:gradient"]) == [1, 2, 3, 4]
    assert list(seen["0.weight:update"]) == [1, 2, 3, 4]
    assert {key for key in seen.sink.keys if ":output" in key} == {"(model):output", "loss_fn:output"}
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_wrappers_do_not_show_in_names(watched):
    model = nn.DataParallel(tiny_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
    assert "0.weight:gradient" in seen.sink.keys
    assert not any("module" in key for key in seen.sink.keys)


def test_a_users_own_attribute_called_module_keeps_its_name(watched):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(8, 4)

        def forward(self, x):
            return self.module(x)

    model = Model()
    with watched(model, torch.optim.SGD(model.parameters(), lr=0.1)) as seen:
        model(torch.randn(2, 8))
        seen.session.flush()
    assert "module.weight:parameter" in seen.sink.keys


def test_a_watched_model_can_be_copied_pickled_and_saved_and_the_copy_is_not_watched(watched):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        step(model, optimizer)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        assert b"sonde" not in buffer.getvalue()
        copy.deepcopy(optimizer)
        twin(torch.randn(100, 8))
        again(torch.randn(100, 8)).sum().backward()
        step(model, optimizer)
    assert seen["0:output"][2].count == 6 * 16


def test_two_sessions_on_two_models_and_on_one(watched):
    one, two = tiny_mlp(), tiny_mlp()
    opt_one, opt_two = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two))
    with watched(one, opt_one) as a, watched(two, opt_two) as b, watched(one, opt_one, every=2) as c:
        step(one, opt_one)
        step(one, opt_one)
        step(two, opt_two)
    assert list(a["0.weight:gradient"]) == [1, 2]
    assert list(b["0.weight:gradient"]) == [1]
    assert list(c["0.weight:gradient"]) == [2]
    assert a["0:output"][2].norm == c["0:output"][2].norm


def test_lazy_modules_are_watched_once_they_have_parameters(watched):
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 4))
    with watched(model) as seen:
        model(torch.randn(2, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
    assert "0.weight:gradient" in seen.sink.keys


def test_moving_the_model_to_another_dtype_after_attaching_keeps_recording(watched):
    model = tiny_mlp()
    with watched(model) as seen:
        model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, torch.randn(6, 8, dtype=torch.float64))
        step(model, optimizer, torch.randn(6, 8, dtype=torch.float64))
    assert list(seen["0.weight:parameter"]) == [0, 1, 2]
    assert 0 < seen["0.weight:update"][2].norm < 10


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch's own, of hooks on all modules
@pytest.mark.parametrize("how", ["before", "after", "in place", "its forward"])
def test_outputs_missing_inside_a_compiled_part_are_warned_of_once(how, watched, caplog):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    if how == "before":
        model[0] = torch.compile(model[0], backend="eager")
    elif how == "in place":
        model[0].compile(backend="eager")
    elif how == "its forward":
        model[0].forward = torch.compile(model[0].forward, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watched(model, optimizer):
        if how == "after":
            model[0] = torch.compile(model[0], backend="eager")
        for _ in range(2):
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sum("the model is compiled" in record.getMessage() for record in caplog.records) == 1
