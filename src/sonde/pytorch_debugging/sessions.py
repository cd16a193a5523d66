"""Make debuggers, and debug a whole training session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torch import nn

from sonde.outcome import message_of, outcome_of
from sonde.pytorch_debugging.debugger import PyTorchDebugger

# Of a whole training a few steps after the first ones tell where the time goes, and the trace stays small.
_PROFILED: Final = {"wait": 1, "warmup": 1, "active": 5, "repeat": 1}


def create_pytorch_debugger(
    logger: Any = None,
    debug_mode: bool = True,
    enable_anomaly_detection: bool = True,
    enable_profiling: bool = False,
    enable_memory_tracking: bool = True,
    enable_gradient_checking: bool = True,
    log_dir: str | Path = "debug_logs",
) -> PyTorchDebugger:
    """Return a debugger with everything on but the profiler; the class itself has everything off."""
    return PyTorchDebugger(
        logger=logger,
        debug_mode=debug_mode,
        enable_anomaly_detection=enable_anomaly_detection,
        enable_profiling=enable_profiling,
        enable_memory_tracking=enable_memory_tracking,
        enable_gradient_checking=enable_gradient_checking,
        log_dir=log_dir,
    )


@contextlib.contextmanager
def debug_training_session(
    model: nn.Module,
    logger: Any = None,
    debug_mode: bool = True,
    enable_anomaly_detection: bool = True,
    enable_profiling: bool = False,
    enable_memory_tracking: bool = True,
    enable_gradient_checking: bool = True,
    log_dir: str | Path = "debug_logs",
) -> Iterator[PyTorchDebugger]:
    """Debug the training inside the block: the model is watched, and every scope that a flag names is entered.

    The report is saved when the block ends, also by an exception, which goes on its way.
    """
    debugger = create_pytorch_debugger(
        logger,
        debug_mode,
        enable_anomaly_detection,
        enable_profiling,
        enable_memory_tracking,
        enable_gradient_checking,
        log_dir,
    )
    with contextlib.ExitStack() as stack:
        # Left in reverse order: the scopes end, then the run, whose last look has then been taken, then the report.
        stack.callback(debugger.save_debug_report)
        stack.push(debugger)
        stack.push(_NotingFailure(debugger))
        debugger._watch(model)
        if enable_memory_tracking:
            stack.enter_context(debugger.memory_tracking())
        if enable_anomaly_detection:
            stack.enter_context(debugger.anomaly_detection())
        if enable_profiling:
            stack.enter_context(debugger.profiling(schedule=_PROFILED))
        yield debugger


class _NotingFailure:
    """Notes what ended a training, an interruption too, and lets it go on its way."""

    def __init__(self, debugger: PyTorchDebugger) -> None:
        self._debugger = debugger

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        outcome = outcome_of(error)
        if error is None or outcome == "finished":
            return
        kind = "training_error" if outcome == "failed" else "training_interrupted"
        data = {"error": str(error), "error_type": type(error).__name__}
        self._debugger._log_debug_event(kind, f"The training ended with {message_of(error)}", data)
