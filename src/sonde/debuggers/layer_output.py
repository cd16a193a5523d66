"""Keep a layer's output, downsampled."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.samples import per_sample
from sonde.errors import OptionError
from sonde.hooks.unpack import unpack
from sonde.probes import dense, downsample


class LayerOutputDebugger(ForwardDebugger):
    """Captures outputs averaged over windows of `downsample_factor` positions along every spatial axis."""

    def __init__(self, layer_name: str, downsample_factor: int = 4) -> None:
        super().__init__(layer_name)
        given: Any = downsample_factor
        if not isinstance(given, int) or given < 1:
            raise OptionError(f"downsample_factor is a whole number of 1 or more; got {given!r}.")
        self.downsample_factor = downsample_factor

    def process_forward(self, module: nn.Module, input: Any, output: Any) -> dict[str, Any]:
        """Return the downsampled output."""
        facts: dict[str, Any] = {"layer_name": self.layer_name}
        if isinstance(output, Tensor):
            return facts | self._shrink(output, module)
        parts = unpack(output)
        if not parts:
            return facts | {"error": f"the output holds no tensor ({type(output).__name__})"}
        return facts | {"parts": {part: self._shrink(tensor, module) for part, tensor in parts}}

    def _shrink(self, tensor: Tensor, module: nn.Module) -> dict[str, Any]:
        smaller = downsample(dense(tensor), self.downsample_factor, module)
        alike = {
            "original_shape": [1, *tensor.shape[1:]] if tensor.dim() else [],
            "downsampled": smaller.shape != tensor.shape,
            "downsample_factor": self.downsample_factor,
        }
        num_samples = len(tensor) if tensor.dim() else 1
        return {"output": smaller} | {name: per_sample([value] * num_samples) for name, value in alike.items()}
