"""Where a loss is going: see `sonde.diagnosis.dynamics`."""

from sonde.diagnosis.dynamics import Dynamics, Fit, Stability, State, classify, judge_fit

__all__ = ["Dynamics", "Fit", "Stability", "State", "classify", "judge_fit"]
