"""Grad-CAM against a reference written by hand, and the promise that nothing is touched."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from tests.probes.models import SmallConvNet, SmallSwin, SmallViT
from torch import nn

import sonde
from sonde.errors import OptionError
from sonde.probes import CamError, find_grid, grad_cam
from sonde.testing import MemorySink, assert_no_taps


def reference(model, layer_name, inputs, classes=None, lead=0, grid=None, channels_last=False):
    """Grad-CAM on a copy of the model, one sample at a time, with `backward` and loops."""
    maps = []
    for index in range(len(inputs)):
        clone = copy.deepcopy(model)
        kept = {}
        layer = dict(clone.named_modules())[layer_name]

        def keep(module, args, output, kept=kept):
            output.retain_grad()
            kept["features"] = output
            return output.clone()

        layer.register_forward_hook(keep)
        logits = clone(inputs[index : index + 1])
        chosen = int(logits.argmax()) if classes is None else classes[index]
        logits[0, chosen].backward()
        features, gradient = kept["features"][0].detach(), kept["features"].grad[0]
        if grid is not None:
            features, gradient = (t[lead:].T.reshape(-1, *grid) for t in (features, gradient))
        if channels_last:
            features, gradient = (t.permute(2, 0, 1) for t in (features, gradient))
        cam = torch.zeros(features.shape[1:])
        for channel in range(len(features)):
            cam += gradient[channel].mean() * features[channel]
        maps.append(cam.clamp_min(0))
    return torch.stack(maps)


@pytest.fixture
def images():
    torch.manual_seed(3)
    return torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize("layer", ["conv1", "norm", "conv2"])
@pytest.mark.parametrize("classes", [None, 2, [0, 4, 1, 3]])
def test_maps_of_a_conv_net_equal_the_reference(images, layer, classes):
    model = SmallConvNet().eval()
    with torch.no_grad():
        cam = grad_cam(model, model.get_submodule(layer), images, classes)
    each = [classes] * 4 if isinstance(classes, int) else classes
    torch.testing.assert_close(cam.maps, reference(model, layer, images, each), rtol=1e-4, atol=1e-6)
    assert cam.maps.max() > 0
    assert cam.classes.tolist() == (model(images).argmax(1).tolist() if classes is None else each)


@pytest.mark.parametrize("layer", ["blocks.0", "blocks.1.norm1", "blocks.0.mlp"])
def test_the_token_grid_of_a_vit_is_found(images, layer):
    model = SmallViT().eval()
    with torch.no_grad():
        cam = grad_cam(model, model.get_submodule(layer), images)
    assert (cam.grid.lead, cam.grid.height, cam.grid.width) == (3, 4, 4)
    torch.testing.assert_close(cam.maps, reference(model, layer, images, lead=3, grid=(4, 4)), rtol=1e-4, atol=1e-6)


def test_a_layer_that_patches_do_not_leave_says_so(images):
    model = SmallViT().eval()
    cam = grad_cam(model, model.blocks[1], images)
    assert not cam.reached.any()  # only the class token goes on from here
    assert grad_cam(model, model.blocks[0], images).reached.all()


@pytest.mark.parametrize("layer", ["stage", "stage.0", "stage.1"])
def test_maps_with_channels_last_are_understood(images, layer):
    model = SmallSwin().eval()
    cam = grad_cam(model, model.get_submodule(layer), images)
    torch.testing.assert_close(cam.maps, reference(model, layer, images, channels_last=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "image", "expected"),
    [
        (196, (224, 224), (0, 14, 14)),
        (197, (224, 224), (1, 14, 14)),
        (201, (224, 224), (5, 14, 14)),
        (257, (224, 224), (1, 16, 16)),
        (1 + 8 * 4, (128, 64), (1, 8, 4)),
        (1 + 14 * 14, (230, 230), (1, 14, 14)),
        (1 + 15 * 15, (230, 230), (1, 15, 15)),
        (50, None, (1, 7, 7)),
        (5, (3, 500), None),
    ],
)
def test_grids_follow_from_the_number_of_tokens_and_the_picture(tokens, image, expected):
    grid = find_grid(tokens, image)
    assert (None if grid is None else (grid.lead, grid.height, grid.width)) == expected


def everything_about(model, inputs):
    return (
        {name: (value.clone(), value._version) for name, value in model.state_dict(keep_vars=True).items()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        inputs.clone(),
        inputs.requires_grad,
        torch.is_grad_enabled(),
    )


def assert_equal(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, tuple | list):
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


class Restless(SmallConvNet):
    """Draws random numbers of every kind, and replaces a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        random.random()
        np.random.rand()
        self.last = x.mean().detach().reshape(1)
        return super().forward(x) + torch.rand(1)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [SmallConvNet, Restless])
def test_nothing_is_touched(images, make, training, grad_mode):
    model = make().train(training)
    model.norm.eval()  # a frozen norm inside a model in training, say
    model.conv2.requires_grad_(False)
    model(images).sum().backward()
    before = everything_about(model, images)
    with grad_mode():
        inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        grad_cam(model, model.conv2, images)
        assert inside == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert_equal(before[1:], everything_about(model, images)[1:])
    for name, (value, version) in before[0].items():
        now = model.state_dict(keep_vars=True)[name]
        assert torch.equal(now, value), name
        if not training:
            assert now._version == version, name
    assert_no_taps(model)


def test_batch_norm_statistics_survive_a_model_in_training(images):
    model = SmallConvNet().train()
    mean, seen = model.norm.running_mean.clone(), model.norm.num_batches_tracked.clone()
    identity = model.norm.running_mean
    grad_cam(model, model.conv2, images)
    assert torch.equal(model.norm.running_mean, mean)
    assert torch.equal(model.norm.num_batches_tracked, seen)
    assert model.norm.running_mean is identity


