"""What a kernel does with many tensors when it can only take them one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sonde.signals import Arena
from sonde.stats.adapt import difference


class OneByOne(ABC):
    """Measures many tensors by measuring each."""

    @abstractmethod
    def measure_one(self, tensor: Tensor, row: int, arena: Arena, *, histogram: bool = True) -> bool:
        """Merge the summary of one tensor into a row; say whether the tensor could be read."""

    def measure(self, tensors: Sequence[Tensor], rows: Sequence[int], arena: Arena, *, histogram: bool = True) -> None:
        """Merge the summary of tensor i into row `rows[i]`."""
        for tensor, row in zip(tensors, rows, strict=True):
            self.measure_one(tensor, row, arena, histogram=histogram)

    @torch.no_grad()
    def measure_change(
        self,
        tensors: Sequence[Tensor],
        shadows: Sequence[Tensor],
        rows: Sequence[int],
        change_rows: Sequence[int],
        arena: Arena,
        *,
        histogram: bool = True,
    ) -> None:
        """Merge the summaries of the tensors and of their distance to the shadows, and bring the shadows up to date."""
        for tensor, shadow, row, change_row in zip(tensors, shadows, rows, change_rows, strict=True):
            self.measure_one(tensor, row, arena, histogram=histogram)
            change = difference(tensor, shadow)
            if change is not None:
                self.measure_one(change, change_row, arena, histogram=histogram)
                shadow.detach().copy_(tensor.detach())
