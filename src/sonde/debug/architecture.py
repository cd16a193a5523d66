"""What a model is made of, how well it uses its parameters, and how its attention heads behave."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sonde.debug.model_diagnostics import ModelArchitectureInfo
from sonde.debug.numbers import as_array, is_extended
from sonde.errors import OptionError
from sonde.hooks.names import unwrap

_MAX_WEIGHTS: Final = 100
_MOST_ROWS: Final = 256

_SPATIAL: Final = re.compile(r"(Conv|MaxPool|AvgPool)[123]d")
# These look at each place by itself, or only scale: they do not widen what an output sees.
_POINTWISE: Final = re.compile(r"ReLU|LeakyReLU|ELU|GELU|SiLU|Sigmoid|Tanh|Identity|(Dropout|BatchNorm)([123]d)?")


def describe_architecture(model: nn.Module) -> ModelArchitectureInfo:
    """Describe a module."""
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
        receptive_field=receptive_field(model),
    )


def receptive_field(model: nn.Module) -> tuple[int, ...] | None:
    """Return how much of the input the last spatial layer of a plain chain sees; None where there is no such chain."""
    if not isinstance(model, nn.Sequential):
        return None
    field: list[int] | None = None
    jump: list[int] = []
    for module in _chain(model):
        if _is_a(module, _SPATIAL):
            kernel, stride, dilation = (_sizes(module, name) for name in ("kernel_size", "stride", "dilation"))
            if field is None:
                field, jump = [1] * len(kernel), [1] * len(kernel)
            for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
                field[axis] += (size - 1) * gap * jump[axis]
                jump[axis] *= step
        elif not _is_a(module, _POINTWISE):
            break  # a flatten, an attention: places lose their meaning from here on
    return None if field is None else tuple(field)


def _is_a(module: nn.Module, names: re.Pattern[str]) -> bool:
    """Return whether a module is of one of torch's classes, or of one derived from them."""
    classes = (each for each in type(module).__mro__ if each.__module__.startswith("torch.nn"))
    return any(names.fullmatch(each.__name__) for each in classes)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """How much of a weight is used. Of large weights evenly chosen rows and columns are looked at, 256 of each."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    effective_rank: float
    """How many directions its rows span, from its singular values."""
    full_rank: int
    """How many they could span."""
    dead_units: int
    """Rows that are zero, or too small to change a sum with the largest."""
    redundant_units: int
    """Rows that are another one times a factor, but for rounding."""
    needed: int
    """How many parameters it has without dead and redundant units, or two layers of its effective rank, if fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureEvaluation:
    """How well a model uses its parameters."""

    parameter_efficiency: float | None
    """Needed over present parameters of the weights that were looked at; None without any."""
    dead_parameters: int
    redundant_parameters: int
    bottleneck: str | None
    """The weight that spans the smallest share of the directions it could span."""
    weights: tuple[WeightUse, ...]
    """The largest weights first."""
    suggestions: tuple[str, ...]
    """What could be left out, with its cause and what it saves."""


