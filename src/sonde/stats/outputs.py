"""Count the calls of modules and write their outputs into rows: in C where that is possible, else in Python.

The C code (`native/outputs.c`) takes the ordinary output of a known module without running Python. It needs torch 2.11
or later and Sonde's native library. `PlainOutputs` keeps the same books and takes nothing, so callers are alike.
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

ANY_MODE: Final = 2
"""For `Outputs.know`: the module's outputs are taken whatever mode it is in."""
NO_MODE: Final = 3
"""The same: Python sees the module's outputs in every pass that is observed."""
INTERFACE: Final = 4
"""The version of what the native library's methods take. One built by another version of Sonde is not used."""
SWITCH: Final = "SONDE_OUTPUTS"
_NOTHING: Final = (None, -1, -1)
Last = tuple["ref[Tensor] | None", int, int]
"""The last recorded output of a pass, its version and its site."""


class Outputs(Protocol):
    """The calls of one thread's passes. A phase is 0 for training and 1 for evaluation; a key is the id of a module."""

    taken: int
    """How many outputs were recorded without Python."""
    seconds: float
    """How long that took."""

    def take(self, module: Any, output: Any) -> bool:
        """Record the output of a module's call if that needs no closer look; return whether it was recorded."""

    def know(self, key: int, phase: int, site: int, bins: bool, mode: int) -> None:
        """Remember the site of a module's first output, and in which mode Python need not see it in observed passes."""

    def know_passing(self, key: int, phase: int, mode: int) -> None:
        """Remember that a module may return a tensor that was recorded just before, which needs no row of its own."""

    def set_mode(self, key: int, phase: int, mode: int) -> None:
        """Change the mode of a module that is known already."""

    def begin_pass(self, phase: int, outermost: int, observed: bool) -> None:
        """Let outputs be taken, in this thread, but for that of the outermost module, with which the pass ends.

        If Python does not look at any module in this pass (`observed`), modes do not matter.
        """

    def end_pass(self) -> None:
        """Take no more outputs until the next pass, and forget the last one."""

    def count(self, key: int, phase: int) -> int:
        """Count a call that Python handles, and return its number."""

    def calls(self, key: int, phase: int) -> int:
        """Return how many calls there were since numbering began anew."""

    def clear_calls(self, phase: int) -> None:
        """Start numbering calls from 0 again."""

    def last(self) -> Last:
        """Return the last recorded output of this pass, its version and its site."""

    def set_last(self, output: ref[Tensor], version: int, site: int) -> None:
        """Remember the last recorded output. A weak reference: a strong one would keep the whole graph alive."""

    def close(self) -> None:
        """Write no more rows: the arena is about to be shipped."""


class PlainOutputs:
    """The same bookkeeping in Python. It takes nothing."""

    taken = 0
    seconds = 0.0

    def __init__(self) -> None:
        self._calls: tuple[dict[int, int], dict[int, int]] = (defaultdict(int), defaultdict(int))
        self._last: Last = _NOTHING

    def take(self, module: Any, output: Any) -> bool:
        """Take nothing."""
        return False

    def know(self, key: int, phase: int, site: int, bins: bool, mode: int) -> None:
        """Do nothing: what is never taken needs no site."""

    def know_passing(self, key: int, phase: int, mode: int) -> None:
        """Do nothing, as above."""

    def set_mode(self, key: int, phase: int, mode: int) -> None:
        """Do nothing, as above."""

    def begin_pass(self, phase: int, outermost: int, observed: bool) -> None:
        """Forget the last output."""
        self._last = _NOTHING

    def end_pass(self) -> None:
        """Forget the last output."""
        self._last = _NOTHING

    def count(self, key: int, phase: int) -> int:
        """Count a call and return its number."""
        number = self._calls[phase][key]
        self._calls[phase][key] = number + 1
        return number

    def calls(self, key: int, phase: int) -> int:
        """Return how many calls there were since numbering began anew."""
        return self._calls[phase].get(key, 0)

    def clear_calls(self, phase: int) -> None:
        """Start numbering calls from 0 again."""
        self._calls[phase].clear()

    def last(self) -> Last:
        """Return the last recorded output of this pass."""
        return self._last

    def set_last(self, output: ref[Tensor], version: int, site: int) -> None:
        """Remember the last recorded output."""
        self._last = (output, version, site)

    def close(self) -> None:
        """Do nothing: nothing is open."""


# Raised where the library is not built, was built by another version, or for another DLPack.
_FAILURES: Final = (ImportError, AttributeError, RuntimeError, TypeError, ValueError)


@cache
def native_module() -> ModuleType | None:
    """Return the native library as a Python module connected to torch; None where it cannot be used."""
    try:
        return _connect()
    except _FAILURES:
        return None


def why_in_python() -> str:
    """Return why no outputs are taken in C, for people; an empty text where they are."""
    if os.environ.get(SWITCH) == "python":
        return f"{SWITCH}=python is set"
    try:
        _connect()
    except _FAILURES as error:
        return str(error)
    return ""


def _connect() -> ModuleType:
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if api is None:
        raise RuntimeError(f"torch {torch.__version__} has no DLPack exchange API; 2.11 and later have")
    module = import_module("sonde.stats._native")
    if module.INTERFACE != INTERFACE:
        raise RuntimeError("the C library was built by another version of Sonde")
    module.connect(api, Tensor, Parameter, torch._C._current_graph_task_id)
    return module


def outputs_in_c() -> Outputs | None:
    """Return C code that takes outputs; None where there is none.

    `SONDE_OUTPUTS=python` in the environment switches it off.
    """
    module = native_module()
    if module is None or os.environ.get(SWITCH) == "python":
        return None
    found: Outputs = module.Outputs()
    return found
