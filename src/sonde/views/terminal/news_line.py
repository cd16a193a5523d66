"""News of a live run as a line of a log."""

from __future__ import annotations

import math

from rich.text import Text

from sonde.analysis import News
from sonde.views.terminal.look import Look
from sonde.views.terminal.numbers import count, short
from sonde.views.terminal.palette import BAD, LEVEL_STYLES, QUIET, TITLE
from sonde.views.terminal.tables import dot

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
