"""Debuggers that keep the output of one layer, or something computed from it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from sonde.capture import copy_outputs
from sonde.debuggers.base_debugger import BaseDebugger
from sonde.debuggers.samples import per_sample
from sonde.errors import OptionError
from sonde.hooks.unpack import unpack
from sonde.probes import brief_statistics, dense, downsample, pooled_features, sample_statistics

# --------------------------------------------------------------------------------
# Debuggers that look at the output of one layer while the model computes.


class _Slot(threading.local):
    """The latest capture of one thread, so that threads that evaluate side by side do not see each other's."""

    value: Any = None
    by_hand = False


class ForwardDebugger(BaseDebugger):
    """A debugger of one layer's output. Subclasses implement `process_forward`.

    What that returns is copied at once, so nothing that the model does later changes it. `SequentialDebugger` calls it
    through hooks that exist only while capturing is on; `forward_hook_fn` can also be registered by hand.
    """

    layer_name: str

    def __init__(self, layer_name: str) -> None:
        given: Any = layer_name
        if not isinstance(given, str):
            raise OptionError(f"layer_name takes a name such as 'backbone.layer4'; got {given!r:.80}.")
        self.layer_name = layer_name

    @property
    def last_capture(self) -> Any:
        """What this thread captured last; None before the first time."""
        return self._of_thread.value

    @last_capture.setter
    def last_capture(self, value: Any) -> None:
        slot = self._of_thread
        slot.value, slot.by_hand = value, True

    def forward_hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:
        """Take the output of the layer; a forward hook, which replaces nothing."""
        with torch.no_grad():
            self.last_capture = copy_outputs(self.process_forward(module, input, output))

    @abstractmethod
    def process_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        """Return what to keep of one call of the layer."""

    def around_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """Return a scope to be open while the layer computes; None for none.

        For debuggers that must see what happens inside the layer, or what it was called with by name.
        """
        return None

    def __call__(self, datapoint: dict[str, Any], model: nn.Module) -> Any:
        """Return what was captured."""
        return self.last_capture

    @property
    def _of_thread(self) -> _Slot:
        # Made here, since a subclass may not call this class's `__init__`; setdefault is safe between threads.
        slot: _Slot = self.__dict__.get("_slot") or self.__dict__.setdefault("_slot", _Slot())
        return slot

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the slot: captures belong to threads of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_slot"}


# --------------------------------------------------------------------------------
# Keep a layer's output with a few statistics.


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


# --------------------------------------------------------------------------------
# Keep a layer's output, downsampled.


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


# --------------------------------------------------------------------------------
# Keep one feature vector per sample.


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


# --------------------------------------------------------------------------------
# Keep statistics of a layer's output instead of the output.


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
