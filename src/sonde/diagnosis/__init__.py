"""What is wrong with a run, why, and what to do about it. No torch."""

from sonde.diagnosis.monitor import Monitor
from sonde.diagnosis.second_opinion import Diagnosis, diagnose

__all__ = ["Diagnosis", "Monitor", "diagnose"]
