"""What a module is made of, found by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sonde.debug.diagnostics_records import ModelArchitectureInfo
from sonde.names import unwrap

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
