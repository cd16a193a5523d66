"""Vital signs of weights by rows: units that ever had a gradient, and units that are all the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.taps.plain import is_plain, is_real, sample_columns
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import ROW_SPREAD, UNIT_GRADIENT

SPREAD_STEPS: Final = (0, 1, 5, 20)
FIRST_GRADIENT: Final = 5
GRADIENT_EVERY: Final = 10
# What happened to no unit in fifty steps is looked for less often.
THIN_AFTER: Final = 50
THIN_EVERY: Final = 100
# Weights larger than this cost more to read than their rows are worth.
MAX_BYTES: Final = 64 << 20


@dataclass(slots=True, eq=False)
class _Rows:
    name: str
    parameter: Parameter
    reached: Tensor | None = None
    complete: bool = False


class WeightRows:
    """Looks at the rows of weights of two or more dimensions, in few steps."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._rows: dict[int, _Rows] = {}

    def follow(self, name: str, parameter: Parameter) -> None:
        """Begin to look at a parameter if it has rows."""
        if is_real(parameter) and parameter.dim() > 1 and len(parameter) > 1 and parameter.nbytes <= MAX_BYTES:
            self._rows[id(parameter)] = _Rows(name, parameter)

    def clear(self) -> None:
        """Forget the parameters."""
        self._rows.clear()

    @torch.no_grad()
    def see_spread(self, step: int, parameters: list[Parameter] | None = None) -> None:
        """Write how the rows of weights differ, if this step is one to look at."""
        if step not in SPREAD_STEPS:
            return
        for rows in self._chosen(parameters):
            weight = sample_columns(rows.parameter)
            whole = weight.std(correction=0)
            between = weight.var(0, correction=0).mean().sqrt()
            self._sites.see(rows.name, ROW_SPREAD, (between / whole).where(whole > 0, 0))

    @torch.no_grad()
    def see_gradients(self, step: int, parameters: list[Parameter]) -> None:
        """Write which rows ever had a gradient, if this step is one to look at."""
        period = GRADIENT_EVERY if step <= THIN_AFTER else THIN_EVERY
        if step % period != FIRST_GRADIENT:
            return
        for rows in self._chosen(parameters):
            grad = rows.parameter.grad
            if grad is not None and is_plain(grad):
                self._see_gradient(rows, grad)

    def _see_gradient(self, rows: _Rows, grad: Tensor) -> None:
        if rows.complete:
            return  # it stays so, and has been written
        now = torch.linalg.vector_norm(grad.detach().flatten(1), math.inf, dim=1) != 0
        before = rows.reached
        rows.reached = now if before is None or before.device != now.device else before | now
        # Reading an answer waits on a device, but not on the CPU.
        rows.complete = now.device.type == "cpu" and bool(rows.reached.all())
        self._sites.see(rows.name, UNIT_GRADIENT, rows.reached)

    def _chosen(self, parameters: list[Parameter] | None) -> list[_Rows]:
        if parameters is None:
            return list(self._rows.values())
        return [rows for each in parameters if (rows := self._rows.get(id(each))) is not None]
