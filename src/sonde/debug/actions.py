"""What hooks do, within a debug session."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.numpy import save_file

from sonde.debug.file_names import file_name
from sonde.debug.hook_types import HookAction, Occasion
from sonde.debug.hooks import TrainingStopped
from sonde.debug.numbers import as_array
from sonde.debug.pause import pause
from sonde.errors import OptionError

if TYPE_CHECKING:
    from sonde.debug.session import DebugSession

logger = logging.getLogger("sonde")

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}


class Actions:
    """Carries out actions for a session."""

    def __init__(self, session: DebugSession) -> None:
        self._session = session
        self._numbers = itertools.count(1)

    def __call__(self, action: HookAction, occasion: Occasion) -> Any:
        """Do what an action says; what it returns becomes a part of the hook's result."""
        return getattr(self, f"_{action.kind}")(action, occasion)

    def _inspect_tensor(self, action: HookAction, occasion: Occasion) -> str:
        operation = "forward" if occasion.is_forward else "backward"
        return self._session.tensor_inspector.inspect_tensor(occasion.values, occasion.layer, occasion.layer, operation)

    def _track_gradients(self, action: HookAction, occasion: Occasion) -> None:
        if not occasion.is_forward:
            self._session.gradient_debugger.record_gradient_flow(occasion.layer, occasion.values, step=occasion.step)

    def _record_activations(self, action: HookAction, occasion: Occasion) -> None:
        if occasion.is_forward:
            self._session.gradient_debugger.record_activations(occasion.layer, occasion.values)
            self._session.record(f"hooks.{occasion.layer}", occasion.values)

    def _save_snapshot(self, action: HookAction, occasion: Occasion) -> str:
        folder = self._session.folder
        if action.path is None and folder is None:
            raise OptionError("save_snapshot needs a path, or a session with an output_dir or a model.")
        rank = f"-rank{self._session.rank}" if self._session.rank else ""
        name = f"{file_name(occasion.layer)}-step{occasion.step}-{next(self._numbers)}{rank}.safetensors"
        path = Path(action.path) if action.path is not None else Path(str(folder)) / "snapshots" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        array = as_array(occasion.values, occasion.layer)
        kind = "output" if occasion.is_forward else "gradient"
        about = {"layer": occasion.layer, "step": str(occasion.step), "kind": kind}
        save_file({occasion.layer: array}, path, metadata=about)
        self._session.note("snapshot", f"{occasion.layer} at step {occasion.step}", {"path": str(path), **about})
        return str(path)

    def _alert(self, action: HookAction, occasion: Occasion) -> str:
        message = f"{action.message} ({occasion.layer}, step {occasion.step})"
        logger.log(_LEVELS[action.severity.value], "%s", message)
        data = {"layer": occasion.layer, "step": occasion.step, "severity": action.severity.value}
        self._session.take_alert({"message": message, **data})
        if action.webhook is not None:
            self._session.webhooks.send(action.webhook, {"message": message, **data})
        return message

    def _pause_training(self, action: HookAction, occasion: Occasion) -> None:
        folder = self._session.folder
        if folder is None:
            raise OptionError(
                "pause_training needs a session with an output_dir or a model: the pause is a file in it."
            )
        pause(folder, occasion.step, action.message or f"a hook fired on {occasion.layer}", self._session.sleep)

    def _stop_training(self, action: HookAction, occasion: Occasion) -> None:
        self._session.note("stopped", f"a hook on {occasion.layer} asked to stop", {"step": occasion.step})
        raise TrainingStopped(f"A hook on {occasion.layer} stopped the training at step {occasion.step}.")

    def _breakpoint(self, action: HookAction, occasion: Occasion) -> None:
        sys.breakpointhook()  # go `up` once: `occasion` holds the layer, the tensor and the step

    def _capture_bundle(self, action: HookAction, occasion: Occasion) -> None:
        self._session.want_bundle(f"a hook fired on {occasion.layer} at step {occasion.step}")
