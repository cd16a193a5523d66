"""Keep one feature vector per sample."""

from __future__ import annotations

from typing import Any

from torch import nn

from sonde.debuggers.forward_debugger import ForwardDebugger
from sonde.hooks.unpack import unpack
from sonde.probes import dense, pooled_features


class EmbeddingDebugger(ForwardDebugger):
    """Captures the features of a layer as one vector: the mean over positions or tokens, or one chosen token.

    Vectors of one layer can be compared, clustered and projected over samples, epochs and runs.
    """

    def __init__(self, layer_name: str, token: int | None = None) -> None:
        super().__init__(layer_name)
        self.token = token

    def process_forward(self, module: nn.Module, input: Any, output: Any) -> dict[str, Any]:
        """Return the vectors."""
        parts = unpack(output)
        if not parts:
            return {"error": f"the output holds no tensor ({type(output).__name__})", "layer_name": self.layer_name}
        part, tensor = parts[0]
        return {
            "embedding": pooled_features(dense(tensor), module, token=self.token),
            "part": part,
            "layer_name": self.layer_name,
        }
