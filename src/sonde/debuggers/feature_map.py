"""Keep a layer's output with a few statistics."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.debuggers.samples import per_sample
from sonde.hooks.unpack import unpack
from sonde.probes import brief_statistics


class FeatureMapDebugger(ForwardDebugger):
    """Captures feature maps: the whole output of a layer, and mean, std, min and max of every sample.

    A layer that returns several tensors (an LSTM, a dict of scales) gives a map for each, named by its part.
    """

    def process_forward(self, module: nn.Module, input: Any, output: Any) -> dict[str, Any]:
        """Return the maps and their statistics."""
        if isinstance(output, Tensor):
            return {
                "feature_map": output.detach(),
                "stats": per_sample(brief_statistics(output)),
                "layer_name": self.layer_name,
            }
        parts = unpack(output)
        if not parts:
            return {"error": f"the output holds no tensor ({type(output).__name__})", "layer_name": self.layer_name}
        return {
            "feature_map": {part: tensor.detach() for part, tensor in parts},
            "stats": {part: per_sample(brief_statistics(tensor)) for part, tensor in parts},
            "layer_name": self.layer_name,
        }
