"""Which tensors are alive, counted by kind. Walks all of Python's objects, which takes milliseconds: do it rarely."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors of one kind have in common."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    grad_fn: str
    """The operation whose graph the tensor keeps alive; empty if it keeps none."""
    leaf: bool
    """It requires a gradient and was not computed: a parameter."""

    def __str__(self) -> str:
        what = f"{self.dtype} {list(self.shape)} on {self.device}"
        return f"{what} with the graph behind {self.grad_fn}" if self.grad_fn else what


@dataclass(slots=True)
class LiveTensors:
    """How many tensors of each kind are alive, and their bytes."""

    counts: Counter[TensorKind] = field(default_factory=Counter)
    bytes: Counter[TensorKind] = field(default_factory=Counter)


def count_live() -> LiveTensors:
    """Count what is alive now. Nothing is kept alive by it, and no tensor's values are touched."""
    found = LiveTensors()
    for tensor in live_tensors():
        kind = kind_of(tensor)
        if kind is not None:
            found.counts[kind] += 1
            found.bytes[kind] += tensor.numel() * tensor.element_size()
    return found


def tensors_of(kind: TensorKind) -> list[Tensor]:
    """Return the living tensors of a kind, roughly the oldest first."""
    return [tensor for tensor in live_tensors() if kind_of(tensor) == kind]


def live_tensors() -> list[Tensor]:
    """Return all tensors that Python objects stand for."""
    # There are hundreds of thousands of objects: one look-up each has to be enough.
    wanted = set(_with_subclasses(Tensor))
    return [each for each in gc.get_objects() if type(each) in wanted]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _with_subclasses(each)


def kind_of(tensor: Tensor) -> TensorKind | None:
    """Return the kind of a tensor; None if it has no memory of its own or is being torn down."""
    try:
        grad_fn, shape = tensor.grad_fn, tuple(tensor.shape)
        if any(type(size) is not int for size in shape):
            return None  # it stands for a tensor while torch compiles: its sizes are symbols, and it holds no memory
        return TensorKind(
            shape=shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            grad_fn=type(grad_fn).__name__ if grad_fn is not None else "",
            leaf=tensor.requires_grad and grad_fn is None,
        )
    except (RuntimeError, NotImplementedError, AttributeError):
        return None  # a wrapper that hides its tensor, or one that is being torn down
