"""All gradients or all parameters of a model, read at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor, nn

from sonde import schema
from sonde.core import statistics
from sonde.hooks.names import named_parameters
from sonde.probes.readings import readings_of
from sonde.records import Reading


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that are there, by the name of their parameter."""
    found = named_parameters({"": model})
    return {name: parameter.grad for name, parameter, _ in found if parameter.grad is not None}


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name; a tied one has the first of its names."""
    return {name: parameter for name, parameter, _ in named_parameters({"": model}) if not _is_lazy(parameter)}


def read_gradients(model: nn.Module) -> dict[str, Reading]:
    """Return the readings of all gradients by name."""
    return readings_of(gradients(model))


def read_parameters(model: nn.Module) -> dict[str, Reading]:
    """Return the readings of all parameters by name."""
    return readings_of(parameters(model))


def total_norm(readings: Iterable[Reading]) -> float:
    """Return the Euclidean norm of all elements together; NaN or infinite if any of them is.

    >>> total_norm([Reading.of([3.0]), Reading.of([4.0])])
    5.0
    """
    rows = np.array([reading.row for reading in readings])
    if not len(rows):
        return 0.0
    if rows[:, schema.NAN].any():
        return math.nan
    if statistics.nonfinite(rows).any():
        return math.inf
    return math.hypot(*statistics.norm(rows)[rows[:, schema.COUNT] > 0].tolist())


def _is_lazy(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter)
