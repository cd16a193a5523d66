"""In which mode modules run that behave differently in training."""

from __future__ import annotations

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
    """Writes the mode of a module in the first three steps, and whenever it has changed since it ran last."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._last: dict[tuple[int, Phase], bool] = {}

    def see(self, module: nn.Module, name: str, phase: Phase, step: int) -> bool:
        """Take a call of a module; say whether there is nothing to write before its mode changes."""
        key = (id(module), phase)
        training = module.training
        if step <= FIRST_STEPS or self._last.get(key) is not training:
            self._last[key] = training
            self._sites.put(name, TRAINING, training, phase=phase)
        return step > FIRST_STEPS
