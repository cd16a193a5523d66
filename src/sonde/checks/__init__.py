"""Checks on request: look at a model now and answer at once, which waits for the device. Nothing is recorded here."""

from sonde.checks.anomaly_trace import AnomalyTraces, collect_anomaly_traces
from sonde.checks.calls import Call, CallTable, Seen, listen_to_calls
from sonde.checks.model_readings import gradients, parameters, read_gradients, read_parameters, total_norm
from sonde.checks.nonfinite import NonFinite, NonFiniteScope
from sonde.hooks.user_line import source_line

__all__ = [
    "AnomalyTraces",
    "Call",
    "CallTable",
    "NonFinite",
    "NonFiniteScope",
    "Seen",
    "collect_anomaly_traces",
    "gradients",
    "listen_to_calls",
    "parameters",
    "read_gradients",
    "read_parameters",
    "source_line",
    "total_norm",
]
