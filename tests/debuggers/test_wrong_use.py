"""What means nothing is refused with the culprit and the cure; what the documents promise of a capture is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.debuggers import (
    AttentionDebugger,
    FeatureMapDebugger,
    GradCAMDebugger,
    LayerOutputDebugger,
    SequentialDebugger,
)
from sonde.errors import ClosedError, OptionError


def described(debugger):
    return [{"name": "mine", "debugger_config": debugger}]


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.parametrize(
    ("debugger", "message"),
    [
        ({"class": FeatureMapDebugger}, r"'mine' has the keys \['class'\]; .*'args'"),
        (5, "'mine' is 5; give a debugger"),
    ],
)
def test_a_debugger_that_is_none_is_refused_by_its_name(model, debugger, message):
    with pytest.raises(OptionError, match=message):
        SequentialDebugger(described(debugger), model)


def test_an_error_about_wrong_arguments_of_a_debugger_names_it(model):
    with pytest.raises(OptionError, match=r"takes no argument 'layer' \(nearest: layer_name\)") as caught:
        SequentialDebugger(described({"class": FeatureMapDebugger, "args": {"layer": "0"}}), model)
    assert "building the debugger 'mine'" in caught.value.__notes__[0]


def test_one_description_is_a_list_of_one(model):
    with SequentialDebugger(described(FeatureMapDebugger("0"))[0], model) as debugger:
        assert list(debugger.debuggers) == ["mine"]


@pytest.mark.parametrize("size", [0, -1, "big", None])
def test_sizes_that_are_none_are_refused_by_their_names(model, size):
    with pytest.raises(OptionError, match="page_size_mb takes a number of megabytes above 0"):
        SequentialDebugger([], model, page_size_mb=size)


def test_parts_that_are_none_are_refused():
    with pytest.raises(OptionError, match=r"model takes a torch\.nn\.Module; got NoneType"):
        SequentialDebugger([], None)
    with pytest.raises(OptionError, match=r"layer_name takes a name .*; got 3"):
        FeatureMapDebugger(3)
    with pytest.raises(OptionError, match="downsample_factor is a whole number of 1 or more; got '2'"):
        LayerOutputDebugger("0", "2")


def test_a_closed_debugger_says_that_it_is_closed_whatever_it_is_asked(model, tmp_path):
    debugger = SequentialDebugger(described(FeatureMapDebugger("0")), model)
    debugger.close()
    for ask in (debugger.open, debugger.save_all):
        with pytest.raises(ClosedError, match=r"This debugger is closed\. Build another one"):
            ask(tmp_path)
    with pytest.raises(ClosedError, match="closed"):
        debugger.enabled = True


def test_a_model_that_computes_nothing_cannot_be_captured():
    model = nn.Linear(3, 3, device="meta")
    with (
        SequentialDebugger(described(FeatureMapDebugger("")), model) as debugger,
        pytest.raises(OptionError, match="Linear is on the meta device"),
    ):
        debugger.enabled = True


def test_grad_cam_without_inputs_says_what_it_needs(model):
    with pytest.raises(OptionError, match=r"datapoint\['inputs'\], which is not there; there are meta_info, outputs"):
        GradCAMDebugger("0")({"outputs": None, "meta_info": {}}, model)


def test_attention_is_reported_for_every_key(tmp_path):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    with SequentialDebugger(described(AttentionDebugger("")), model) as debugger, torch.no_grad():
        debugger.enabled = True
        x = torch.randn(3, 5, 4)
        model(x, x, x)
        outputs = debugger({"inputs": x, "meta_info": {"idx": [0, 1, 2]}}, model)
        debugger.save_all(tmp_path)
    found = outputs["mine"]["attention_stats"][1]["attention_distribution"]
    assert torch.allclose(found, outputs["mine"]["attention_map"][1].mean(1))
    assert torch.allclose(found.sum(-1), torch.ones(2)), "what all keys get is all there is"
