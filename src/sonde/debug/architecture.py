"""What a module is made of, found by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sonde.debug.model_diagnostics import ModelArchitectureInfo
from sonde.debug.numbers import as_array
from sonde.errors import OptionError
from sonde.hooks.names import unwrap

_SPATIAL: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
)
# These look at each place by itself, or only scale: they do not widen what an output sees.
_POINTWISE: Final = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
)


def describe_architecture(model: nn.Module, example: Any = None) -> ModelArchitectureInfo:
    """Describe a module. With an example input its operations are counted, in one forward without gradients.

    The model's mode, its buffers and the random state are as before.
    """
    model = unwrap(model)
    parameters = list(model.parameters())
    buffers = list(model.buffers())
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    names = [name for name, _ in model.named_modules()]
    return ModelArchitectureInfo(
        total_parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        model_size_mb=sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *buffers)) / 2**20,
        layer_count=len(leaves),
        layer_types=dict(Counter(type(leaf).__name__ for leaf in leaves)),
        depth=max((name.count(".") + 1 for name in names if name), default=0),
        dtypes=_dtypes(parameters),
        flops_per_forward=None if example is None else count_flops(model, example),
        receptive_field=receptive_field(model),
    )


def count_flops(model: nn.Module, example: Any) -> int:
    """Count the operations of one forward: torch's own count, of matrix products, convolutions and attention."""
    modes = [(module, module.training) for module in model.modules()]
    args = example if isinstance(example, tuple) else (example,)
    devices = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    counter = FlopCounterMode(display=False)
    model.eval()  # batch norms must not learn from an example
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), counter:
            model(**example) if isinstance(example, dict) else model(*args)
    finally:
        for module, training in modes:
            module.training = training
    return int(counter.get_total_flops())


def receptive_field(model: nn.Module) -> tuple[int, ...] | None:
    """Return how much of the input the last spatial layer of a plain chain sees; None where there is no such chain."""
    if not isinstance(model, nn.Sequential):
        return None
    field: list[int] | None = None
    jump: list[int] = []
    for module in _chain(model):
        if isinstance(module, _SPATIAL):
            kernel, stride, dilation = (_sizes(module, name) for name in ("kernel_size", "stride", "dilation"))
            if field is None:
                field, jump = [1] * len(kernel), [1] * len(kernel)
            for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
                field[axis] += (size - 1) * gap * jump[axis]
                jump[axis] *= step
        elif not isinstance(module, _POINTWISE):
            break  # a flatten, an attention: places lose their meaning from here on
    return None if field is None else tuple(field)


def _chain(model: nn.Sequential) -> list[nn.Module]:
    found: list[nn.Module] = []
    for module in model:
        found += _chain(module) if isinstance(module, nn.Sequential) else [module]
    return found


def _sizes(module: nn.Module, name: str) -> tuple[int, ...]:
    dims = int(type(module).__name__[-2])
    value = getattr(module, name, 1)
    if value is None:  # a pooling's stride is its kernel by default
        value = module.kernel_size
    return (int(value),) * dims if isinstance(value, int) else tuple(int(part) for part in value)  # type: ignore[union-attr]


def _dtypes(parameters: list[nn.Parameter]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(counts)


DEAD_SHARE: Final = 1e-6
"""A unit whose norm is below this part of the median one does not contribute."""
TWIN_COSINE: Final = 0.999
_MAX_UNITS: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightAnalysis:
    """A weight by its units (rows)."""

    name: str
    units: int
    mean: float
    std: float
    smallest_norm: float
    median_norm: float
    largest_norm: float
    dead: tuple[int, ...]
    twins: tuple[tuple[int, int], ...] | None
    """Pairs of units that point the same way, at most 100; None if there are too many units to compare all pairs."""
    effective_rank: float
    """How many directions the rows really span: the exponential of the entropy of the singular values."""


def analyze_weights(weight: Any, name: str = "weight") -> WeightAnalysis:
    """Analyse a weight `[units, ...]`.

    Raises:
        OptionError: It has fewer than two dimensions, or elements that are not finite.

    """
    array = as_array(weight, name).astype(np.float64)
    if array.ndim < 2 or not array.size:
        raise OptionError(f"{name}: units are the rows of a weight with two dimensions or more; got {array.shape}.")
    if not np.isfinite(array).all():
        raise OptionError(f"{name} has elements that are not finite; inspect_tensor tells how many.")
    rows = array.reshape(len(array), -1)
    norms = np.linalg.norm(rows, axis=1)
    median = float(np.median(norms))
    return WeightAnalysis(
        name=name,
        units=len(rows),
        mean=float(rows.mean()),
        std=float(rows.std(ddof=1)) if rows.size > 1 else 0.0,
        smallest_norm=float(norms.min()),
        median_norm=median,
        largest_norm=float(norms.max()),
        dead=tuple(int(unit) for unit in np.flatnonzero(norms <= DEAD_SHARE * max(median, 1e-300))),
        twins=_twins(rows, norms) if len(rows) <= _MAX_UNITS else None,
        effective_rank=_effective_rank(rows),
    )


def _twins(rows: Any, norms: Any) -> tuple[tuple[int, int], ...]:
    alive = norms > 0
    unit = np.divide(rows, norms[:, None], out=np.zeros_like(rows), where=alive[:, None])
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) > TWIN_COSINE)
    return tuple((int(a), int(b)) for a, b in zip(first[:100], second[:100], strict=True))


