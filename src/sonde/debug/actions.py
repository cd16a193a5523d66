"""The actions of hooks within a debug session."""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors.numpy import save_file

from sonde.core import files
from sonde.debug.config import file_name
from sonde.debug.hook_types import HookAction, Occasion, check_address
from sonde.debug.hooks import TrainingStopped
from sonde.debug.numbers import as_array
from sonde.debug.pause import pause
from sonde.errors import OptionError

if TYPE_CHECKING:
    from sonde.debug.session import DebugSession


logger = logging.getLogger("sonde")


class Actions:
    """Carries out actions for a session."""

    def __init__(self, session: DebugSession) -> None:
        self._session = session
        self._numbers = itertools.count(1)

    def __call__(self, action: HookAction, occasion: Occasion) -> Any:
        """Carry out an action; its return value becomes a part of the hook's result."""
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
        severity = action.severity.value
        place = {"step": occasion.step, "layer": occasion.layer}
        alert: dict[str, Any] = {"source": "hook", "kind": "hook", "severity": severity, "message": message, **place}
        self._session.take_alert(alert)
        if action.webhook is not None:
            self._session.webhooks.send(action.webhook, alert)
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


TIMEOUT_S: Final = 5.0
_MAX_WAITING: Final = 100


class WebhookSender:
    """Posts JSON messages from a thread of its own. The first failure is logged, all are counted."""

    def __init__(self) -> None:
        self.sent = self.failed = self.dropped = 0
        self._jobs: queue.Queue[tuple[str, bytes] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None

    def send(self, address: str, message: dict[str, Any]) -> None:
        """Queue a message; drop it if too many wait.

        Raises:
            OptionError: The address is not http or https.

        """
        check_address(address)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sonde-webhook", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((address, files.dumps(message)))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        """Send the queued messages and stop; give up after a timeout."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            address, body = job
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    self.sent += 1
            except (OSError, ValueError) as error:
                self.failed += 1
                if self.failed == 1:
                    logger.warning("an alert could not be sent to %s: %s", address, error)
