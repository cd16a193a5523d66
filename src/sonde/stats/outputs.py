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
INTERFACE: Final = 2
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
        """Remember the site of a module's first output, and with 0 or 1 the mode in which Python need not see it."""

    def forget(self) -> None:
        """Forget the sites of all modules; the numbers of their calls stay."""

    def begin_pass(self, phase: int, outermost: int) -> None:
        """Let outputs be taken, in this thread, but for that of the outermost module, with which the pass ends."""

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

    def forget(self) -> None:
        """Do nothing: no site is remembered."""

    def begin_pass(self, phase: int, outermost: int) -> None:
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


@cache
def native_module() -> ModuleType | None:
    """Return the native library as a Python module connected to torch; None where it cannot be used."""
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if api is None:
        return None
    try:
        module = import_module("sonde.stats._native")
        if module.INTERFACE != INTERFACE:
            return None
        module.connect(api, Tensor, Parameter, torch._C._current_graph_task_id)
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError):
        return None  # not built, built by another version, or another DLPack
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
