from __future__ import annotations

import copy

import pytest
from programs import data, kinds, train
from torch import nn, optim


def stack(how):
    layer = nn.Linear(16, 16)
    layers = [copy.deepcopy(layer) for _ in range(3)] if how == "deepcopy" else [layer] * 3
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *[each for one in layers for each in (one, nn.ReLU())])
    return nn.Sequential(model, nn.Linear(16, 3))


@pytest.mark.parametrize("how", ["reference", "deepcopy"])
def test_a_layer_that_was_multiplied_is_found(tmp_path, how):
    model = stack(how)
    found = train(tmp_path, model, optim.Adam(model.parameters(), lr=1e-3), *data())
    assert ("layer_repeated" in kinds(found)) is (how == "reference")
    if how == "reference":
        named = next(each for each in found if each.kind == "layer_repeated")
        assert named.sites == ("0.2", "0.4", "0.6")


def test_tied_weights_and_a_layer_that_is_called_twice_are_no_repeated_layers(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)])
            self.again = self.layers[0]

        def forward(self, x):
            return self.layers[1](self.again(self.layers[0](x).relu()).relu())

    model = Tied()
    found = train(tmp_path, model, optim.Adam(model.parameters(), lr=1e-3), *data())
    assert "layer_repeated" not in kinds(found)


def test_a_list_whose_embedding_and_output_layer_share_their_weight_repeats_no_layer(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)])
            self.parts[2].weight = self.parts[0].weight

        def forward(self, x):
            words, mix, out = self.parts
            return out(mix(words(x.argmax(1))).relu())

    model = Words()
    found = train(tmp_path, model, optim.Adam(model.parameters(), lr=1e-3), *data())
    assert "layer_repeated" not in kinds(found)