def _effective_rank(rows: Any) -> float:
    values = np.linalg.svd(rows[:_MAX_UNITS], compute_uv=False)
    total = values.sum()
    if total == 0:
        return 0.0
    share = values[values > 0] / total
    return float(np.exp(-(share * np.log(share)).sum()))


Pattern = Literal["diagonal", "uniform", "focused", "mixed"]
_DIAGONAL: Final = 0.5
_UNIFORM: Final = 0.9
_FOCUSED: Final = 0.3
REDUNDANT: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHead:
    """One head."""

    head: int
    entropy: float
    """Mean over rows of the entropy, as a part of the largest possible: 0 looks at one place, 1 at all alike."""
    diagonal: float
    """Mean weight on a token itself and its neighbours."""
    most_attended: int
    """The place that gets the most attention."""
    most_attended_share: float
    pattern: Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAnalysis:
    """All heads of a layer."""

    heads: tuple[AttentionHead, ...]
    redundant: tuple[tuple[int, int], ...]
    """Pairs of heads whose maps are nearly the same (cosine of 0.95 or more)."""


def analyze_attention(weights: Any) -> AttentionAnalysis:
    """Analyse attention weights `[batch, heads, queries, keys]` or `[heads, queries, keys]`.

    Raises:
        OptionError: They have another shape, or rows that do not add up to 1.

    """
    array = as_array(weights, "attention weights").astype(np.float64)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or not array.size:
        raise OptionError(f"Attention weights have shape [batch, heads, queries, keys]; got {array.shape}.")
    if not np.allclose(array.sum(-1), 1.0, atol=1e-2):
        raise OptionError("The rows of attention weights add up to 1; these do not. Are they scores before softmax?")
    maps = array.mean(0)
    heads = tuple(_head(index, array[:, index]) for index in range(array.shape[1]))
    flat = maps.reshape(len(maps), -1)
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) >= REDUNDANT)
    return AttentionAnalysis(heads=heads, redundant=tuple((int(a), int(b)) for a, b in zip(first, second, strict=True)))


def _head(index: int, weights: NDArray[np.float64]) -> AttentionHead:
    keys = weights.shape[-1]
    logs = np.log(np.where(weights > 0, weights, 1.0))
    entropy = float(-(weights * logs).sum(-1).mean() / np.log(keys)) if keys > 1 else 0.0
    queries = np.arange(weights.shape[-2])[:, None]
    near = np.abs(np.arange(keys)[None, :] - queries) <= 1
    diagonal = float((weights * near).sum(-1).mean())
    received = weights.mean((0, 1))
    top = int(received.argmax())
    return AttentionHead(
        head=index,
        entropy=entropy,
        diagonal=diagonal,
        most_attended=top,
        most_attended_share=float(received[top]),
        pattern=_pattern(entropy, diagonal, keys),
    )


def _pattern(entropy: float, diagonal: float, keys: int) -> Pattern:
    # Of few keys three neighbours are most anyway.
    if diagonal > max(_DIAGONAL, 6.0 / keys):
        return "diagonal"
    if entropy > _UNIFORM:
        return "uniform"
    return "focused" if entropy < _FOCUSED else "mixed"


def loss_gradients(model: nn.Module, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of each loss over all trainable parameters, as one row; `.grad` is left alone.

    The graph is kept, so that `backward` can follow.

    Example:
        gradients = loss_gradients(model, {"class": class_loss, "box": box_loss})
        debugger.analyze_gradient_conflicts(gradients)

    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = {}
    for name, loss in losses.items():
        found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts = [
            torch.zeros_like(parameter).flatten() if gradient is None else gradient.detach().flatten()
            for parameter, gradient in zip(parameters, found, strict=True)
        ]
        rows[name] = torch.cat(parts)
    return rows
