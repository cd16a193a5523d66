"""The debuggers that come with the package, inside a sequence and with real modules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.probes.models import SmallConvNet, SmallSwin, SmallViT
from torch import nn

from sonde.debuggers import (
    ActivationStatsDebugger,
    AttentionDebugger,
    EmbeddingDebugger,
    FeatureMapDebugger,
    GradCAMDebugger,
    LayerOutputDebugger,
    SequentialDebugger,
)
from sonde.errors import OptionError, SelectionError
from sonde.testing import assert_no_taps


def run(model, inputs, **debuggers):
    """Return what each debugger says about a batch, by sample."""
    config = [{"name": name, "debugger_config": each} for name, each in debuggers.items()]
    ids = list(range(len(inputs)))
    with SequentialDebugger(config, model, strict=True) as debugger, torch.no_grad():
        debugger.enabled = True
        dp = {"inputs": inputs, "outputs": model(inputs), "meta_info": {"idx": ids}}
        debugger(dp, model)
        found = debugger.current_page_data
    assert_no_taps(model)
    return [found[idx] for idx in ids]


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_feature_maps_are_whole_with_numbers_for_each_sample(images):
    model = SmallConvNet().eval()
    found = run(model, images, maps=FeatureMapDebugger("conv2"))
    with torch.no_grad():
        expected = model.conv2(model.relu(model.norm(model.conv1(images))))
    for index, sample in enumerate(found):
        torch.testing.assert_close(sample["maps"]["feature_map"], expected[index : index + 1])
        stats = sample["maps"]["stats"]
        assert stats["shape"] == [1, 8, 8, 8]
        for name in ("mean", "std", "min", "max"):
            assert stats[name] == pytest.approx(float(getattr(expected[index], name)()), rel=1e-4)


def test_maps_of_several_tensors_are_named_by_their_part():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 6, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    (sample, *_) = run(Wrapped(), torch.randn(2, 5, 4), maps=FeatureMapDebugger("rnn"))
    assert list(sample["maps"]["feature_map"]) == ["[0]", "[1][0]", "[1][1]"]
    assert sample["maps"]["feature_map"]["[0]"].shape == (1, 5, 6)


def test_statistics_are_of_channels_for_maps_and_of_features_for_tokens(images):
    convs = run(SmallConvNet().eval(), images, stats=ActivationStatsDebugger("conv1"))
    tokens = run(SmallViT().eval(), images, stats=ActivationStatsDebugger("blocks.0", num_values=5))
    assert len(convs[0]["stats"]["activation_stats"]["channel_means"]) == 6
    assert len(tokens[0]["stats"]["activation_stats"]["channel_means"]) == 16
    assert len(tokens[0]["stats"]["sample_values"]) == 5
    assert convs[1]["stats"]["module_type"] == "Conv2d"


def test_outputs_are_made_smaller(images):
    found = run(
        SmallConvNet().eval(),
        images,
        quarter=LayerOutputDebugger("conv1"),
        far=LayerOutputDebugger("conv1", downsample_factor=99),
        whole=LayerOutputDebugger("conv1", downsample_factor=1),
        vector=LayerOutputDebugger("head"),
    )[0]
    assert {name: tuple(found[name]["output"].shape) for name in found} == {
        "quarter": (1, 6, 4, 4),
        "far": (1, 6, 1, 1),
        "whole": (1, 6, 16, 16),
        "vector": (1, 5),
    }
    assert [found[name]["downsampled"] for name in found] == [True, True, False, False]
    with pytest.raises(OptionError, match="downsample_factor"):
        LayerOutputDebugger("x", downsample_factor=0)


def test_embeddings_are_vectors_of_features(images):
    conv = run(SmallConvNet().eval(), images, e=EmbeddingDebugger("conv2"))[0]["e"]["embedding"]
    tokens = run(SmallViT().eval(), images, e=EmbeddingDebugger("blocks.1", token=0))[0]["e"]["embedding"]
    assert conv.shape == (1, 8)
    assert tokens.shape == (1, 16)


def test_fused_attention_is_written_out_and_checked(images):
    model = SmallViT().eval()
    found = run(model, images, attention=AttentionDebugger("blocks.1"))
    for sample in found:
        weights, stats = sample["attention"]["attention_map"], sample["attention"]["attention_stats"]
        assert weights.shape == (1, 2, 19, 19)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 19))
        assert sample["attention"]["source"] == "recomputed"
        assert stats["max_difference"] < 1e-5
        assert stats["entropy"].shape == stats["peak"].shape == (2,)
        assert (stats["entropy"] <= math.log(19) + 1e-4).all()


def test_several_attentions_in_one_layer_are_numbered_and_some_heads_chosen(images):
    found = run(SmallViT().eval(), images, attention=AttentionDebugger("blocks", heads=[1], rows=[0]))
    assert list(found[0]["attention"]) == ["#0", "#1"]
    assert found[0]["attention"]["#1"]["attention_map"].shape == (1, 1, 1, 19)


@pytest.mark.parametrize("layer", ["attend", ""])
def test_multi_head_attention_gives_its_weights_although_not_asked(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.attend(x, x, value=x, need_weights=False)[0]

    model, x = Model().eval(), torch.randn(3, 6, 16)
    found = run(model, x, attention=AttentionDebugger(layer))
    _, expected = model.attend(x, x, x, average_attn_weights=False)
    for index, sample in enumerate(found):
        torch.testing.assert_close(sample["attention"]["attention_map"], expected[index : index + 1].detach())
        assert sample["attention"]["attention_stats"]["max_difference"] < 1e-5


def test_returned_weights_are_taken_as_they_are():
    class Attend(nn.Module):
        def forward(self, x):
            weights = torch.softmax(x @ x.transpose(-2, -1), -1)
            return weights @ x, weights

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = Attend()

        def forward(self, x):
            return self.attend(x)[0]

    sample = run(Model(), torch.randn(2, 5, 4), attention=AttentionDebugger("attend"))[0]["attention"]
    assert sample["source"] == "returned"
    assert sample["attention_map"].shape == (1, 1, 5, 5)


def test_a_layer_without_attention_says_so(images):
    sample = run(SmallConvNet().eval(), images, attention=AttentionDebugger("conv1"))[0]["attention"]
    assert "neither returns attention weights" in sample["error"]


def test_the_scope_of_attention_ends_when_the_layer_fails():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("inside")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Failing()

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                return F.scaled_dot_product_attention(x, x, x)

    model, attention = Model(), AttentionDebugger("inner")
    sample = run(model, torch.randn(2, 4, 3), attention=attention)[0]
    assert "did not run" in sample["attention"]["error"]
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize(
    ("model", "layer", "shape"),
    [(SmallConvNet, "conv2", (1, 8, 8)), (SmallViT, "blocks.0", (1, 4, 4)), (SmallSwin, "stage", (1, 4, 4))],
)
def test_grad_cam_finds_its_way_in_every_kind_of_model(images, model, layer, shape):
    network = model().eval()
    found = run(network, images, cam=GradCAMDebugger(layer))
    with torch.no_grad():
        logits = network(images)
    for index, sample in enumerate(found):
        assert sample["cam"]["gradcam"].shape == shape
        assert sample["cam"]["target_class"] == int(logits[index].argmax())
        assert sample["cam"]["score"] == pytest.approx(float(logits[index].max()), rel=1e-4)
        assert sample["cam"]["gradcam_stats"]["shape"] == list(shape)


def test_grad_cam_says_what_it_cannot_do(images):
    blind = run(SmallViT().eval(), images, cam=GradCAMDebugger("blocks.1"))[0]["cam"]
    assert "No gradient reaches" in blind["note"]
    with pytest.raises(SelectionError, match="nearest"):
        run(SmallConvNet().eval(), images, cam=GradCAMDebugger("conv3"))


def test_grad_cam_does_not_disturb_the_captures_of_others(images):
    model = SmallConvNet().eval()
    alone = run(model, images, maps=FeatureMapDebugger("conv2"))
    beside = run(model, images, cam=GradCAMDebugger("conv1"), maps=FeatureMapDebugger("conv2"))
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one["maps"]["feature_map"], other["maps"]["feature_map"])


def test_training_is_bit_identical_with_and_without_debuggers(images):
    def train(debuggers):
        torch.manual_seed(1)
        model = SmallConvNet()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        config = [{"name": name, "debugger_config": each} for name, each in debuggers.items()]
        with SequentialDebugger(config, model) as debugger:
            for _ in range(3):
                model.train()
                loss = F.cross_entropy(model(images), torch.tensor([0, 1, 2]))
                optimizer.zero_grad()
                loss.backward()
                model.eval()
                debugger.enabled = True
                with torch.no_grad():
                    dp = {"inputs": images, "outputs": model(images), "meta_info": {"idx": [0, 1, 2]}}
                    debugger(dp, model)
                debugger.enabled = False
                optimizer.step()
        return [value.clone() for value in model.state_dict().values()], torch.rand(2)

    everything = {
        "maps": FeatureMapDebugger("conv1"),
        "stats": ActivationStatsDebugger("norm"),
        "cam": GradCAMDebugger("conv2"),
        "attention": AttentionDebugger("head"),
    }
    (bare, drawn), (watched, drawn_too) = train({}), train(everything)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert torch.equal(drawn, drawn_too)