def evaluate_architecture(model: nn.Module) -> ArchitectureEvaluation:
    """Evaluate how well a model uses its weights: dead and redundant units, and the rank of each by singular values.

    At most the 100 largest weights are looked at. The model is only read; parameters that are spread over several
    processes are left out.
    """
    weights = {name: each for name, each in unwrap(model).named_parameters() if _can_be_evaluated(each)}
    largest = sorted(weights.items(), key=lambda item: -item[1].numel())[:_MAX_WEIGHTS]
    found = tuple(use for name, weight in largest if (use := _use_of(name, weight)) is not None)
    total = sum(use.parameters for use in found)
    narrow = min(found, key=lambda use: use.effective_rank / use.full_rank, default=None)
    return ArchitectureEvaluation(
        parameter_efficiency=sum(use.needed for use in found) / total if total else None,
        dead_parameters=sum(use.dead_units * (use.parameters // use.shape[0]) for use in found),
        redundant_parameters=sum(use.redundant_units * (use.parameters // use.shape[0]) for use in found),
        bottleneck=None if narrow is None else narrow.name,
        weights=found,
        suggestions=tuple(itertools.chain.from_iterable(_suggest(use, total) for use in found)),
    )


def _can_be_evaluated(weight: nn.Parameter) -> bool:
    plain = not weight.is_meta and weight.layout == torch.strided and not hasattr(weight, "to_local")
    return plain and weight.dim() > 1 and weight.is_floating_point() and min(weight.shape[0], weight[0].numel()) > 1


@torch.no_grad()
def _use_of(name: str, weight: nn.Parameter) -> WeightUse | None:
    rows = weight.detach().flatten(1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).cpu().numpy()
    if not np.isfinite(norms).all():
        return None
    some = rows[_evenly(len(rows))][:, _evenly(rows.shape[1])].double().cpu().numpy()
    resolution = max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps)
    copies = len({second for _, second in twins(some, resolution)})
    dead = int((norms <= resolution * norms.max()).sum())
    rank, (height, width) = effective_rank(some), rows.shape
    return WeightUse(
        name=name,
        shape=tuple(weight.shape),
        parameters=weight.numel(),
        effective_rank=rank,
        full_rank=min(some.shape),
        dead_units=dead,
        redundant_units=copies,
        needed=min((height - dead - copies) * width, math.ceil(rank) * (height + width)),
    )


def _evenly(size: int) -> Tensor:
    """Return a limited number of places, evenly spread."""
    return torch.linspace(0, size - 1, min(size, _MOST_ROWS)).round().long()


def _suggest(use: WeightUse, total: int) -> Iterator[str]:
    each = use.parameters // use.shape[0]
    unused = {"dead": use.dead_units, "copies of another": use.redundant_units}
    for word, count in unused.items():
        if count:
            share = count * each / total
            yield (
                f"{count} of {use.shape[0]} units of {use.name} are {word}: without them the model has "
                f"{count * each:,} parameters fewer ({share:.1%})."
            )
    saved = use.parameters - use.needed
    if saved > each * (use.dead_units + use.redundant_units):
        yield (
            f"{use.name} spans about {use.effective_rank:.0f} of {use.full_rank} directions: two layers of that width "
            f"hold the same in {use.needed:,} instead of {use.parameters:,} parameters ({saved / total:.1%} of the "
            "model fewer)."
        )


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


# ------------------------------------------------------------------ weights by their units, attention by its heads

Pattern = Literal["diagonal", "uniform", "focused", "mixed"]

_MAX_UNITS: Final = 2048
_MAX_TWINS: Final = 100
# These name the shape of a map and judge nothing: the doctor's rule on attention has its own thresholds.
_DIAGONAL: Final = 0.5
_UNIFORM: Final = 0.9
_FOCUSED: Final = 0.3
_ALIKE: Final = 0.95


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
    """Units whose weights are zero, or too small to change a sum with the largest unit's."""
    twins: tuple[tuple[int, int], ...] | None
    """Pairs of units that differ by a factor and rounding only, at most 100; None for more than 2,048 units."""
    effective_rank: float
    """How many directions the rows really span: the exponential of the entropy of the singular values."""


def analyze_weights(weight: Any, name: str = "weight") -> WeightAnalysis:
    """Analyse a weight `[units, ...]`.

    Raises:
        OptionError: It has fewer than two dimensions, or elements that are not finite.

    """
    given = as_array(weight, name)
    array = given.astype(np.float64)
    if array.ndim < 2 or not array.size:
        raise OptionError(f"{name}: units are the rows of a weight with two dimensions or more; got {array.shape}.")
    if not np.isfinite(array).all():
        raise OptionError(f"{name} has elements that are not finite; inspect_tensor counts them.")
    rows = array.reshape(len(array), -1)
    norms = np.linalg.norm(rows, axis=1)
    resolution = resolution_of(given.dtype)
    return WeightAnalysis(
        name=name,
        units=len(rows),
        mean=float(rows.mean()),
        std=float(rows.std(ddof=1)) if rows.size > 1 else 0.0,
        smallest_norm=float(norms.min()),
        median_norm=float(np.median(norms)),
        largest_norm=float(norms.max()),
        dead=tuple(int(unit) for unit in np.flatnonzero(norms <= resolution * norms.max())),
        twins=tuple(twins(rows, resolution)[:_MAX_TWINS]) if len(rows) <= _MAX_UNITS else None,
        effective_rank=effective_rank(rows[:_MAX_UNITS]),
    )


def resolution_of(dtype: np.dtype[Any]) -> float:
    """Return the smallest relative difference that a type can hold, and at least that of float32."""
    is_float = dtype.kind == "f" or is_extended(dtype)
    known = float(ml_dtypes.finfo(dtype).eps) if is_float else 0.0  # type: ignore[no-untyped-call] # no types
    return max(known, float(np.finfo(np.float32).eps))


def twins(rows: NDArray[np.float64], resolution: float) -> list[tuple[int, int]]:
    """Return the pairs of rows that point the same way, but for rounding."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) >= 1 - resolution)
    return [(int(a), int(b)) for a, b in zip(first, second, strict=True)]


def effective_rank(rows: NDArray[np.float64]) -> float:
    """Return how many directions rows span: the exponential of the entropy of the singular values (Roy & Vetterli)."""
    values = np.linalg.svd(rows, compute_uv=False)
    total = values.sum()
    if total == 0:
        return 0.0
    share = values[values > 0] / total
    return float(np.exp(-(share * np.log(share)).sum()))


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
    first, second = np.nonzero(np.triu(unit @ unit.T, 1) >= _ALIKE)
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
