"""Events and news of a run as lines."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from sonde.analysis import Level, News
from sonde.records import Event
from sonde.views.terminal.style import BAD, LEVEL_STYLES, QUIET, TITLE, Look, count, plural, printable, short
from sonde.views.terminal.tables import dot

# --------------------------------------------------------------------------------
# Events as lines: when, what, and in which colour.


_BAD_WORDS: Final = re.compile(
    r"error|exception|fault|nan\b|non.?finite|fail|crash|overflow|diverg|^spike$", re.IGNORECASE
)
_ODD_WORDS: Final = re.compile(r"warn|drop|thin|skip|interrupt|isolat|stopp|left_out", re.IGNORECASE)


def event_level(event: Event) -> Level:
    """Return how much an event matters, from its type."""
    if _BAD_WORDS.search(event.event_type):
        return "bad"
    return "odd" if _ODD_WORDS.search(event.event_type) else "fine"


def event_table(events: Sequence[Event], *, most: int = 8) -> Table:
    """Return one row per event in order of time; of many, those that matter, and the latest."""
    if len(events) <= most:
        chosen = list(events)
    else:
        weight = {"bad": 0, "odd": 1, "fine": 2}
        ranked = sorted(range(len(events)), key=lambda i: (weight[event_level(events[i])], -i))
        chosen = [events[i] for i in sorted(ranked[:most])]
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(justify="right", style=QUIET, no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in chosen:
        where = f"step {event.step}" if event.step is not None else ""
        table.add_row(where, _type(event), Text(one_line(event.message)))
    if len(chosen) < len(events):
        table.add_row("", "", Text(f"and {plural(len(events) - len(chosen), 'event')} more", QUIET))
    return table


def _type(event: Event) -> Text:
    return Text(event.event_type, LEVEL_STYLES[event_level(event)] or "cyan")


def event_line(event: Event) -> Text:
    """Return one event as a line of a log."""
    where = f"step {event.step}  " if event.step is not None else ""
    return Text.assemble((where, QUIET), _type(event), "  ", one_line(event.message))


def one_line(message: str) -> str:
    """Return a message without line breaks and control characters, which a run from elsewhere may hold."""
    return " ".join(printable(message).split())


# --------------------------------------------------------------------------------
# News of a live run as a line of a log.


_MOST_VALUES = 4


def news_line(news: News, look: Look) -> Text:
    """Write a piece of news: step, loss, learning rate, values asked for, what was not finite, the worst layer."""
    more = f" (+{news.new_steps})" if news.new_steps > 1 else ""
    text = Text.assemble((f"step {news.step}", TITLE), (more, QUIET))
    if news.loss is not None:
        text.append("  loss ").append(short(news.loss), TITLE if math.isfinite(news.loss) else BAD)
    if news.learning_rate is not None:
        text.append(f"  lr {short(news.learning_rate)}", QUIET)
    for key, value in list(news.values.items())[:_MOST_VALUES]:
        text.append(f"  {key} ", QUIET).append(short(value))
    if len(news.values) > _MOST_VALUES:
        text.append(f"  and {len(news.values) - _MOST_VALUES} more", QUIET)
    if news.nonfinite:
        text.append(f"  {count(news.nonfinite)} not finite", BAD)
    if news.worst is not None:
        style = LEVEL_STYLES[news.worst.mark.level]
        text.append("  ").append_text(dot(news.worst.mark.level, look))
        text.append(f" {news.worst.site.name} {news.worst.mark.reason}", style)
    return text
