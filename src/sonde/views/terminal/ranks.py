"""The ranks of a run as a table in a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from sonde.analysis.ranks import RankPage, RankRow
from sonde.core.heartbeat import Condition
from sonde.views.terminal.style import ABSENT, BAD, ODD, QUIET, Look, printable, short, size
from sonde.views.terminal.tables import WIDE, plain_table

_STYLES: Final[dict[Condition, str]] = {
    "died": BAD,
    "stuck": BAD,
    "silent": BAD,
    "waiting": ODD,
    "running": "",
    "ended": QUIET,
}


def rank_summary(page: RankPage) -> Text:
    """Return in a line how many ranks there are, and what they do."""
    counts = Counter(row.condition for row in page.rows if row.condition is not None)
    text = Text(f"{len(page.rows)} ranks")
    for condition, number in counts.most_common():
        text.append(f"  {number} {condition}", _STYLES[condition])
    return text


def rank_table(rows: Sequence[RankRow], look: Look) -> Table:
    """Return one line per rank: what it does, since when, how fast it is, and where it runs."""
    roomy = look.width >= WIDE
    right = ("rank", "step", "still", "own", "waits", "score", "memory")
    wide = ("host", "pid", "where") if roomy else ()
    table = plain_table(*right[:2], "state", "phase", *right[2:], "device", *wide, right=right)
    for row in rows:
        table.add_row(*_cells(row, roomy=roomy))
    return table


def _cells(row: RankRow, *, roomy: bool) -> list[Text]:
    beat, score = row.beat, row.score
    speed = [
        _milliseconds(None if score is None else score.own_s),
        _milliseconds(None if score is None else score.wait_s),
        Text(ABSENT if score is None else short(score.relative)),
    ]
    if beat is None or row.condition is None:
        return [Text(str(row.rank)), *[Text(ABSENT)] * 4, *speed, *[Text(ABSENT)] * (5 if roomy else 2)]
    memory = beat.device_memory if beat.device_memory is not None else beat.memory
    places = [Text(printable(beat.host)), Text(str(beat.pid)), Text(printable(_place(row)), QUIET)] if roomy else []
    return [
        Text(str(row.rank)),
        Text(f"{beat.step:,}"),
        Text(row.condition, _STYLES[row.condition]),
        Text(printable(_phase(row))),
        Text(ABSENT if row.still_s is None else f"{row.still_s:.1f} s"),
        *speed,
        Text(ABSENT if memory is None else size(memory)),
        Text(printable(beat.device)),
        *places,
    ]


def _phase(row: RankRow) -> str:
    assert row.beat is not None
    is_inside = row.condition == "waiting" and row.beat.collective
    return f"{row.beat.phase} ({row.beat.collective})" if is_inside else row.beat.phase


def _place(row: RankRow) -> str:
    assert row.beat is not None
    file, _, rest = row.beat.where.rpartition("/")
    module = f"{row.beat.module} " if row.beat.module else ""
    return f"{module}{rest or file}"


def _milliseconds(seconds: float | None) -> Text:
    if seconds is None or math.isnan(seconds):
        return Text(ABSENT, QUIET)
    return Text(f"{1e3 * seconds:.1f} ms")
