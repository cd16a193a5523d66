"""Run a model once more and leave no trace: gradients, buffers, modes and random numbers stay as they were."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sonde.core.collector import uncollected

T = TypeVar("T")


@dataclass(slots=True)
class _Buffer:
    """A buffer as it was: the tensor, its version counter, and a copy of its values."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int | None
    values: Tensor

    def restore(self) -> None:
        """Put the buffer back if it was replaced or written to."""
        if self.owner._buffers.get(self.name) is not self.tensor:
            self.owner._buffers[self.name] = self.tensor
        # A batch norm in training writes without counting it. Writing to `data` does not count either, so a graph that
        # holds the buffer and waits for its backward is not taken for broken.
        if self.owner.training or self.version is None or self.tensor._version != self.version:
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                self.tensor.data.copy_(self.values)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and all random number generators afterwards.

    Modes are never changed. Gradients are safe as long as the caller asks for them with `torch.autograd.grad`.
    """
    buffers = [
        _Buffer(module, name, tensor, None if tensor.is_inference() else tensor._version, tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    try:
        with kept_random_state(cuda_devices(model)):
            yield
    finally:
        for buffer in buffers:
            buffer.restore()


@contextlib.contextmanager
def kept_random_state(devices: list[int]) -> Iterator[None]:
    """Restore the random numbers of Python, numpy, torch and these CUDA devices afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = uncollected(torch.get_rng_state)
    cuda_states = [uncollected(functools.partial(torch.cuda.get_rng_state, each)) for each in devices]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        for device, state in zip(devices, cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the numbers of the CUDA devices that the model is on."""
    return sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})


def recompute(function: Callable[[], T]) -> T:
    """Run a forward as activation checkpointing does: inside a backward, with gradients enabled.

    A session that watches the model ignores such a forward, since it takes it for a recomputation. On its own, with
    gradients enabled, it would count as a pass of the training.
    """
    results: list[T] = []
    start = torch.zeros((), device="cpu", requires_grad=True)  # a device would bring a thread of its own
    end = _Recomputation.apply(start, lambda: results.append(function()))  # type: ignore[no-untyped-call] # torch
    torch.autograd.grad(end, start)
    return results[0]


class _Recomputation(torch.autograd.Function):
    """Does nothing forward, and runs a function in its backward."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.run()
        return grads[0], None


def is_compiled(model: nn.Module) -> bool:
    """Return whether calling the model runs compiled code, into which hooks do not reach."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def eager(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which a compiled model runs as it was written."""
    if not is_compiled(model):
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return scope


def as_usual(value: Any) -> Any:
    """Return nested inputs with tensors made in inference mode copied, since autograd cannot work on those."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, dict):
        return {key: as_usual(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(as_usual(item) for item in value)
    return value
