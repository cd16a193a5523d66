"""Taping real training loops: what the tape holds, that it changes nothing, and that a broken tape harms nobody."""

import contextlib
import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.core.tape import references
from sonde.errors import OptionError
from sonde.forensics.tape import operations, recorder
from sonde.hooks.guard import Guard


@pytest.fixture(autouse=True)
def _clean():
    torch.manual_seed(0)
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert Guard.paused is None
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


watch = functools.partial(sonde.watch, budget=None)  # a busy machine must not delay a tape


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model, optimizer, steps, session=None, loss=F.mse_loss):
    for _ in range(steps):
        value = loss(model(torch.randn(5, 8)), torch.randn(5, 3))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if session is not None:
            session.log(loss=value)


def taped(path, model=None, steps=3, step=None, **options):
    model = model or mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, run=path, **options) as session:
        train(model, optimizer, steps, session)
    return sonde.open_run(path).tape(step)


def faults(path):
    return [event.message for event in sonde.open_run(path).events if event.event_type == "fault"]


# ---------------------------------------------------------------------- what it holds


def test_the_steps_two_three_and_twenty_are_taped_and_no_others(tmp_path):
    taped(tmp_path / "run", steps=24)
    assert sonde.open_run(tmp_path / "run").tapes() == [2, 3, 20]
    assert not faults(tmp_path / "run")


def test_the_first_tape_of_a_run_is_made_whatever_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.record.governor.Governor.affords", lambda self, seconds, spent: False)
    taped(tmp_path / "run", steps=24)
    assert sonde.open_run(tmp_path / "run").tapes() == [2]


def test_a_loop_with_a_loader_is_split_into_batch_model_loss_backward_and_optimizer(tmp_path):
    model = nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(3, (32,))), batch_size=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with watch(model, optimizer, run=tmp_path / "run"):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    tape = sonde.open_run(tmp_path / "run").tape(3)
    assert [(v.name, v.role) for v in tape.given("input", "target")] == [("batch[0]", "input"), ("batch[1]", "target")]
    kinds = [mark.kind for mark in tape.marks if "module" not in mark.kind]
    assert kinds == [
        *("scheduler_step", "loader_next", "zero_grad", "backward", "backward_end", "clip"),
        *("optimizer_enter", "optimizer_exit"),
    ]
    assert [op.kind for op in tape.loss_ops() if op.kind != "detach"] == ["_log_softmax", "nll_loss_forward"]
    assert {op.module for op in tape.loss_ops()} == {"<CrossEntropyLoss>"}
    softmax = next(op for op in tape.ops if op.kind == "_softmax")
    assert (softmax.module, softmax.args["dim"], softmax.phase) == ("1", -1, "forward")
    assert tape.outputs_of_root() == list(softmax.outs)
    assert {v.name for v in tape.gradient_sources(tape.loss_values()[0])} == {"0.weight", "0.bias"}
    assert "model(x)" in tape.line_of(softmax).text
    assert all(op.of >= 0 for op in tape.ops if op.kind in ("mm", "_softmax_backward_data"))
    (described,) = tape.optimizers
    assert described.kind == "torch.optim.sgd.SGD"
    assert described.groups[0].settings["momentum"] == 0.9
    assert described.groups[0].names == ("0.weight", "0.bias")
    assert set(described.state) == {"0.weight", "0.bias"}
    assert not tape.incomplete


