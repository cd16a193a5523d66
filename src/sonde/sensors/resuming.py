"""Sensors for runs that are resumed."""

from __future__ import annotations

from torch.nn import Parameter

from sonde.core.signals import STATE_STEPS
from sonde.record.kinds import step_count
from sonde.sensors.sensor import Context, Sensor, Step


class StateSteps(Sensor):
    """The step count kept in the optimizer's state (Adam and variants), of one parameter of each optimizer."""

    produces = (STATE_STEPS,)
    cost = "one number per step"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._followed: dict[str, Parameter] = {}

    def on_step(self, step: Step) -> None:
        """Look after a step. The first parameter that has a state is followed from then on."""
        if not step.due:
            return
        optimizer, parameter = step.optimizer, self._followed.get(step.name)
        if parameter is None:
            parameter = next((each for each in step.parameters if optimizer.state.get(each)), None)
            if parameter is None:
                return
            self._followed[step.name] = parameter
        count = step_count(optimizer, parameter)
        if count is not None:
            self.signals.put(step.name, STATE_STEPS, count)
