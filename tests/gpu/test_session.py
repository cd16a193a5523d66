"""Whole sessions on a CUDA device: nothing waits, nothing changes, and what is recorded is right."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sonde
from sonde import records
from sonde.core import schema

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

DEVICE = "cuda"
EVERYTHING = ("parameters", "gradients", "updates", "outputs", "output_gradients", "optimizer_state")


class Mixed(nn.Module):
    """A little of everything: embedding, attention, normalisation, dropout, a nested output."""

    def __init__(self, width=32, words=50):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        hidden = self.encoder(self.embed(tokens))
        return {"logits": self.head(hidden), "hidden": hidden}


class Images(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.conv2(self.act(self.norm(self.conv1(x)))).mean((2, 3)))


def text_loss(model, size=4):
    tokens = torch.randint(50, (size, 12), device=DEVICE)
    return F.cross_entropy(model(tokens)["logits"].flatten(0, 1).float(), tokens.flatten())


def image_loss(model, size=4):
    x = torch.randn(size, 3, 16, 16, device=DEVICE).to(memory_format=torch.channels_last)
    return F.cross_entropy(model(x).float(), torch.randint(10, (size,), device=DEVICE))


def step(model, optimizer, loss_of=text_loss):
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def expect(reading, tensor):
    """Compare a reading with the summary of the tensor, made on the host in float64."""
    row, bins = records.summarise(tensor.detach().double().cpu().numpy())
    np.testing.assert_array_equal(reading.row[1 : schema.MEAN], row[1 : schema.MEAN])
    # The mean may cancel; its bound is relative to the mean magnitude.
    assert abs(reading.row[schema.MEAN] - row[schema.MEAN]) <= 1e-6 * row[schema.ABS_SUM] / max(1, row[schema.COUNT])
    np.testing.assert_allclose(reading.row[schema.M2 :], row[schema.M2 :], rtol=1e-5)
    np.testing.assert_array_equal(reading.bins, bins)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


OPTIMIZERS = {
    "foreach": lambda model: adam(model, foreach=True),
    "fused": lambda model: adam(model, fused=True),
    "rate on the device": lambda model: adam(model, lr=torch.tensor(1e-3, device=DEVICE), capturable=True),
}


# --------------------------------------------------------------------------------------------------- nothing waits


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_no_step_waits(watched, no_waiting, optimizer, autocast):
    model = Mixed().to(DEVICE)
    chosen = OPTIMIZERS[optimizer](model)

    def loss_of(model):
        with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
            return text_loss(model)

    with watched(model, chosen, what=EVERYTHING) as seen:
        for _ in range(3):
            seen.log(loss=step(model, chosen, loss_of))
        with no_waiting():
            for _ in range(20):
                seen.log(loss=step(model, chosen, loss_of), constant=1.0)
        assert seen.session.dropped_steps == 0
    assert list(seen["head.weight:gradient"]) == list(range(1, 24))
    assert list(seen["loss:scalar"]) == list(range(1, 24))
    assert list(seen["encoder.layers.0.linear1.weight:state.exp_avg"]) == list(range(1, 24))
    assert seen["optimizer.group0.lr:scalar"][5].mean == pytest.approx(1e-3)


def test_the_test_would_notice_waiting(no_waiting):
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        torch.ones(1, device=DEVICE).item()


def test_evaluation_and_records_of_ones_own_do_not_wait(watched, no_waiting):
    model = Mixed().to(DEVICE)
    optimizer = adam(model, fused=True)
    with watched(model, optimizer) as seen:
        for turn in range(4):
            with no_waiting() if turn else contextlib.nullcontext():
                step(model, optimizer)
                model.eval()
                with torch.inference_mode():
                    loss = text_loss(model)
                model.train()
                seen.log(validation=loss)
                seen.session.record("mine", torch.arange(5, device=DEVICE))
    counts = {number: reading.count for number, reading in seen["head:output@eval"].items()}
    assert counts == dict.fromkeys((1, 2, 3, 4), 2400), "an evaluation belongs to the step whose weights it uses"
    assert seen["mine:value"][2].max == 4
    assert list(seen["validation:scalar"]) == [1, 2, 3, 4]


def test_a_session_that_begins_with_an_evaluation(watched):
    model = Mixed().to(DEVICE)
    optimizer = adam(model, fused=True)
    with watched(model, optimizer, what=["outputs"]) as seen:
        with torch.inference_mode():
            text_loss(model)
        for _ in range(3):
            step(model, optimizer)
    assert list(seen["head:output"]) == [1, 2, 3]


# ----------------------------------------------------------------------------------------------- readings are right


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_readings_equal_what_the_host_computes(watched, optimizer):
    model = Mixed().to(DEVICE)
    chosen = OPTIMIZERS[optimizer](model)
    kept = []
    with watched(model, chosen, what=EVERYTHING) as seen:
        for _ in range(3):
            now = {"head:output": [], "head:output_gradient": []}

            def keep(module, args, output, now=now):
                now["head:output"].append(output.detach().clone())
                output.register_hook(lambda grad: now["head:output_gradient"].append(grad.clone()))

            handle = model.head.register_forward_hook(keep)
            loss = text_loss(model)
            loss.backward()
            handle.remove()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                now[f"{name}:gradient"] = [p.grad.clone()]
            chosen.step()
            chosen.zero_grad()
            for name, p in model.named_parameters():
                now[f"{name}:parameter"] = [p.detach().clone()]
                now[f"{name}:update"] = [p.detach() - before[name]]
            kept.append(now)
            seen.log(loss=loss)
    assert len(kept[0]) == 2 + 3 * len(list(model.parameters()))
    for index, now in enumerate(kept):
        for key, [tensor] in now.items():
            expect(seen[key][index + 1], tensor)


def test_the_cpu_says_the_same(watched):
    twins = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    x = torch.randn(20, 8)
    results = []
    for model, device in zip(twins, ("cpu", DEVICE), strict=True):
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with watched(model, optimizer, what=EVERYTHING) as seen:
            for _ in range(3):
                model(x.to(device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(seen)
    on_cpu, on_gpu = results
    # Times and the memory of the process are not the same twice.
    own = ("cuda", "(loop):vital.", "process.", "system.")
    keys = [{key for key in seen.sink.keys if not key.startswith(own)} for seen in results]
    assert keys[0] == keys[1]
    for key in keys[0]:
        for number, reading in on_cpu[key].items():
            np.testing.assert_allclose(on_gpu[key][number].row, reading.row, rtol=1e-3, atol=1e-6)


def test_micro_batches_of_an_accumulated_step_are_merged(watched):
    model = Mixed().to(DEVICE)
    optimizer = adam(model)
    with watched(model, optimizer) as seen:
        for _ in range(2):
            for size in (3, 5):
                (text_loss(model, size) / 2).backward()
            gradient = model.head.weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert seen["head:output"][1].count == seen["head:output"][2].count == (3 + 5) * 12 * 50
    assert not any("#" in key for key in seen.sink.keys)
    expect(seen["head.weight:gradient"][2], gradient)


def test_channels_last_models(watched, no_waiting):
    model = Images().to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    outputs = []
    with watched(model, optimizer, what=EVERYTHING) as seen:
        for turn in range(4):
            handle = model.conv2.register_forward_hook(lambda m, a, o: outputs.append(o.detach().clone()))
            with no_waiting() if turn > 1 else contextlib.nullcontext():
                loss = image_loss(model)
                loss.backward()
                gradient = model.conv2.weight.grad.clone()
                optimizer.step()
                optimizer.zero_grad()
            handle.remove()
    assert not outputs[3].is_contiguous()
    expect(seen["conv2:output"][4], outputs[3])
    expect(seen["conv2.weight:gradient"][4], gradient)
    expect(seen["conv2.weight:parameter"][4], model.conv2.weight)
    assert seen["conv1:output"][4].min < 0 == seen["act:output"][4].min


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_checkpoint_is_not_counted_again(watched, no_waiting, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def forward(self, x):
            # Saving the state of the random numbers waits for the device; that is torch's, not ours.
            return checkpoint(self.block, self.stem(x), use_reentrant=reentrant, preserve_rng_state=False)

    model = Model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, optimizer) as seen:
        for turn in range(4):
            with no_waiting() if turn > 1 else contextlib.nullcontext():
                step(model, optimizer, lambda model: model(torch.randn(6, 8, device=DEVICE)).square().mean())
    assert seen["block.0:output"][4].count == 6 * 8
    assert not any("#" in key or "@eval" in key for key in seen.sink.keys)


def test_gradients_of_samples_by_vmap_leave_recording_on(watched):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
    optimizer = adam(model, fused=True)
    x = torch.randn(6, 8, device=DEVICE)

    def loss_of_one(parameters, one):
        return torch.func.functional_call(model, parameters, (one,)).square().mean()

    with watched(model, optimizer) as seen:
        for _ in range(3):
            parameters = {name: each.detach() for name, each in model.named_parameters()}
            torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))(parameters, x)
            step(model, optimizer, lambda model: model(x).square().mean())
    assert list(seen["0:output"]) == [1, 2, 3]
    assert seen["2:output"][3].count == 6


def test_weights_of_two_dtypes(watched):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)).to(DEVICE)
    model[0].to(torch.bfloat16), model[2].to(torch.bfloat16)
    optimizer = adam(model, foreach=True)

    def loss_of(model):
        return model[3](model[2](model[1](model[0](x).float()).bfloat16()).float()).square().mean()

    x = torch.randn(6, 8, device=DEVICE, dtype=torch.bfloat16)
    with watched(model, optimizer) as seen:
        for _ in range(3):
            loss = loss_of(model)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        expect(seen[f"{name}:gradient"][3], gradients[name])
        expect(seen[f"{name}:parameter"][3], parameter)
        expect(seen[f"{name}:update"][3], parameter.detach().float() - before[name].float())


# ------------------------------------------------------------------------------------------------- gradient scalers


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_shows_unscaled_gradients_and_marks_skipped_steps(watched, fused):
    model = Images().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=1000)
    kept = []
    with watched(model, optimizer, scaler=scaler, what=["gradients", "output_gradients", "parameters"]) as seen:
        for index in range(4):
            torch.manual_seed(index)
            with torch.autocast(DEVICE, torch.float16):
                loss = image_loss(model)
            if index == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            kept.append(model.head.weight.grad / (1024.0 if index < 2 else 512.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for index in (0, 2, 3):
        expect(seen["head.weight:gradient"][index + 1], kept[index])
    assert seen["head:output_gradient"][1].get("abs_max") < 1.0, "unscaled too"
    assert seen["head.weight:gradient"][2].nonfinite > 0
    assert [block.skipped for block in seen.sink.blocks if block.step > 0] == [False, True, False, False]
    assert [r.mean for r in seen["scaler.scale:scalar"].values()] == [1024.0, 1024.0, 512.0, 512.0]


def test_a_fused_step_under_a_gradient_scaler_does_not_wait(watched, no_waiting):
    model = Images().to(DEVICE)
    optimizer = adam(model, fused=True)
    scaler = torch.amp.GradScaler(DEVICE)
    with watched(model, optimizer, scaler=scaler, what=EVERYTHING) as seen:
        for turn in range(10):
            with no_waiting() if turn > 1 else contextlib.nullcontext():
                with torch.autocast(DEVICE, torch.float16):
                    loss = image_loss(model)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                seen.log(loss=loss)
    assert list(seen["optimizer.found_inf:scalar"]) == list(range(1, 11))


# -------------------------------------------------------------------------------------------------- nothing changes


def train(make, loss_of, optimizer, session_for, *, autocast=None, accumulate=1):
    torch.manual_seed(3)
    model = make().to(DEVICE)
    chosen = optimizer(model)
    scaler = torch.amp.GradScaler(DEVICE, enabled=autocast == torch.float16, growth_interval=20)
    losses = []
    with session_for(model, chosen, scaler) as session:
        for _ in range(200):
            for _ in range(accumulate):
                with torch.autocast(DEVICE, autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = loss_of(model)
                scaler.scale(loss).backward()
            scaler.step(chosen)
            scaler.update()
            chosen.zero_grad()
            if session is not None:
                session.log(loss=loss)
            losses.append(loss.detach())
    return [*losses, *model.state_dict().values(), torch.cuda.get_rng_state()]


PROGRAMS = {
    "text, foreach": (Mixed, text_loss, OPTIMIZERS["foreach"], {}),
    "text, fused, bfloat16, accumulated": (
        Mixed,
        text_loss,
        OPTIMIZERS["fused"],
        {"autocast": torch.bfloat16, "accumulate": 2},
    ),
    "images, float16, scaler": (
        lambda: Images().to(memory_format=torch.channels_last),
        image_loss,
        lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
        {"autocast": torch.float16},
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_is_bit_identical(program, tmp_path):
    make, loss_of, optimizer, options = PROGRAMS[program]
    torch.use_deterministic_algorithms(True)
    try:
        bare = train(make, loss_of, optimizer, lambda *_: contextlib.nullcontext(), **options)
        watched = train(
            make,
            loss_of,
            optimizer,
            lambda model, chosen, scaler: sonde.watch(
                model, chosen, scaler=scaler, run=tmp_path / "run", what=EVERYTHING, on_error="raise"
            ),
            **options,
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(bare) == len(watched) > 200
    assert all(torch.equal(left, right) for left, right in zip(bare, watched, strict=True))
    run = sonde.open_run(tmp_path / "run")
    assert len(run.steps) == 201
    assert run.dropped == 0


# ---------------------------------------------------------------------------------------------- streams and threads


def test_a_side_stream_and_a_busy_default_stream(watched):
    model = Mixed().to(DEVICE)
    optimizer = adam(model, fused=True)
    side = torch.cuda.Stream()
    gradients = []
    torch.cuda.synchronize()
    with watched(model, optimizer) as seen, torch.cuda.stream(side):
        for _ in range(5):
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.cuda._sleep(400_000_000)  # the five together last longer than the slow first steps
            text_loss(model).backward()
            gradients.append(model.head.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        side.synchronize()
        busy = not torch.cuda.default_stream().query()
    assert busy, "training did not wait for the default stream"
    for index, gradient in enumerate(gradients):
        expect(seen["head.weight:gradient"][index + 1], gradient)


def test_modules_on_different_streams(watched):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x):
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                torch.cuda._sleep(5_000_000)
                left = self.left(x)
            right = self.right(x)
            here.wait_stream(side)
            left.record_stream(here)
            return self.head(left + right)

    side = torch.cuda.Stream()
    model = Branches().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    outputs = []
    with watched(model, optimizer, what=EVERYTHING) as seen:
        for turn in range(6):
            model.left.register_forward_hook(lambda m, a, o: outputs.append(o.detach().clone())) if not turn else None
            step(model, optimizer, lambda model: model(torch.randn(100, 64, device=DEVICE)).square().mean())
        model.left._forward_hooks.clear()
    for index, output in enumerate(outputs):
        expect(seen["left:output"][index + 1], output)
        assert seen["right:output_gradient"][index + 1].count == 6400


def test_streams_that_do_not_wait_for_each_other_still_do_not(watched):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.slow, self.quick, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x):
            here = torch.cuda.current_stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                torch.cuda._sleep(400_000_000)
                slow = self.slow(x)
            quick = self.quick(x)
            done = here.record_event()
            while not done.query() and not side.query():
                pass
            overtaken.append(done.query() and not side.query())
            here.wait_stream(side)
            slow.record_stream(here)
            return self.head(slow + quick)

    side, overtaken, outputs = torch.cuda.Stream(), [], []
    model = Branches().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched(model, optimizer, what=EVERYTHING) as seen:
        for _ in range(4):
            handle = model.slow.register_forward_hook(lambda m, a, o: outputs.append(o.detach().clone()))
            step(model, optimizer, lambda model: model(torch.randn(100, 64, device=DEVICE)).square().mean())
            handle.remove()
    assert overtaken[1:] == [True] * 3, "the first pass loads code"
    for index, output in enumerate(outputs):
        expect(seen["slow:output"][index + 1], output)
        assert seen["quick:output_gradient"][index + 1].count == 6400


# ------------------------------------------------------------------------------------------ compiled code and graphs


def graphs_and_breaks():
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_compiled_models_get_no_more_graphs_or_breaks(watched, mode):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    compiled = torch.compile(model, mode=mode)
    optimizer = adam(model, fused=True)

    def loss_of(model):
        torch.compiler.cudagraph_mark_step_begin()
        return model(torch.randn(32, 64, device=DEVICE)).square().mean()

    for _ in range(4):
        step(compiled, optimizer, loss_of)
    bare = graphs_and_breaks()
    assert bare == (1, 0)
    gradients = []
    with watched(compiled, optimizer, what=("parameters", "gradients", "updates")) as seen:
        for _ in range(4):
            loss_of(compiled).backward()
            gradients.append(model[0].weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    assert graphs_and_breaks() == bare
    for index, gradient in enumerate(gradients):
        expect(seen["0.weight:gradient"][index + 1], gradient)
    with watched(compiled, optimizer) as seen:
        for _ in range(4):
            step(compiled, optimizer, loss_of)
    assert list(seen["(model):output"]) == [1, 2, 3, 4]
    graphs, breaks = graphs_and_breaks()
    assert (graphs, breaks) == bare, "asking for outputs of compiled code traces it anew"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_graph_capture_is_left_alone_and_recording_goes_on(watched):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = adam(model, capturable=True)
    x = torch.randn(100, 64, device=DEVICE)

    def whole_step():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    with watched(model, optimizer) as seen:
        for _ in range(3):
            whole_step()
        graph = torch.cuda.CUDAGraph()
        torch.cuda._sleep(100_000_000)  # so that the worker has rows to wait for while the capture runs
        whole_step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            loss = whole_step()
            seen.log(loss=loss)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        before = model[0].weight.detach().clone()
        graph.replay()
        assert not torch.equal(before, model[0].weight), "the graph trains"
        assert torch.isfinite(loss)
        updates = []
        for _ in range(2):
            graph.replay()
            after_replay = model[0].weight.detach().clone()
            gradient_free = whole_step()
            seen.log(loss=gradient_free)
            updates.append(model[0].weight.detach() - after_replay)
    assert list(seen["0.weight:gradient"]) == [1, 2, 3, 4, 5, 6], "neither capture nor replay is a step"
    expect(seen["0.weight:update"][5], updates[0])
    expect(seen["0.weight:update"][6], updates[1])
    assert seen["loss:scalar"][6].mean == pytest.approx(gradient_free.item())


def test_graphed_callables_are_recorded_at_the_optimizer(watched):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
    model = torch.cuda.make_graphed_callables(model, (torch.randn(100, 64, device=DEVICE),))
    optimizer = adam(model, fused=True)
    with watched(model, optimizer) as seen:
        for _ in range(3):
            model(torch.randn(100, 64, device=DEVICE)).square().mean().backward()
            gradient = model[0].weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    expect(seen["0.weight:gradient"][3], gradient)
    assert list(seen["(model):output"]) == [1, 2, 3]


# --------------------------------------------------------------------------------------------------------- the end


def test_closing_with_work_in_flight_loses_nothing(watched):
    model = nn.Linear(64, 1).to(DEVICE)
    optimizer = adam(model, fused=True)

    def loss_of(model):
        return model(torch.ones(10, 64, device=DEVICE)).square().mean()

    with watched(model, optimizer) as seen:
        step(model, optimizer, loss_of)
        torch.cuda.synchronize()
        # About half a second. Few launches follow: where the driver's queue is full, any host has to wait.
        torch.cuda._sleep(1_000_000_000)
        for _ in range(10):
            loss = step(model, optimizer, loss_of)
            seen.log(loss=loss)
        assert not torch.cuda.current_stream().query(), "ten steps were watched while the device slept"
    assert list(seen["weight:parameter"]) == list(range(12))
    assert seen["loss:scalar"][11].mean == pytest.approx(loss.item())


def test_no_device_memory_is_held_after_closing(watched):
    def make():
        model = Mixed(width=64).to(DEVICE)
        return model, adam(model, fused=True)

    model, optimizer = make()
    step(model, optimizer)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with watched(model, optimizer, what=EVERYTHING) as seen:
        for _ in range(5):
            step(model, optimizer)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None, "the closed session holds the model"
    assert seen.session.path.exists()


def test_memory_and_phases_of_the_device_are_recorded(watched, no_waiting):
    class Sleepy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            torch.cuda._sleep(20_000_000)
            return self.fc(x)

    model = Sleepy().to(DEVICE)
    optimizer = adam(model, fused=True)
    held = torch.ones(1 << 20, device=DEVICE)
    with watched(model, optimizer) as seen:
        for turn in range(6):
            with no_waiting() if turn > 1 else contextlib.nullcontext():
                for _ in range(2):
                    model(torch.randn(4, 8, device=DEVICE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    name = f"cuda:{held.get_device()}"
    assert seen[f"{name}.allocated:scalar"][3].mean >= held.nbytes
    assert seen[f"{name}.reserved:scalar"][3].mean >= seen[f"{name}.allocated:scalar"][3].mean
    times = {phase: seen[f"{name}.{phase}_ms:scalar"] for phase in ("step", "forward", "backward", "optimizer")}
    assert list(times["forward"]) == list(times["optimizer"]) == [1, 2, 3, 4, 5, 6]
    assert list(times["step"]) == [2, 3, 4, 5, 6]
    for number in range(3, 7):
        forward, rest = times["forward"][number].mean, times["backward"][number].mean + times["optimizer"][number].mean
        assert forward > 10 > rest > 0, "twice ten milliseconds of sleep at 2 GHz, or more"
        assert times["step"][number].mean >= forward + rest


def test_sampled_steps_have_times_of_their_own_only(watched):
    model = Mixed().to(DEVICE)
    optimizer = adam(model, fused=True)
    with watched(model, optimizer, every=3) as seen:
        for _ in range(7):
            step(model, optimizer)
    name = f"cuda:{torch.cuda.current_device()}"
    assert list(seen[f"{name}.forward_ms:scalar"]) == [3, 6]
    assert list(seen[f"{name}.allocated:scalar"]) == [3, 6]
    assert f"{name}.step_ms:scalar" not in seen.sink.keys


FAULTY = """
import sys, torch, sonde
model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
with sonde.watch(model, optimizer, run=sys.argv[1]) as session:
    for index in range(5):
        tokens = torch.full((8,), 3 if index < 3 else 10**6, device="cuda")
        loss = model(tokens).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
    torch.cuda.synchronize()
