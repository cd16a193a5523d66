"""Keep statistics of a layer's output instead of the output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.samples import per_sample
from sonde.hooks.unpack import unpack
from sonde.probes import dense, sample_statistics


class ActivationStatsDebugger(ForwardDebugger):
    """Captures statistics of every sample and every channel: of feature maps, or of the features of tokens.

    All numbers of a call reach the host in one transfer. The first `num_values` values are kept, too.
    """

    def __init__(self, layer_name: str, num_values: int = 100) -> None:
        super().__init__(layer_name)
        self.num_values = num_values

    def process_forward(self, module: nn.Module, input: Any, output: Any) -> dict[str, Any]:
        """Return the statistics."""
        parts = unpack(output)
        facts: dict[str, Any] = {"layer_name": self.layer_name, "module_type": type(module).__name__}
        if not parts:
            return facts | {"error": f"the output holds no tensor ({type(output).__name__})"}
        if isinstance(output, Tensor):
            return facts | self._look(output, module)
        return facts | {"parts": {part: self._look(tensor, module) for part, tensor in parts}}

    def _look(self, tensor: Tensor, module: nn.Module) -> dict[str, Any]:
        rows = dense(tensor).reshape(tensor.shape[0] if tensor.dim() else 1, -1)
        return {
            "activation_stats": per_sample(sample_statistics(tensor, module)),
            "sample_values": per_sample(list(rows[:, : self.num_values].clone())),
        }
