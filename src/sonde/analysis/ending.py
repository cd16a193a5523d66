"""How a training ended that did not finish: the exception and the user's own line, Ctrl-C, or that it was killed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from sonde.records import Event
from sonde.store import Run

ENDING_EVENTS: Final = ("exception", "interrupted")
"""Types of the events that a training leaves behind when something ends it."""
_BY_HAND: Final = "KeyboardInterrupt"
_FRAME: Final = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_NOT_THE_USERS: Final = ("site-packages", "dist-packages", "/lib/python3", "\\Lib\\")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a training did not finish. None where the run does not say."""

    text: str
    """All of it in a sentence, on one line."""
    step: int | None = None
    """The step it had come to."""
    by_hand: bool = False
    """It was asked to stop, so nothing is wrong."""
    exception: str | None = None
    """The type of the exception that ended it."""
    message: str | None = None
    """What the exception says."""
    place: str | None = None
    """Where in the user's own files it came from: `train.py:7`."""
    traceback: str | None = None


def ending_of(run: Run) -> Ending | None:
    """Return how a run ended that was interrupted, failed or crashed; None of any other."""
    status = run.status
    if status == "crashed":
        last = int(run.steps[-1]) if len(run.steps) else None
        return Ending("The process died without a word: killed, out of memory, or the machine went down.", last)
    if status not in ("failed", "interrupted"):
        return None
    kind = "exception" if status == "failed" else "interrupted"
    told = [event for event in run.events if event.event_type == kind]
    if told:
        return _told(told[-1])
    by_hand = status == "interrupted"
    return Ending(f"The training {'was interrupted' if by_hand else 'failed'}.", by_hand=by_hand)


def _told(event: Event) -> Ending:
    words = _one_line(event.message).rstrip(": ")
    exception, _, message = words.partition(": ")
    trace = event.data.get("traceback")
    trace = trace if isinstance(trace, str) else None
    place = _users_line(trace or "")
    # Runs from before there was a word for it have an interruption among their exceptions.
    by_hand = event.event_type == "interrupted" or exception == _BY_HAND
    if not by_hand:
        text = f"The training raised {words}{f' ({place})' if place else ''}"
    elif exception == _BY_HAND:
        text = "The training was interrupted."
    else:
        text = f"The training was interrupted, by {words}."
    return Ending(text, event.step, by_hand, exception, message, place or None, trace)


def _one_line(message: str) -> str:
    return " ".join("".join(sign if sign.isprintable() else " " for sign in message).split())


def _users_line(traceback: str) -> str:
    """Return where in the user's own files an exception came from.

    >>> _users_line('  File "/home/me/train.py", line 7, in <module>')
    'train.py:7'
    """
    frames = [
        (path, line) for path, line in _FRAME.findall(traceback) if not any(sign in path for sign in _NOT_THE_USERS)
    ]
    return f"{_one_line(PurePath(frames[-1][0]).name)}:{frames[-1][1]}" if frames else ""
