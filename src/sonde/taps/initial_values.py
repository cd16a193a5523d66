"""What the values of parameters say before training: constants, equal rows, copies of each other.

Runs once, when a session attaches, and may wait for devices then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from sonde.taps.plain import is_real

# Reading this much takes about a tenth of a second. Small parameters are always looked at.
BUDGET_BYTES: Final = 512 << 20
ALWAYS_BYTES: Final = 1 << 16


@dataclass(slots=True, eq=False)
class InitialValues:
    """What was found about one parameter; all is false where it was not looked at."""

    constant: bool = False
    zero: bool = False
    equal_rows: bool = False
    equal_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    name: str
    tensor: Tensor
    numbers: tuple[float, ...]
    """Smallest, largest, a weighted sum, and whether the first two rows are the same."""


@torch.no_grad()
def look_at(parameters: Sequence[tuple[str, Parameter]]) -> dict[str, InitialValues]:
    """Look at parameters by name, within a budget of bytes."""
    looked = _fingerprints(_within_budget(parameters))
    found = {each.name: _judge(each) for each in looked}
    groups: dict[object, list[_Looked]] = {}
    for each in looked:
        # Zeros and ones are alike without having been copied.
        if not found[each.name].constant:
            key = (tuple(each.tensor.shape), each.tensor.dtype, each.tensor.device, each.numbers)
            groups.setdefault(key, []).append(each)
    for group in groups.values():
        for each in group if len(group) > 1 else ():
            twins = (other for other in group if other is not each and torch.equal(other.tensor, each.tensor))
            found[each.name].equal_to = tuple(other.name for other in twins)
    return found


def _within_budget(parameters: Sequence[tuple[str, Parameter]]) -> list[tuple[str, Tensor]]:
    left = BUDGET_BYTES
    chosen = []
    for name, parameter in parameters:
        if not is_real(parameter) or not parameter.numel():
            continue
        if parameter.nbytes <= ALWAYS_BYTES or parameter.nbytes <= left:
            left -= parameter.nbytes
            chosen.append((name, parameter.detach()))
    return chosen


def _fingerprints(chosen: list[tuple[str, Tensor]]) -> list[_Looked]:
    numbers: dict[torch.device, list[Tensor]] = {}
    for _, tensor in chosen:
        numbers.setdefault(tensor.device, []).append(_fingerprint(tensor))
    # One wait per device, not one per parameter.
    rows = {device: iter(torch.stack(some).to("cpu")) for device, some in numbers.items()}
    return [_Looked(name, tensor, tuple(float(x) for x in next(rows[tensor.device]))) for name, tensor in chosen]


def _fingerprint(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    total = tensor.sum(dtype=torch.float32)
    rows = tensor[:2].flatten(1) if tensor.dim() > 1 and len(tensor) > 1 else None
    same = (rows[0] == rows[1]).all() if rows is not None else torch.zeros_like(low)
    return torch.stack([low.float(), high.float(), total.float(), same.float()])


def _judge(each: _Looked) -> InitialValues:
    low, high, _, same = each.numbers
    constant = low == high and each.tensor.numel() > 1
    rows = each.tensor.flatten(1) if each.tensor.dim() > 1 else None
    equal_rows = bool(same) and rows is not None and bool((rows == rows[:1]).all())
    return InitialValues(constant=constant, zero=low == 0 == high, equal_rows=equal_rows)