def test_nothing_is_touched_when_the_model_fails(images):
    model = SmallConvNet().train()
    before = everything_about(model, images)
    with pytest.raises(RuntimeError):
        grad_cam(model, model.conv1, images[:, :1])
    assert_equal(before, everything_about(model, images))
    assert_no_taps(model)


def test_a_frozen_model_has_maps_too(images):
    model = SmallConvNet().eval()
    expected = grad_cam(model, model.conv2, images).maps
    model.requires_grad_(False)
    torch.testing.assert_close(grad_cam(model, model.conv2, images).maps, expected)


def test_inputs_made_in_inference_mode_are_taken(images):
    model = SmallConvNet().eval()
    with torch.inference_mode():
        cam = grad_cam(model, model.conv2, images * 1)
    torch.testing.assert_close(cam.maps, grad_cam(model, model.conv2, images).maps)


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: (x, None), lambda x: [x]])
def test_logits_are_found_in_usual_outputs(images, wrap):
    class Wrapped(SmallConvNet):
        def forward(self, x):
            return wrap(super().forward(x))

    model = Wrapped().eval()
    plain = SmallConvNet().eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(grad_cam(model, model.conv2, images).maps, grad_cam(plain, plain.conv2, images).maps)


def test_a_single_logit_supports_the_predicted_side(images):
    model = SmallConvNet(classes=1).eval()
    cam = grad_cam(model, model.conv2, images)
    assert cam.classes.tolist() == (model(images)[:, 0] > 0).long().tolist()
    assert torch.equal(cam.scores, model(images)[:, 0].abs().detach())


def test_segmentation_explains_the_mean_over_places(images):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1)).eval()
    cam = grad_cam(model, model[0], images, 1)
    torch.testing.assert_close(cam.scores, model(images)[:, 1].mean((1, 2)).detach())
    assert cam.maps.shape == (4, 16, 16)


def test_a_function_may_score_anything(images):
    model = SmallConvNet().eval()
    cam = grad_cam(model, model.conv2, images, lambda logits: logits[:, 2])
    torch.testing.assert_close(cam.maps, grad_cam(model, model.conv2, images, 2).maps)
    assert cam.classes is None


def test_signals_and_volumes_have_maps_of_their_own_rank():
    signal = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3))
    volume = nn.Sequential(nn.Conv3d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 3))
    assert grad_cam(signal, signal[0], torch.randn(2, 2, 9)).maps.shape == (2, 7)
    assert grad_cam(volume, volume[0], torch.randn(2, 2, 5, 6, 7)).maps.shape == (2, 3, 4, 5)


def test_a_layer_that_works_in_place_afterwards_does_not_change_the_features(images):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    torch.testing.assert_close(grad_cam(model, model[0], images).maps, reference(model, "0", images))


@pytest.mark.parametrize("target", [9, -1, [0, 1]])
def test_classes_that_are_not_there_are_refused(images, target):
    model = SmallConvNet().eval()
    with pytest.raises(OptionError, match="target_class"):
        grad_cam(model, model.conv2, images, target)


def test_what_cannot_be_explained_says_why(images):
    class Closed(SmallConvNet):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    closed = Closed().eval()
    with pytest.raises(CamError, match="switch them off"):
        grad_cam(closed, closed.conv2, images)
    model = SmallConvNet().eval()
    with pytest.raises(CamError, match="did not run"):
        grad_cam(model, nn.Conv2d(3, 3, 1), images)
    with pytest.raises(CamError, match="did not run, or gave no tensor with places"):
        grad_cam(model, model.head, images)
    with pytest.raises(OptionError, match="grid="):
        vit = SmallViT().eval()
        grad_cam(vit, vit.blocks[0], images, grid=(9, 9))


def test_a_compiled_model_is_run_as_it_was_written(images):
    model = SmallConvNet().eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images)
        found = grad_cam(compiled, model.conv2, images).maps
    torch.testing.assert_close(found, grad_cam(model, model.conv2, images).maps)


def test_a_session_that_watches_the_model_sees_nothing_of_it(images, tmp_path):
    sink = MemorySink()
    model = SmallConvNet().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sonde.watch(model, optimizer, run=tmp_path / "run", on_error="raise") as session:
        session.subscribe(sink)
        model(images).sum().backward()
        model.eval()
        with torch.no_grad():
            grad_cam(model, model.conv2, images)
        optimizer.step()
    assert sink.readings("conv1:output")[1].count == 4 * 6 * 16 * 16


def test_captum_agrees(images):
    captum = pytest.importorskip("captum.attr")
    model = SmallConvNet().eval()
    theirs = captum.LayerGradCam(model, model.conv2).attribute(images, target=2, relu_attributions=True)
    torch.testing.assert_close(
        grad_cam(model, model.conv2, images, 2).maps, theirs[:, 0].detach(), rtol=1e-4, atol=1e-6
    )


def test_pytorch_grad_cam_agrees(images):
    peer = pytest.importorskip("pytorch_grad_cam")
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model = SmallConvNet().eval()
    model.relu = nn.ReLU()  # the peer keeps references, which a ReLU that works in place would change
    maps = grad_cam(model, model.conv2, images, 2).maps
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    ours = nn.functional.interpolate(((maps - low) / (1e-7 + high - low))[:, None], (16, 16), mode="bilinear")[:, 0]
    with peer.GradCAM(model, [model.conv2]) as cam:
        theirs = torch.from_numpy(cam(images, [ClassifierOutputTarget(2)] * 4))
    torch.testing.assert_close(ours / ours.amax((1, 2), keepdim=True), theirs, rtol=1e-2, atol=1e-2)
