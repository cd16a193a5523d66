"""What torch is doing in this thread: compiling, capturing, or running a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

is_compiling: Final = torch.compiler.is_compiling
"""Constant while `torch.compile` traces, so that code behind it never enters the graph."""
backward_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that this thread runs, or -1. A forward inside one is a checkpoint that is
recomputed."""
_innermost_transform: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack


def is_capturing() -> bool:
    """Return whether the running code is captured: by a CUDA graph on the current stream, or by `torch.jit.trace`.

    Nothing may be measured then: a replay would repeat it, into an arena that has long been shipped. The same holds
    inside a transform of `torch.func`, where tensors have no memory of their own and no other may be written to.
    """
    if torch.jit.is_tracing() or _innermost_transform() is not None:  # type: ignore[attr-defined, no-untyped-call] # torch
        return True
    # Asking torch first would start CUDA in a process that only uses the CPU.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call] # torch


def unless_compiling(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` so that under `torch.compile` only a constant test remains of it."""

    def call(*args: Any) -> None:
        if not is_compiling():
            hook(*args)

    return call
