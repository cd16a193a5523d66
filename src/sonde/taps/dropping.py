"""See `torch.nn.functional.dropout` drop values where gradients are off, whatever the mode of the modules around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as functional

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.replace_function import OverridableFunction
from sonde.hooks.torch_state import is_capturing
from sonde.records import Phase
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import DROPPED, LOOP

FUNCTION: Final = OverridableFunction(functional, "dropout")
_NAMES: Final = ("input", "p", "training", "inplace")


class DroppingTap:
    """Reports evaluation passes in which something was dropped."""

    def __init__(self, sites: VitalSites, guard: Guard, *, is_due: Callable[[Phase], bool]) -> None:
        self._sites = sites
        self._is_due = is_due
        self._handles: list[Handle] = []
        self._listener = guard.wrap("dropout", self._see)

    def attach(self) -> None:
        """Begin to listen."""
        self._handles.append(FUNCTION.listen(after=self._listener))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # The modules of torch hand over all four arguments by place; their mode is seen where they are called.
        if torch.is_grad_enabled() or len(args) == len(_NAMES) or is_capturing():
            return
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        if given.get("training", True) is True and given.get("p", 0.5) > 0 and self._is_due("eval"):
            self._sites.put(LOOP, DROPPED, 1.0, phase="eval")
