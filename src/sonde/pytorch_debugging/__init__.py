"""Debugging tools for PyTorch training: anomaly, profiler and memory scopes, gradient checks, steps, reports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.pytorch_debugging.debugger import PyTorchDebugger
    from sonde.pytorch_debugging.making import create_pytorch_debugger, debug_training_session
    from sonde.pytorch_debugging.recovery import LastGood

# Loaded at first use: who debugs gradients does not pay for the training optimizer.
_HOMES = {
    "LastGood": "recovery",
    "PyTorchDebugger": "debugger",
    "create_pytorch_debugger": "making",
    "debug_training_session": "making",
}

__all__ = [
    "LastGood",
    "PyTorchDebugger",
    "create_pytorch_debugger",
    "debug_training_session",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sonde.pytorch_debugging' has no attribute {name!r}")
    value = getattr(import_module(f"sonde.pytorch_debugging.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
