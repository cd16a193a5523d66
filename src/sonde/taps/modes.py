"""In which mode modules run that behave differently in training."""

from __future__ import annotations

import weakref
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from sonde.records import Phase
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import TRAINING

FIRST_STEPS: Final = 3


def cares(module: nn.Module) -> bool:
    """Say whether a module does something else in evaluation mode."""
    return isinstance(module, _NormBase | _DropoutNd)


class ModeSigns:
    """Writes the mode of a module in the first three steps, and whenever it has changed since it ran last.

    Whoever calls it may leave out calls of a module whose mode is known from training. What evaluates without changing
    the mode is then told by the model as a whole.
    """

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._last: dict[tuple[int, Phase], bool] = {}
        self._left_out: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def see(self, module: nn.Module, name: str, phase: Phase, step: int) -> bool:
        """Take a call of a module; say whether there is nothing to write before its mode changes."""
        key = (id(module), phase)
        training = module.training
        if step <= FIRST_STEPS or self._last.get(key) is not training:
            self._last[key] = training
            self._sites.put(name, TRAINING, training, phase=phase)
        if phase == "eval" and training and not cares(module):
            self._see_left_out()
        if phase == "train" and step > FIRST_STEPS and cares(module) and id(module) not in self._left_out:
            self._left_out[id(module)] = (weakref.ref(module), name)
        return step > FIRST_STEPS

    def _see_left_out(self) -> None:
        """Write the modes of those that are in training mode while the model, in training mode, evaluates."""
        for key, (reference, name) in self._left_out.items():
            module = reference()
            if module is not None and module.training and self._last.get((key, "eval")) is not True:
                self._last[key, "eval"] = True
                self._sites.put(name, TRAINING, True, phase="eval")
