"""How a training ended that did not finish: the exception and the user's own line, or that it was killed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from rich.text import Text

from sonde.store import Run
from sonde.views.terminal.events import one_line
from sonde.views.terminal.look import Look
from sonde.views.terminal.palette import BAD, QUIET

_FRAME: Final = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_NOT_THE_USERS: Final = ("site-packages", "dist-packages", "/lib/python3", "\\Lib\\")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a training did not finish."""

    text: str
    step: int | None
    by_hand: bool
    """The user interrupted it, so nothing is wrong."""


def failure_of(run: Run) -> Failure | None:
    """Return how a run ended that failed or crashed; None of any other."""
    status = run.status
    if status == "crashed":
        last = int(run.steps[-1]) if len(run.steps) else None
        return Failure("The process died without a word: killed, out of memory, or the machine went down.", last, False)
    if status != "failed":
        return None
    raised = [event for event in run.events if event.event_type == "exception"]
    if not raised:
        return Failure("The training failed.", None, False)
    last_raised = raised[-1]
    words = one_line(last_raised.message).rstrip(": ")
    if words.partition(":")[0] == "KeyboardInterrupt":
        return Failure("The training was interrupted.", last_raised.step, True)
    place = _users_line(str(last_raised.data.get("traceback", "")))
    return Failure(f"The training raised {words}{f' ({place})' if place else ''}", last_raised.step, False)


def failure_line(failure: Failure, look: Look) -> Text:
    """Return how a run ended, in a line."""
    style = QUIET if failure.by_hand else BAD
    sign = look.pick("· ", "- ") if failure.by_hand else look.pick("✗ ", "x ")
    at = "" if failure.step is None else f"step {failure.step:,}: "
    return Text.assemble((sign, style), (at, QUIET), (failure.text, style))


def _users_line(traceback: str) -> str:
    """Return where in the user's own files an exception came from.

    >>> _users_line('  File "/home/me/train.py", line 7, in <module>')
    'train.py:7'
    """
    frames = [
        (path, line) for path, line in _FRAME.findall(traceback) if not any(sign in path for sign in _NOT_THE_USERS)
    ]
    return f"{one_line(PurePath(frames[-1][0]).name)}:{frames[-1][1]}" if frames else ""
