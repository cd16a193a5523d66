"""Keep Grad-CAM maps: where a layer's features support a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sonde.debuggers.base_debugger import BaseDebugger
from sonde.debuggers.samples import per_sample
from sonde.debuggers.utils import require_layer
from sonde.errors import OptionError
from sonde.hooks.names import is_wrapper, unwrap
from sonde.probes import Cam, CamError, brief_statistics, grad_cam
from sonde.probes.maps.grad_cam import Target


class GradCAMDebugger(BaseDebugger):
    """Computes Grad-CAM for every sample, with the model's own gradients.

    The model is run once more with gradients from the layer on, also inside `no_grad` and `inference_mode`. Its mode,
    its gradients, its buffers and all random numbers stay as they were. Token grids of vision transformers are
    detected; `grid` sets one. Maps are not negative, not scaled, and have the resolution of the layer.

    `target_class` is a class, one for each sample, None for the predicted one, or a function that takes the model's
    output and returns a score for each sample. `forward(model, inputs)` calls the model.
    """

    def __init__(
        self,
        target_layer: str,
        target_class: Target = None,
        *,
        grid: tuple[int, int] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        self.target_layer = target_layer
        self.target_class = target_class
        self.grid = grid
        self.forward = forward

    def __call__(self, datapoint: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Return the maps, the classes they are for, and the scores."""
        if "inputs" not in datapoint:
            there = ", ".join(sorted(map(str, datapoint)))
            raise OptionError(f"Grad-CAM runs the model on datapoint['inputs'], which is not there; there are {there}.")
        layer = require_layer(model, self.target_layer)
        # The wrapper of DistributedDataParallel would get ready for a backward pass that never comes.
        inner = unwrap(model) if is_wrapper(model) else model
        try:
            cam = grad_cam(inner, layer, datapoint["inputs"], self.target_class, grid=self.grid, forward=self.forward)
        except CamError as error:
            return {"error": str(error), "target_layer": self.target_layer}
        return {"target_layer": self.target_layer, **_describe(cam)}


def _describe(cam: Cam) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gradcam": cam.maps,
        "target_class": per_sample(cam.classes.tolist() if cam.classes is not None else [None] * len(cam.maps)),
        "score": per_sample(cam.scores.tolist()),
        "gradcam_stats": per_sample(brief_statistics(cam.maps)),
    }
    if not bool(cam.reached.all()):
        found["note"] = per_sample([None if reached else _NOTE for reached in cam.reached.tolist()])
    return found


_NOTE = (
    "No gradient reaches the places of this layer, so the map is empty. In a transformer that classifies by its class "
    "token, choose a layer before the last attention, such as the first norm of the last block."
)