def test_saved_tensors_are_what_the_step_began_with(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, before = torch.randn(4, 3), []
    with watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(3):
            before.append(model.weight.detach().clone())
            optimizer.zero_grad()
            x.mul_(2.0)  # the batch is written to before and after its use
            model(x).square().sum().backward()
            optimizer.step()
    tape = sonde.open_run(tmp_path / "run").tape(3)
    weight = next(value for value in tape.given("parameter") if value.name == "weight")
    np.testing.assert_array_equal(tape.tensor(weight.id), before[2].numpy())
    data = next(value for value in tape.given() if value.shape == (4, 3))
    np.testing.assert_array_equal(tape.tensor(data.id), (x / 2).numpy())
    written = next(value for value in tape.values if value.same_as == data.id)
    assert tape.producer(written.id).kind == "mul_"
    assert tape.inputs_of_root() == [written.id]
    updated = [value for value in tape.values if value.name == "weight" and value.made_by >= 0]
    assert updated
    assert all(tape.ops[value.made_by].phase == "optimizer" for value in updated)


def test_what_is_drawn_is_saved_and_called_random(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    tape = taped(tmp_path / "run", model)
    (draw,) = [op for op in tape.ops if op.kind == "bernoulli_"]
    assert draw.is_random
    mask = tape.tensor(draw.outs[0])
    assert set(np.unique(mask)) <= {0.0, 1.0}
    assert tape.values[draw.outs[0]].role == "random"
    assert "random.cpu" in tape.tensors


def test_state_that_is_carried_over_is_known_as_such(tmp_path):
    model = nn.LSTM(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    state, table = None, torch.randn(5, 2, 8)
    with watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(3):
            out, state = model(torch.randn(5, 2, 4), state)
            state = tuple(each.detach() for each in state)
            optimizer.zero_grad()
            (out - table).square().mean().backward()
            optimizer.step()
    tape = sonde.open_run(tmp_path / "run").tape(3)
    assert [value.shape for value in tape.given("carried")] == [(1, 2, 8), (1, 2, 8)]
    assert (5, 2, 8) not in {value.shape for value in tape.given("carried")}


def test_a_parameter_written_through_its_data_is_still_that_parameter(tmp_path):
    model = mlp()
    with watch(model, run=tmp_path / "run") as session:
        for _ in range(3):
            loss = F.mse_loss(model(torch.randn(5, 8)), torch.randn(5, 3))
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.data.sub_(0.1 * gradient)
            session.step()
    tape = sonde.open_run(tmp_path / "run").tape(3)
    written = {name: [op.kind for op in ops] for name, ops in tape.parameter_writes().items()}
    assert written == {"0.weight": ["sub_"], "0.bias": ["sub_"], "2.weight": ["sub_"], "2.bias": ["sub_"]}
    assert tape.backwards()[0].data["inputs"]
    assert tape.loss_values()


def test_a_round_of_a_gan_is_one_tape_with_both_losses(tmp_path):
    g, d = nn.Linear(4, 8), nn.Linear(8, 1)
    og, od = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
    bce = F.binary_cross_entropy_with_logits
    with watch({"g": g, "d": d}, [og, od], run=tmp_path / "run"):
        for _ in range(3):
            fake = g(torch.randn(6, 4))
            loss = bce(d(torch.randn(6, 8)), torch.ones(6, 1)) + bce(d(fake.detach()), torch.zeros(6, 1))
            od.zero_grad()
            loss.backward()
            od.step()
            og.zero_grad()
            bce(d(fake), torch.ones(6, 1)).backward()
            og.step()
    tape = sonde.open_run(tmp_path / "run").tape()
    first, second = tape.loss_values()
    assert {value.name for value in tape.gradient_sources(first)} == {"d.weight", "d.bias"}
    assert {value.name for value in tape.gradient_sources(second)} == {"d.weight", "d.bias", "g.weight", "g.bias"}
    assert [mark.data["name"] for mark in tape.marks if mark.kind == "optimizer_enter"] == ["optimizer2", "optimizer"]
    assert [(call.path, call.number) for call in tape.root_calls()] == [("g", 0), ("d", 0), ("d", 1), ("d", 2)]


def test_of_a_data_set_too_large_to_save_the_part_that_was_taken_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "MAX_CONSTANT_BYTES", 2000)
    model, x, y = mlp(), torch.randn(200, 8), torch.randn(200, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(3):
            chosen = torch.randint(200, (5,))
            loss = F.mse_loss(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tape = sonde.open_run(tmp_path / "run").tape()
    data = tape.given("input", "target")
    assert [(value.role, value.shape, value.saved) for value in data] == [
        ("input", (5, 8), True),
        ("target", (5, 3), True),
    ]
    assert not tape.incomplete


def test_evaluation_in_the_step_shows_its_mode(tmp_path):
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(3):
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 8))
            model.train()
            train(model, optimizer, 1)
    tape = sonde.open_run(tmp_path / "run").tape()
    evaluation, training = tape.root_calls()
    assert (evaluation.training, training.training) == (False, True)
    assert not any(op.grad_enabled for op in tape.ops[evaluation.first : evaluation.last])
    assert [mark.kind for mark in tape.marks if mark.kind in ("train", "eval")] == ["eval", "train"]


# ---------------------------------------------------------------------- when


def test_a_step_that_is_asked_for_is_taped(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run") as session:
        train(model, optimizer, 5)
        session.tape()
        train(model, optimizer, 3)
    tape = sonde.open_run(tmp_path / "run").tape()
    assert (tape.step, tape.reason) == (7, "asked")


def test_a_finding_asks_for_a_tape(tmp_path):
    model = nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    with watch(model, optimizer, run=tmp_path / "run") as session:
        for _ in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            session.flush()
    run = sonde.open_run(tmp_path / "run")
    assert "suspected" in {run.tape(step).reason for step in run.tapes()}


def test_without_tape_there_is_none_and_asking_for_one_is_an_error(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run", tape=False) as session:
        train(model, optimizer, 4)
        with pytest.raises(OptionError, match="tape"):
            session.tape()
    assert sonde.open_run(tmp_path / "run").tapes() == []


# ---------------------------------------------------------------------- harmless


def closure_loop(model, optimizer):
    x, y = torch.randn(10, 8), torch.randn(10, 3)
    for _ in range(4):

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def accumulating_loop(model, optimizer):
    for _ in range(4):
        for _ in range(3):
            (F.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 3)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def penalty_loop(model, optimizer):
    for _ in range(4):
        x = torch.randn(6, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = model(x).mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def teacher_loop(model, optimizer):
    teacher = copy.deepcopy(model)
    for _ in range(4):
        x = torch.randn(5, 8)
        with torch.inference_mode():
            target = teacher(x)
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), target.clone())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)


def functional_loop(model, optimizer):
    x, y = torch.randn(5, 8), torch.randn(5, 3)
    for _ in range(4):
        values = {name: each.detach() for name, each in model.named_parameters()}
        found = torch.func.grad(lambda given: F.mse_loss(torch.func.functional_call(model, given, (x,)), y))(values)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        optimizer.step()


def scaled_loop(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)  # the first steps are skipped
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(torch.randn(5, 8)), torch.randn(5, 3))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        (closure_loop, torch.optim.LBFGS),
        (accumulating_loop, torch.optim.Adam),
        (penalty_loop, torch.optim.RMSprop),
        (teacher_loop, torch.optim.AdamW),
        (functional_loop, torch.optim.Adam),
        (scaled_loop, torch.optim.SGD),
    ],
)
def test_loops_of_all_kinds_are_taped_and_train_bit_for_bit_the_same(tmp_path, loop, make):
    results = []
    for run in (None, tmp_path / "run"):
        torch.manual_seed(1)
        model = mlp()
        optimizer = make(model.parameters(), lr=0.01)
        with watch(model, optimizer, run=run) if run else contextlib.nullcontext():
            loop(model, optimizer)
        results.append([each.detach().clone() for each in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    run = sonde.open_run(tmp_path / "run")
    assert run.tapes()
    assert run.tape().ops
    assert not faults(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_compiled_code_stays_compiled_and_is_one_operation(tmp_path):
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        train(compiled, optimizer, 1)
        torch._dynamo.utils.counters.clear()
        train(compiled, optimizer, 3)
    assert not torch._dynamo.utils.counters["stats"], "nothing was compiled again"
    tape = sonde.open_run(tmp_path / "run").tape()
    (opaque,) = [op for op in tape.ops if op.name == "sonde.opaque.default"]
    assert list(opaque.outs) == tape.outputs_of_root()
    assert "compiled" in tape.incomplete


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_around_whole_steps_is_left_alone(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(4):
            with Counting() as mode:
                train(model, optimizer, 1)
            assert mode.count > 10
            assert torch._C._len_torch_dispatch_stack() == 0
    assert sonde.open_run(tmp_path / "run").tapes() == [], "there is no way in between two of their blocks"


def test_a_mode_that_is_entered_in_the_taped_step_and_left_after_it_ends_as_it_should(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        train(model, optimizer, 1)
        assert torch._C._len_torch_dispatch_stack() == 1
        with Counting() as mode:
            train(model, optimizer, 1)  # the tape ends here, below the user's mode
            assert torch._C._len_torch_dispatch_stack() == 1
            torch.ones(1)
        assert mode.count > 10
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    assert sonde.open_run(tmp_path / "run").tapes() == [2]


def test_an_exception_in_the_taped_step_is_the_users_and_the_tape_goes_on(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        train(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(5, 7))
        train(model, optimizer, 1)
    tape = sonde.open_run(tmp_path / "run").tape(2)
    assert any(mark.data.get("raised") for mark in tape.marks if mark.kind == "module_exit")
    assert len(tape.loss_values()) == 1
    assert tape.root_calls()[-1].outs


def test_a_session_closed_in_the_middle_of_a_step_leaves_nothing_behind(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = watch(model, optimizer, run=tmp_path / "run")
    train(model, optimizer, 1)
    F.mse_loss(model(torch.randn(5, 8)), torch.randn(5, 3)).backward()
    session.close()
    assert torch._C._len_torch_dispatch_stack() == 0
    optimizer.step()
    assert "session ended" in sonde.open_run(tmp_path / "run").tape(2).truncated


def test_a_tape_that_fails_is_dropped_with_one_note(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise ValueError("broken on purpose")

    monkeypatch.setattr(operations, "pack_plain", fail)
    monkeypatch.setattr(operations, "_SCHEMAS", {})
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, run=tmp_path / "run"):
        train(model, optimizer, 6)
    assert sonde.open_run(tmp_path / "run").tapes() == []
    assert len(faults(tmp_path / "run")) == 1
    assert "taping" in faults(tmp_path / "run")[0]


def test_a_step_with_too_many_operations_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "MAX_OPS", 20)
    tape = taped(tmp_path / "run")
    assert len(tape.ops) == 20
    assert "more than 20 operations" in tape.truncated


def test_a_model_too_large_to_save_is_taped_without_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder.TapeRecorder.__init__, "__kwdefaults__", {"max_bytes": 100})
    tape = taped(tmp_path / "run")
    assert not any(value.saved for value in tape.values)
    assert "nothing was saved" in tape.incomplete
    assert tape.loss_values()


def test_a_setting_that_is_a_number_of_numpy_is_written_as_a_plain_one(tmp_path):
    model = mlp()
    model.margin, model.lowest = np.float64(0.5), np.float64("-inf")
    tape = taped(tmp_path, model)
    (root,) = (module for module in tape.modules if not module.path or module.path == "(model)")
    assert (root.settings["margin"], root.settings["lowest"]) == (0.5, {"float": "-inf"})


def test_the_tape_keeps_no_activation_alive(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    import weakref

    with watch(model, optimizer, run=tmp_path / "run"):
        train(model, optimizer, 1, loss=lambda output, _: output.sum())
        with torch.no_grad():
            made = torch.randn(100, 100) * 2
            ref = weakref.ref(made)
            del made
        assert ref() is None
        train(model, optimizer, 1, loss=lambda output, _: output.sum())
    assert sonde.open_run(tmp_path / "run").tape(2).ops


def test_workers_of_a_loader_that_start_in_a_taped_step_are_not_taped(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 3))
    with watch(model, optimizer, run=tmp_path / "run"):
        train(model, optimizer, 1)
        for x, y in DataLoader(data, batch_size=8, num_workers=1):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    tape = sonde.open_run(tmp_path / "run").tape(2)
    assert [value.name for value in tape.given("input", "target")] == ["batch[0]", "batch[1]"]
    assert not faults(tmp_path / "run")


def test_every_reference_of_a_mark_is_a_value(tmp_path):
    tape = taped(tmp_path / "run")
    for mark in tape.marks:
        for part in mark.data.values():
            found = references(list(part.values()) if isinstance(part, dict) else part)
            assert all(0 <= each < len(tape.values) for each in found)
