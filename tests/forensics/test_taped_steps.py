"""A taped step is repeated exactly: losses, gradients, updates and modes are those of the program itself."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tests.forensics.taped import STEPS, taped
from torch import nn

import sonde
from sonde.core import tape as tapes
from sonde.forensics.experiments import examine
from sonde.forensics.experiments.kernels import CannotRepeat, find
from sonde.forensics.experiments.optimizers import Rebuilt
from sonde.forensics.experiments.program import Change, Program


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(12, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, x):
        return self.out(self.cell(self.words(x))[0]).transpose(1, 2)


def pictures():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 5)
    )
    return net, F.cross_entropy, torch.randn(8, 3, 8, 8), torch.randint(5, (8,))


def sentences():
    return Recurrent(), F.cross_entropy, torch.randint(12, (4, 6)), torch.randint(12, (4, 6))


def attention():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 1)
    return net, F.mse_loss, torch.randn(4, 5, 16), torch.randn(4, 5, 16)


@pytest.mark.parametrize("make", [pictures, sentences, attention])
def test_a_repeated_step_has_the_loss_and_the_gradients_of_the_program(tmp_path, make):
    torch.manual_seed(0)
    model, loss_fn, x, y = make()
    seen = []
    keep = lambda: seen.append({name: each.grad.clone() for name, each in model.named_parameters()})  # noqa: E731
    program = Program(taped(tmp_path / "run", model, loss_fn, x, y, before_step=keep))
    world = program.world()
    gradients = program.gradients(world, program.repeat(world))
    assert gradients.keys() == seen[STEPS - 1].keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, seen[STEPS - 1][name])


@pytest.mark.parametrize("change", ["hidden", "weight", "state", "mode"])
def test_a_recurrent_layer_of_a_stranger_with_sizes_that_do_not_fit_is_not_run(change):
    hidden = 7
    arguments = [torch.randn(3, 4, 5), torch.randn(28, 5), torch.randn(28, 7), torch.randn(28), torch.randn(28)]
    arguments += [torch.randn(4, 7), torch.randn(4, 7), False, [], 2, hidden, 1, True, False, False, True]
    layer = find("aten.mkldnn_rnn_layer.default")
    assert layer(*arguments)[0].shape == (3, 4, 7)
    place, wrong = {
        "hidden": (10, 1 << 16), "weight": (2, torch.randn(28, 1)), "state": (6, torch.randn(1, 1)), "mode": (9, 3),
    }[change]  # fmt: skip
    arguments[place] = wrong
    with pytest.raises(CannotRepeat, match="sizes"):
        layer(*arguments)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_is_made_again_with_its_groups_state_and_clipping(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = OPTIMIZERS[kind](model.parameters())
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # noqa: E731
    tape = taped(tmp_path / "run", model, F.cross_entropy, torch.randn(16, 6), torch.randint(3, (16,)), optimizer, clip)
    program = Program(tape)
    world = program.world()
    for name, gradient in program.gradients(world, program.repeat(world)).items():
        world.parameters[name].grad = gradient
    Rebuilt(program, world).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(world.parameters[name].detach(), parameter.detach())


def test_evaluation_mode_is_that_of_the_modules(tmp_path):
    torch.manual_seed(0)
    model, loss_fn, x, y = pictures()
    tape = taped(tmp_path / "run", model, loss_fn, x, y, torch.optim.SGD(model.parameters(), lr=0.0))
    program = Program(tape)
    repeated = program.repeat(program.world(), Change(eval_mode=True)).loss
    # The tape has the running statistics from before its last step, the model those from after it.
    model.train()
    for norm in (each for each in model if isinstance(each, nn.BatchNorm2d)):
        value = next(each for each in tape.given("buffer") if each.name.endswith("running_mean"))
        norm.running_mean.copy_(program.saved(value.id))
        value = next(each for each in tape.given("buffer") if each.name.endswith("running_var"))
        norm.running_var.copy_(program.saved(value.id))
    model.eval()
    torch.testing.assert_close(repeated, loss_fn(model(x), y))


def test_a_second_forward_draws_other_masks_only_if_asked_to(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    program = Program(taped(tmp_path / "run", model, F.cross_entropy, torch.randn(16, 6), torch.randint(3, (16,))))
    world = program.world()
    first, same, other = (
        float(program.repeat(world, each).loss.detach()) for each in (Change(), Change(), Change(redraw=True))
    )
    assert first == same != other


def test_buffers_that_the_step_writes_to_change_in_the_world_only_if_asked_to(tmp_path):
    torch.manual_seed(0)
    model, loss_fn, x, y = pictures()
    program = Program(taped(tmp_path / "run", model, loss_fn, x, y))
    world = program.world()
    number = next(each.id for each in program.tape.given("buffer") if each.name.endswith("running_mean"))
    before = world.values[number].clone()
    program.repeat(world)
    assert torch.equal(world.values[number], before)
    program.repeat(world, keep_buffers=True)
    assert not torch.equal(world.values[number], before)


def test_a_step_that_cannot_be_repeated_says_why(tmp_path):
    model = nn.Linear(6, 3)
    tape = taped(tmp_path / "run", model, F.cross_entropy, torch.randn(16, 6), torch.randint(3, (16,)))
    lacking = msgspec.structs.replace(tape, incomplete="tensors that did not fit were not saved")
    assert "did not fit" in examine(lacking).note
    other = msgspec.structs.replace(tape)
    other.folder = tape.folder
    root = tape.loss_values()[0]
    other.__dict__["tensors"] = {**tape.tensors, f"v{root}": tape.tensors[f"v{root}"] + 1}
    assert "repeated loss" in examine(other).note


def test_an_operation_with_effects_beyond_its_tensors_is_refused():
    for name in ("aten.from_file.default", "aten.set_.source_Storage", "prim.device.default", "aten.nonsense.default"):
        with pytest.raises(CannotRepeat):
            find(name)


def test_training_is_bit_identical_while_a_step_is_taped_and_examined(tmp_path):
    def train(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, y = torch.randn(16, 6), torch.randint(3, (16,))
        session = sonde.watch(model, optimizer, run=tmp_path / "run", diagnose=True, enabled=watched)
        for step in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if watched and step == 4:
                examine(tapes.read(tapes.find(tmp_path / "run")), only=["learnability"])
        session.close()
        return [each.detach().clone() for each in model.parameters()]

    assert all(torch.equal(one, two) for one, two in zip(train(True), train(False), strict=True))
