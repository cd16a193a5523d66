"""Create debuggers, and debug a whole training session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import nn

from sonde.core.outcome import message_of, outcome_of
from sonde.pytorch_debugging.debugger import PyTorchDebugger

# A few steps after the first ones show where the time goes, and the trace stays small.
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
    """Debug the training inside the block: record the model, check every step, and enter the scopes that are enabled.

    With gradient checking, NaN, infinities and exploding or vanishing gradients of every step are reported without any
    call in the loop. The report is saved when the block ends, also if an exception ends it, which is re-raised.
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
        # Left in reverse order: first the scopes end, then the run, which is judged once more, then comes the report.
        stack.callback(debugger.save_debug_report)
        stack.push(debugger)
        stack.push(_failure_noter(debugger))
        debugger._watch(model)
        stack.enter_context(debugger._enabled_scopes(_PROFILED))
        yield debugger


def _failure_noter(debugger: PyTorchDebugger) -> Callable[[object, BaseException | None, object], None]:
    """Return an exit callback that notes the exception or interruption that ended a training."""

    def note(kind: object, error: BaseException | None, trace: object) -> None:
        outcome = outcome_of(error)
        if error is not None and outcome != "finished":
            event = "training_error" if outcome == "failed" else "training_interrupted"
            data = {"error": str(error), "error_type": type(error).__name__}
            debugger._log_debug_event(event, f"The training ended with {message_of(error)}", data)

    return note
