"""Grad-CAM: where a layer's features support a class (Selvaraju et al., 2017), on maps and on token grids."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.errors import OptionError, SondeError
from sonde.hooks.on_call import replace_output
from sonde.probes.maps.outputs import axis_from_layers, channel_axis
from sonde.probes.rerun import as_usual, eager, recompute, untouched

# --------------------------------------------------------------------------------
# Find the picture in a row of tokens: how many lead tokens there are, and how high and wide the grid is.


# A class token, a distillation token and up to 14 registers. More leftover tokens than that means another grid.
MAX_LEAD_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """`lead` tokens (class, registers), then `height` x `width` patches, row by row."""

    lead: int
    height: int
    width: int


def find_grid(num_tokens: int, image: tuple[int, int] | None) -> TokenGrid | None:
    """Return the grid with the fewest lead tokens that a picture of this size can be cut into; None if there is none.

    A patch is as high as it is wide, so the grid follows from the picture's shape; without a picture it is square.

    >>> find_grid(201, (224, 224))   # a class token and four registers before 14 x 14 patches
    TokenGrid(lead=5, height=14, width=14)
    >>> find_grid(33, (64, 128))
    TokenGrid(lead=1, height=4, width=8)
    """
    for shapes in _shapes(num_tokens, image):
        fitting = [(num_tokens - height * width, height, width) for height, width in shapes]
        fitting = [grid for grid in fitting if 0 <= grid[0] <= MAX_LEAD_TOKENS]
        if fitting:
            return TokenGrid(*min(fitting))
    return None


def _shapes(num_tokens: int, image: tuple[int, int] | None) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of possible grids, the likeliest list first."""
    if image is None:
        side = math.isqrt(num_tokens)
        yield [(side, side)]
        return
    height, width = image
    patches = range(1, min(height, width) + 1)
    yield [(height // patch, width // patch) for patch in patches if height % patch == width % patch == 0]
    yield [(height // patch, width // patch) for patch in patches]  # the rest of the picture is cut off,
    yield [(-(-height // patch), -(-width // patch)) for patch in patches]  # or it is padded


def picture_size(inputs: Any) -> tuple[int, int] | None:
    """Return the height and width of the first batch of pictures among nested inputs."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[-2], inputs.shape[-1]) if inputs.dim() >= 4 else None
    items = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, list | tuple) else ()
    return next((size for item in items if (size := picture_size(item)) is not None), None)


# --------------------------------------------------------------------------------


Target = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None
"""A class for all samples, one for each, None for the predicted one, or a function from outputs to a score each."""


class CamError(SondeError, RuntimeError):
    """Grad-CAM cannot be computed for this model, layer and output."""


@dataclass(frozen=True, slots=True)
class Cam:
    """Maps of every sample, not negative and not scaled; the classes they support; the scores explained.

    `reached` says per sample whether any gradient arrived at the places of the layer: a map of zeros may also mean that
    nothing there influences the score.
    """

    maps: Tensor
    classes: Tensor | None
    scores: Tensor
    reached: Tensor
    grid: TokenGrid | None


def grad_cam(
    model: nn.Module,
    layer: nn.Module,
    inputs: Any,
    target: Target = None,
    *,
    grid: tuple[int, int] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Cam:
    """Run the model again with gradients from `layer` on, and weigh the layer's features by what they do to the score.

    Works inside `no_grad` and `inference_mode`, and leaves the model as it was. `forward` calls the model;
    by default it is called with `inputs` alone.
    """
    with torch.inference_mode(False), torch.enable_grad(), untouched(model), eager(model):
        inputs = as_usual(inputs)
        features, gradient, scores, classes = recompute(
            lambda: _look(layer, lambda: (forward or _call)(model, inputs), target)
        )
    return _cam(layer, inputs, features, gradient, scores, classes, grid)


def _look(layer: nn.Module, call: Callable[[], Any], target: Target) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the layer's features, the gradient of the scores there, the scores, and the classes they belong to."""
    with _cut_at(layer) as cut:
        outputs = call()
    if cut.features is None:
        raise CamError(f"The layer ({type(layer).__name__}) did not run, or gave no tensor with places.")
    scores, classes = _scores(outputs, target)
    if not scores.requires_grad:
        raise CamError(
            "The score does not depend on the layer through gradients. Does the model's forward switch them off, "
            "or is the layer not on the way to the output?"
        )
    (gradient,) = torch.autograd.grad(scores.sum(), cut.features)
    return cut.features.detach(), gradient, scores.detach(), classes


def _call(model: nn.Module, inputs: Any) -> Any:
    return model(inputs)


class _Cut:
    """Where the graph begins: the layer's output as a leaf."""

    features: Tensor | None = None


@contextlib.contextmanager
def _cut_at(layer: nn.Module) -> Iterator[_Cut]:
    """Let autograd begin at the output of `layer`, so that it works with frozen layers and little memory."""
    cut = _Cut()
    with replace_output(layer, lambda output: _replace_first(output, cut)):
        yield cut


def _replace_first(output: Any, cut: _Cut) -> Any:
    """Return `output` with its first tensor of three or more axes made the beginning of the graph."""
    if isinstance(output, Tensor):
        if output.dim() < 3 or not output.is_floating_point():
            return output
        cut.features = output.detach().clone().requires_grad_()
        # A copy goes on, since the next layer may work in place and a leaf must stay as it is.
        return cut.features.clone()
    before = cut.features
    if isinstance(output, tuple | list):
        items = list(output)
        for index, item in enumerate(items):
            items[index] = _replace_first(item, cut)
            if cut.features is not before:
                break
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, dict):
        for key, item in output.items():
            replaced = _replace_first(item, cut)
            if cut.features is not before:
                output[key] = replaced
                break
    return output


def _scores(outputs: Any, target: Target) -> tuple[Tensor, Tensor | None]:
    """Return the score of every sample, and the class it belongs to where there is one."""
    if callable(target) and not isinstance(target, Tensor):
        return target(outputs).reshape(-1), None
    logits = _logits(outputs)
    if logits.dim() == 1:
        logits = logits.unsqueeze(1)
    if logits.dim() > 2:  # a class for every place: the mean over places represents the picture
        logits = logits.flatten(2).mean(-1)
    if logits.shape[1] == 1:
        return _binary(logits[:, 0], target)
    classes = logits.detach().argmax(1) if target is None else _classes(target, logits)
    return logits.gather(1, classes.unsqueeze(1)).squeeze(1), classes


def _binary(logits: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Read a single logit: it supports class 1 where it is positive, and class 0 where it is not."""
    given = (logits.detach() > 0).long() if target is None else _classes(target, logits.unsqueeze(1), num_classes=2)
    return torch.where(given == 1, logits, -logits), given


def _classes(target: Any, logits: Tensor, num_classes: int | None = None) -> Tensor:
    classes = torch.as_tensor(target, device=logits.device).long().reshape(-1)
    num_classes = num_classes or logits.shape[1]
    if classes.numel() == 1:
        classes = classes.expand(len(logits))
    if len(classes) != len(logits):
        raise OptionError(f"target_class names {len(classes)} classes for a batch of {len(logits)} samples.")
    if not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise OptionError(f"target_class is {target!r}, but the model tells {num_classes} classes apart.")
    return classes


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, dict):
        outputs = outputs.get("logits", next(iter(outputs.values()), None))
        return _logits(outputs)
    if isinstance(outputs, tuple | list) and outputs:
        return _logits(outputs[0])
    if isinstance(logits := getattr(outputs, "logits", None), Tensor):
        return logits
    raise CamError(
        f"No logits in the model's output ({type(outputs).__name__}). Pass target_class as a function that takes the "
        f"output and returns a score for each sample."
    )


def _cam(
    layer: nn.Module,
    inputs: Any,
    features: Tensor,
    gradient: Tensor,
    scores: Tensor,
    classes: Tensor | None,
    grid: tuple[int, int] | None,
) -> Cam:
    features, gradient, found = _as_maps(layer, inputs, features, gradient, len(scores), grid)
    places = tuple(range(2, features.dim()))
    weights = gradient.mean(dim=places, keepdim=True)
    maps = (weights * features).sum(1).relu()
    return Cam(maps, classes, scores, gradient.flatten(1).any(1), found)


def _as_maps(
    layer: nn.Module, inputs: Any, features: Tensor, gradient: Tensor, batch: int, grid: tuple[int, int] | None
) -> tuple[Tensor, Tensor, TokenGrid | None]:
    """Give features and gradient the shape [batch, channels, *places]."""
    if features.dim() > 3 or axis_from_layers(layer, features) == 1:
        axis = channel_axis(layer, features) or 1
        return features.movedim(axis, 1), gradient.movedim(axis, 1), None
    if features.shape[0] != batch and features.shape[1] == batch:  # tokens first
        features, gradient = features.transpose(0, 1), gradient.transpose(0, 1)
    found = _grid(features.shape[1], picture_size(inputs), grid)
    return _unroll(features, found), _unroll(gradient, found), found


def _unroll(tokens: Tensor, grid: TokenGrid) -> Tensor:
    patches = tokens[:, grid.lead :].transpose(1, 2)
    return patches.reshape(*patches.shape[:2], grid.height, grid.width)


def _grid(num_tokens: int, picture: tuple[int, int] | None, grid: tuple[int, int] | None) -> TokenGrid:
    if grid is not None:
        lead = num_tokens - grid[0] * grid[1]
        if lead < 0:
            raise OptionError(f"grid={grid} needs {grid[0] * grid[1]} tokens, but the layer gives {num_tokens}.")
        return TokenGrid(lead, *grid)
    found = find_grid(num_tokens, picture)
    if found is None:
        raise CamError(
            f"{num_tokens} tokens are no grid of patches of a picture of {picture} with at most {MAX_LEAD_TOKENS} "
            f"class and register tokens before it. Pass grid=(height, width)."
        )
    return found
