"""Sending alerts to a web address, off the training thread, without ever holding it up."""

from __future__ import annotations

import logging
import queue
import threading
import urllib.error
import urllib.request
from typing import Any, Final

from sonde import strict_json
from sonde.errors import OptionError

logger = logging.getLogger("sonde")

TIMEOUT_S: Final = 5.0
_MAX_WAITING: Final = 100


def check_address(address: str) -> None:
    """Raise an error unless messages can be posted to an address."""
    if not address.startswith(("http://", "https://")):
        raise OptionError(f"webhook={address!r}: give an address that begins with http:// or https://.")


class WebhookSender:
    """Posts JSON, one message after the other. What cannot be sent is counted and told once."""

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
            self._jobs.put_nowait((address, strict_json.dumps(message)))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 2 * TIMEOUT_S) -> None:
        """Send what waits and end; give up after a while."""
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
