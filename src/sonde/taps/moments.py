"""How many steps an optimizer's own memory counts. Adam and its relatives keep the number beside their moments."""

from __future__ import annotations

from torch.nn import Parameter
from torch.optim import Optimizer

from sonde.record.kinds import step_count
from sonde.taps.vital_sites import VitalSites
from sonde.vitals import STATE_STEPS


class Moments:
    """Reads the number of one parameter of each optimizer; one on a device would have to be waited for."""

    def __init__(self, sites: VitalSites) -> None:
        self._sites = sites
        self._followed: dict[str, Parameter] = {}

    def see(self, name: str, optimizer: Optimizer, parameters: list[Parameter]) -> None:
        """Look after a step. The first parameter that has a memory is followed from then on."""
        parameter = self._followed.get(name)
        if parameter is None:
            parameter = next((each for each in parameters if optimizer.state.get(each)), None)
            if parameter is None:
                return
            self._followed[name] = parameter
        count = step_count(optimizer, parameter)
        if count is not None:
            self._sites.put(name, STATE_STEPS, count)

    def clear(self) -> None:
        """Forget the parameters."""
        self._followed.clear()
