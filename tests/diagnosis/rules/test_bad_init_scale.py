from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train


@pytest.mark.parametrize(("std", "ill"), [(8.0, True), (1e-4, True), (0.25, False)])
def test_weights_that_begin_far_off_are_found(tmp_path, std, ill):
    model = perceptron(torch.nn.Tanh)
    for layer in (model[0], model[2], model[4]):
        torch.nn.init.normal_(layer.weight, std=std)
        torch.nn.init.zeros_(layer.bias)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=40)
    assert ("bad_init_scale" in kinds(found)) is ill


def deep(gain):
    layers = [torch.nn.Linear(16, 16) for _ in range(7)]
    if gain is not None:
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=gain / 4)
            torch.nn.init.zeros_(layer.bias)
    hidden = [each for layer in layers for each in (layer, torch.nn.ReLU())]
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), *hidden, torch.nn.Linear(16, 3))


@pytest.mark.parametrize(("gain", "ill"), [(0.2, True), (1.41, False), (None, False)])
def test_gains_that_are_small_only_together_are_found(tmp_path, gain, ill):
    torch.manual_seed(0)
    model = deep(gain)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.02), *data(), steps=40)
    assert ("bad_init_scale" in kinds(found)) is ill


@pytest.mark.parametrize(("scale", "severity"), [(0.01, "warning"), (1.0, None)])
def test_weights_that_have_to_grow_tenfold_first_are_a_warning_though_the_run_learns(tmp_path, scale, severity):
    model = perceptron()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=0.01), *data(), steps=80)
    assert next((each.severity for each in found if each.kind == "bad_init_scale"), None) == severity


@pytest.mark.parametrize(("scale", "ill"), [(0.01, True), (1.0, False)])
def test_norms_whose_own_scales_are_almost_nothing_do_not_help(tmp_path, scale, ill):
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=40)
    assert ("bad_init_scale" in kinds(found, notes=False)) is ill


@pytest.mark.parametrize(("std", "ill"), [(1.5, True), (0.25, False)])
def test_large_weights_of_a_recurrent_model_show_in_its_first_loss(tmp_path, std, ill):
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.head = torch.nn.GRU(1, 16, batch_first=True), torch.nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.gru(x[..., None])[0][:, -1])

    torch.manual_seed(0)
    model = Recurrent()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    x, _ = data()
    target = x[:, -1:] / 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = train(tmp_path, model, optimizer, x, target, steps=60, loss_fn=torch.nn.functional.mse_loss)
    assert ("bad_init_scale" in kinds(found, notes=False)) is ill


@pytest.mark.parametrize(("shift", "layers", "ill"), [(-10.0, 3, True), (-10.0, 1, False), (1.0, 3, False)])
def test_biases_that_outweigh_their_inputs_are_found_but_not_that_of_a_single_layer(tmp_path, shift, layers, ill):
    model = perceptron()
    with torch.no_grad():
        for layer in (model[4], model[2], model[0])[:layers]:
            layer.bias.add_(shift)
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.05), *data(), steps=40)
    assert ("bad_init_scale" in kinds(found, notes=False)) is ill


class Unrolled(torch.nn.Module):
    """Calls one layer for every step of time."""

    def __init__(self, gain):
        super().__init__()
        self.read, self.carry, self.head = torch.nn.Linear(1, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 3)
        torch.nn.init.orthogonal_(self.carry.weight, gain=gain)

    def forward(self, x):
        state = x.new_zeros(len(x), 16)
        for time in range(x.shape[1]):
            state = torch.relu(self.read(x[:, time : time + 1]) + self.carry(state))
        return self.head(state)


@pytest.mark.parametrize(("gain", "ill"), [(3.0, True), (1.0, False)])
def test_a_layer_that_grows_from_call_to_call_is_found(tmp_path, gain, ill):
    torch.manual_seed(0)
    model = Unrolled(gain)
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=1e-3), *data(features=12), steps=12)
    grown = [finding for finding in found if finding.kind == "bad_init_scale"]
    assert [finding.sites for finding in grown] == ([("carry",)] if ill else [])


@pytest.mark.parametrize(("steps", "severity"), [(40, "warning"), (1200, "info")])
def test_a_bad_beginning_is_a_note_where_little_of_the_run_is_lost(tmp_path, steps, severity):
    model = perceptron(torch.nn.ReLU)
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.weight.mul_(12)
    found = train(tmp_path, model, torch.optim.Adam(model.parameters(), lr=0.05), *data(), steps=steps)
    (each,) = (each for each in found if each.kind in ("bad_init_scale", "large_initial_loss"))
    assert each.severity == severity
