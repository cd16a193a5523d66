"""The base class of all debuggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class BaseDebugger(ABC):
    """A debugger of a datapoint after its forward pass. Subclasses implement `__call__`.

    A datapoint is a dict with `inputs`, `outputs` and `meta_info` (whose `idx` names the sample, or the samples of a
    batch). The return value may nest dicts, lists, tuples, tensors, arrays, numbers and text.
    """

    @abstractmethod
    def __call__(self, datapoint: dict[str, Any], model: nn.Module) -> Any:
        """Return what to keep about this datapoint."""
