"""The list of all sensors, in the order in which they are called."""

from __future__ import annotations

from typing import Final

from sonde.sensors import (
    activations,
    architecture,
    data,
    initialization,
    loop,
    losses,
    modes,
    objectives,
    optimizers,
    parameters,
    program,
    ranks,
    resuming,
    targets,
)
from sonde.sensors.sensor import Sensor

SENSORS: Final[tuple[type[Sensor], ...]] = (
    loop.Leftovers,
    loop.PassCounts,
    loop.OptimizerSteps,
    loop.Written,
    loop.InputGradient,
    loop.KeptGraphs,
    parameters.HiddenParameters,
    parameters.BrokenTies,
    initialization.InitialValues,
    initialization.RowSpread,
    initialization.RowGradients,
    architecture.ModuleOrder,
    architecture.CarriedStates,
    architecture.Softmaxes,
    architecture.LookAhead,
    architecture.Reshapes,
    losses.BlownUpColumns,
    losses.LossInputs,
    objectives.MovingTargets,
    objectives.Roots,
    targets.TargetSpread,
    targets.Labels,
    targets.Neighbours,
    targets.Padding,
    data.Inputs,
    data.RowMarks,
    data.Columns,
    program.ProgramCalls,
    optimizers.Clipping,
    resuming.StateSteps,
    activations.Units,
    modes.Modes,
    modes.Dropping,
    ranks.Reductions,
    ranks.Buffers,
    ranks.WeightsBefore,
)
