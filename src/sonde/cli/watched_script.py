"""Record what a script trains, in its own process and in those it spawns."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from importlib import import_module
from multiprocessing import spawn, util
from typing import Any

from sonde.cli.script import Script, WhenImported, execute, hide_our_frames


class WatchedScript:
    """A script whose training is recorded.

    Args:
        name: What it is called in messages.
        place: The folder of the run; a star becomes a number.
        options: Options of `sonde.watch`.

    """

    def __init__(self, name: str, place: str, options: dict[str, Any]) -> None:
        self._name = name
        self._place = place
        self._options = options
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._discovery: Any = None
        self._is_child = self._has_children = False
        self._is_finished = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Start recording in the process that unpickles this: one that the script has spawned."""
        return _record_in_child, (self._name, self._place, self._options)

    def run(self, script: Script) -> None:
        """Run the script; record whatever trains."""
        atexit.register(self._die_if_interrupted)  # first registered, last called
        atexit.register(self._finish)
        if self._options.pop("enabled", True):
            WhenImported("torch", self._begin)
            self._follow_children()
        try:
            execute(script)
        except BaseException as error:
            self._error = error
            hide_our_frames(error)
            raise

    def record_in_child(self) -> None:
        """Record whatever trains in this spawned process."""
        self._is_child = True
        WhenImported("torch", self._begin)

    def _follow_children(self) -> None:
        prepare = spawn.get_preparation_data

        def prepare_with_sonde(name: str) -> dict[str, Any]:
            self._has_children = True
            return {**prepare(name), "sonde": self}  # entries that Python does not know do nothing but be unpickled

        spawn.get_preparation_data = prepare_with_sonde

    def _begin(self) -> None:
        discovery = import_module("sonde.integrations.discovery").Discovery
        self._discovery = discovery(self._place, self._options, on_start=self._finish_first)
        self._discovery.install()

    def _finish_first(self) -> None:
        # Sessions close themselves at exit too; this must come before, to report what they found.
        atexit.register(self._finish)
        util.Finalize(None, self._finish, exitpriority=100)  # spawned processes end without `atexit`

    def _finish(self) -> None:
        if self._is_finished or os.getpid() != self._process:
            return
        self._is_finished = True
        why_not = "it did not import torch"
        if self._discovery is not None:
            why_not = self._discovery.finish(self._error or sys.exc_info()[1])
        if why_not and not self._is_child:
            where = " in its main process" if self._has_children else ""
            sys.stderr.write(f"sonde: nothing of {self._name} was recorded{where}: {why_not}\n")

    def _die_if_interrupted(self) -> None:
        """End by SIGINT after Ctrl-C, as Python does itself unless code is compiled at exit, such as ours."""
        if isinstance(self._error, KeyboardInterrupt) and os.name == "posix" and os.getpid() == self._process:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(self._process, signal.SIGINT)


def _record_in_child(name: str, place: str, options: dict[str, Any]) -> None:
    WatchedScript(name, place, options).record_in_child()
