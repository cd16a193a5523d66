"""What is needed to repeat the present step: its batch, random numbers and precision, held by reference.

Nothing is copied but the states of the random number generators (5 KB each), and nothing outlives the step.
"""

from __future__ import annotations

import random
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sonde.source import Line, current_line
from sonde.taps.nodes import next_sequence
from sonde.unpack import unpack

# Micro-batches of one step that are kept at most; beyond them the oldest goes.
MAX_PASSES: Final = 8
# What a gradient at the model's output may weigh to be kept until the step ends: it would have been freed before.
MAX_GRADIENT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The states of all random number generators at one moment."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device | None = None) -> RandomState:
        """Take the states, on one device besides the CPU. A CUDA generator's is kept by the host: nothing waits."""
        cuda = {}
        if device is not None and device.type == "cuda" and device.index is not None:
            cuda = {device.index: torch.cuda.default_generators[device.index].get_state()}
        numpy_state = np.random.get_state() if "numpy.random" in sys.modules else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), numpy_state)

    def put(self) -> None:
        """Make these the states of the generators."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class Precision:
    """Whether and how autocast was on, for one type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Precision:
        """Take the present settings."""
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def scope(self) -> torch.autocast:
        """Return a scope in which these settings hold. Its casts are not cached: they would outlive it."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptPass:
    """One training pass of a model: what it was called with, and what came back."""

    model: nn.Module
    step: int
    random: RandomState
    precision: Precision
    called_at: Line | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Input tensors with their version counters: another counter later means that they were written over."""
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The gradients that came to the outputs, by their place in them."""
    too_large: bool = False
    """A gradient at the output was too large to keep."""
    sequence: int = 0
    """The number the next autograd node would have had when the pass ended: later ones belong to the loss."""
    backwards: int = 0
    returned: bool = False

    @property
    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors the model was called with, by their place in the call."""
        return inputs_of(self.args, self.kwargs)

    @property
    def is_intact(self) -> bool:
        """Say whether the inputs are still what the model got."""
        return all(tensor._version == version for tensor, version in self.versions)

    @property
    def batch_size(self) -> int | None:
        """The length of the first dimension of the first input that has one."""
        return next((tensor.shape[0] for _, tensor in self.inputs if tensor.dim() > 0), None)


class Keeper:
    """Holds the passes of the present step."""

    def __init__(self) -> None:
        self.passes: list[KeptPass] = []

    def begin(self, model: nn.Module, args: tuple[Any, ...], step: int) -> None:
        """Note that a training pass of a model begins."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if device.type == "meta":
            return  # it computes no values that could go bad
        kept = KeptPass(model, step, RandomState.now(device), Precision.now(device.type), current_line())
        kept.versions = _versions(unpack(args))
        self.passes = [each for each in self.passes if each.returned][-(MAX_PASSES - 1) :]
        self.passes.append(kept)

    def end(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note what the pass was called with and what it returned."""
        kept = self.passes[-1] if self.passes else None
        if kept is None or kept.model is not model or kept.returned:
            return
        kept.args, kept.kwargs, kept.returned = args, kwargs, True
        # Arguments by keyword are not known before the pass has ended.
        kept.versions += _versions([(key, tensor) for key, _, tensor in _keywords(kwargs)])
        for index, (_, tensor) in enumerate(unpack(output)):
            kept.outputs.append(weakref.ref(tensor))
            if tensor.requires_grad:
                _listen(kept, index, tensor)
        kept.sequence = next_sequence()

    def forget(self, models: set[int] | None = None) -> None:
        """Let go of the passes of these models (by id), or of all."""
        self.passes = [] if models is None else [each for each in self.passes if id(each.model) not in models]


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a call, by their place in it."""
    return unpack(args) + [(f"{key}{part}", tensor) for key, part, tensor in _keywords(kwargs)]


def _listen(kept: KeptPass, index: int, tensor: Tensor) -> None:
    # The hook belongs to the tensor and must not keep the pass alive.
    reference = weakref.ref(kept)

    def keep(gradient: Tensor) -> None:
        kept = reference()
        if kept is None:
            return
        if gradient.numel() * gradient.element_size() > MAX_GRADIENT_BYTES:
            kept.too_large = True
        else:
            kept.gradients[index] = gradient

    tensor.register_hook(keep)  # type: ignore[no-untyped-call] # torch


def _versions(tensors: list[tuple[str, Tensor]]) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for _, tensor in tensors if not tensor.is_inference()]


def _keywords(kwargs: dict[str, Any]) -> list[tuple[str, str, Tensor]]:
    return [(key, part, tensor) for key, value in kwargs.items() for part, tensor in unpack(value)]
