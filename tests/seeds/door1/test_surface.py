"""Every attribute and every key of a capture that users of the documented debuggers rely on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.debuggers import (
    ActivationStatsDebugger,
    AttentionDebugger,
    BaseDebugger,
    FeatureMapDebugger,
    ForwardDebugger,
    GradCAMDebugger,
    LayerOutputDebugger,
    SequentialDebugger,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        tokens = torch.relu(self.conv(x)).flatten(2).transpose(1, 2)
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


READY = {
    "features": (FeatureMapDebugger("conv"), {"feature_map", "stats", "layer_name"}),
    "attention": (AttentionDebugger("attention"), {"attention_map", "attention_stats", "layer_name"}),
    "statistics": (
        ActivationStatsDebugger("conv"),
        {"layer_name", "module_type", "activation_stats", "sample_values"},
    ),
    "raw": (
        LayerOutputDebugger("conv", 2),
        {"layer_name", "original_shape", "output", "downsampled", "downsample_factor"},
    ),
    "gradcam": (GradCAMDebugger("conv", None), {"gradcam", "target_layer", "target_class", "gradcam_stats"}),
}
INSIDE = {
    ("features", "stats"): {"mean", "std", "min", "max", "shape"},
    ("attention", "attention_stats"): {"entropy", "max_attention", "attention_distribution"},
    ("statistics", "activation_stats"): {
        *("shape", "mean", "std", "min", "max", "l1_norm", "l2_norm", "sparsity", "positive_ratio"),
        *("saturation_low", "saturation_high", "channel_means", "channel_stds"),
    },
    ("gradcam", "gradcam_stats"): {"mean", "std", "shape"},
}


@pytest.fixture(scope="module")
def outputs():
    torch.manual_seed(0)
    model = Net().eval()
    config = [{"name": name, "debugger_config": debugger} for name, (debugger, _) in READY.items()]
    with SequentialDebugger(config, model) as debugger, torch.no_grad():
        debugger.enabled = True
        x = torch.randn(1, 1, 8, 8)
        return debugger({"inputs": x, "outputs": model(x), "meta_info": {"idx": [0]}}, model)


@pytest.mark.parametrize("name", READY)
def test_a_capture_has_every_documented_key(outputs, name):
    assert READY[name][1] <= set(outputs[name])


@pytest.mark.parametrize("place", INSIDE, ids="-".join)
def test_its_numbers_have_every_documented_key(outputs, place):
    name, inside = place
    assert INSIDE[place] <= set(outputs[name][inside])


def test_a_sequential_debugger_has_every_documented_attribute():
    model = Net()
    with SequentialDebugger([{"name": "a", "debugger_config": FeatureMapDebugger("conv")}], model) as debugger:
        assert (debugger.enabled, debugger.page_size, debugger.output_dir) == (False, 100 * 1024**2, None)
        assert (debugger.current_page_idx, debugger.current_page_size, debugger.current_page_data) == (0, 0, {})
        assert list(debugger.debuggers) == ["a"]
        assert [len(each) for each in debugger.forward_debuggers.values()] == [1]
        assert debugger._buffer_thread.is_alive()
        assert debugger._buffer_queue.empty()
        assert debugger({"meta_info": {"idx": 0}}, model) == {}, "while it is disabled"
    assert isinstance(debugger, BaseDebugger)
    assert FeatureMapDebugger("conv").last_capture is None
    for abstract in (BaseDebugger, lambda: ForwardDebugger("conv")):
        with pytest.raises(TypeError, match="abstract"):
            abstract()
