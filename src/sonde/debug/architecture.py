"""What a model is made of, and how well it uses its parameters."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sonde.debug.model_diagnostics import ModelArchitectureInfo
from sonde.debug.weights import effective_rank, twins
from sonde.hooks.names import unwrap

_MAX_WEIGHTS: Final = 100
_MOST_ROWS: Final = 256

_SPATIAL: Final = re.compile(r"(Conv|MaxPool|AvgPool)[123]d")
# These look at each place by itself, or only scale: they do not widen what an output sees.
_POINTWISE: Final = re.compile(r"ReLU|LeakyReLU|ELU|GELU|SiLU|Sigmoid|Tanh|Identity|(Dropout|BatchNorm)([123]d)?")


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
