"""Hooks that vanish while torch compiles a model: nothing of Sonde enters the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unless_compiling(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` so that under `torch.compile` it is a test that is constant there, and nothing else."""

    def call(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return call
