"""What every debugger is: a callable that looks at one datapoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class BaseDebugger(ABC):
    """Looks at a datapoint after the forward pass. One method to write: `__call__`.

    A datapoint is a dict with `inputs`, `outputs` and `meta_info` (whose `idx` names the sample, or the samples of a
    batch). What is returned may nest dicts, lists, tuples, tensors, arrays, numbers and text.
    """

    @abstractmethod
    def __call__(self, datapoint: dict[str, Any], model: nn.Module) -> Any:
        """Return what to keep about this datapoint."""
