"""How a training ended that did not finish, as a line."""

from __future__ import annotations

from rich.text import Text

from sonde.analysis import Ending
from sonde.views.terminal.look import Look
from sonde.views.terminal.palette import BAD, QUIET


def ending_line(ending: Ending, look: Look) -> Text:
    """Return how a run ended, in a line."""
    style = QUIET if ending.by_hand else BAD
    sign = look.pick("· ", "- ") if ending.by_hand else look.pick("✗ ", "x ")
    at = "" if ending.step is None else f"step {ending.step:,}: "
    return Text.assemble((sign, style), (at, QUIET), (ending.text, style))
