"""Debuggers that wrap other debuggers."""

from sonde.debuggers.wrappers.sequential_debugger import SequentialDebugger

__all__ = ["SequentialDebugger"]