"""


def test_a_device_that_fails_leaves_a_readable_run(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", FAULTY, str(tmp_path / "run")], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode != 0
    assert "device-side assert" in result.stderr
    run = sonde.open_run(tmp_path / "run")
    assert set(run.steps) >= {0, 1, 2}
    kinds = {event.event_type for event in run.events}
    assert {"exception", "fault"} <= kinds, f"{kinds} {result.stderr}"
    assert Path(tmp_path / "run").exists()


def test_a_model_on_the_device_and_on_the_host(watched):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1).to(DEVICE)

        def forward(self, x):
            return self.second(self.first(x).to(DEVICE))

    model = Split()
    optimizer = adam(model)
    with watched(model, optimizer, what=EVERYTHING) as seen:
        for _ in range(4):
            x = torch.randn(100, 64)
            model(x).square().mean().backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        expect(seen[f"{name}:gradient"][4], gradients[name])
        expect(seen[f"{name}:parameter"][4], parameter)
        expect(seen[f"{name}:update"][4], parameter.detach() - before[name])
    assert seen["first:output"][4].count == 6400
    assert seen["second:output"][4].count == 100


def test_a_model_that_moves_to_the_device_in_mid_run(watched):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []
    with watched(model, optimizer) as seen:
        for turn in range(6):
            if turn == 3:
                model.to(DEVICE)
            x = torch.randn(20, 16, device=model[0].weight.device)
            model(x).square().mean().backward()
            kept.append(model[0].weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    for index, gradient in enumerate(kept):
        expect(seen["0.weight:gradient"][index + 1], gradient)
    assert list(seen["2:output"]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_two_devices(watched, no_waiting):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64).to("cuda:0"), nn.Linear(64, 1).to("cuda:1")

        def forward(self, x):
            return self.second(self.first(x).to("cuda:1"))

    model = Split()
    optimizer = adam(model)
    with watched(model, optimizer, what=EVERYTHING) as seen:
        for turn in range(5):
            with no_waiting() if turn > 1 else contextlib.nullcontext():
                model(torch.randn(100, 64, device="cuda:0")).square().mean().backward()
                gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
    for name, gradient in gradients.items():
        expect(seen[f"{name}:gradient"][5], gradient)
    assert {"cuda:0.allocated:scalar", "cuda:1.allocated:scalar"} <= seen.sink.keys
