from __future__ import annotations

import pytest
import torch
from programs import data, kinds, perceptron, train

import sonde


def test_a_label_beyond_the_last_class_is_named_when_torch_refuses_it(tmp_path):
    x, y = data(classes=4)
    model = perceptron(classes=3)
    with pytest.raises(IndexError):
        train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    assert "label_out_of_range" in kinds(sonde.open_run(tmp_path / "run").findings)


def test_labels_that_fit_are_fine(tmp_path):
    model = perceptron()
    found = train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), *data(), steps=10)
    assert "label_out_of_range" not in kinds(found)
