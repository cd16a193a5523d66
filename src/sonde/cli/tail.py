"""`sonde tail RUN`: follow a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.guard import FOUND
from sonde.cli.options import AsJson, RunPath, SiteGlob, StatName, Width

if TYPE_CHECKING:
    from sonde.analysis import News
    from sonde.store import Run

EXAMPLES = """
sonde tail runs/first  # until it ends
sonde tail runs/first --once  # where it stands now
sonde tail runs/first --site head.weight:gradient --stat norm  # with a value of your choice
"""

Interval = Annotated[float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="How often to look.")]
Once = Annotated[bool, typer.Option("--once", help="Print where the run stands, and stop.")]


def tail(
    run: RunPath,
    site: SiteGlob = None,
    stat: StatName = None,
    interval: Interval = 1.0,
    once: Once = False,
    width: Width = None,
    json: AsJson = False,
) -> None:
    """Follow a run as it trains, a line at a time.

    Each line is about the steps since the last look: loss, learning rate, what is not finite, the worst layer, events.
    Ends when the run does: with 0 when it finished, with 1 when it failed or crashed. Ctrl-C stops following; the run
    goes on.
    """
    from sonde.analysis import Newspaper
    from sonde.cli.opening import open_run
    from sonde.cli.show import choose_sites

    opened = open_run(run)
    chosen = choose_sites(opened, site, stat) if site is not None or stat is not None else []
    paper = Newspaper(opened, sites=chosen, stat=stat)
    paper.skip_to_end()
    tell = _tell_json if json else _teller(width)
    looks = iter([None]) if once else follow(opened, interval)
    try:
        for _ in looks:
            news = paper.read()
            if news is not None:
                tell(opened, news)
    except KeyboardInterrupt:
        raise typer.Exit from None
    _tell_end(opened, width=width, json=json)
    if opened.status in ("failed", "crashed"):
        raise typer.Exit(FOUND)


def follow(run: Run, interval: float, sleep: Callable[[float], None] | None = None) -> Iterator[None]:
    """Yield at once and then whenever there is something new to read; end when the run is no longer live.

    The status is taken before reading, so that what was written just before the end is still yielded.
    """
    yield None
    while True:
        status = run.status
        if run.refresh():
            yield None
        if status != "live":
            return
        (sleep or time.sleep)(interval)


def _teller(width: int | None) -> Callable[[Run, News], None]:
    from sonde.views.terminal import Look, event_line, make_console, news_line

    console = make_console(width=width)
    look = Look.of(console)

    def tell(run: Run, news: News) -> None:
        for event in news.events:
            console.print(event_line(event), soft_wrap=True)
        if news.step is not None:
            console.print(news_line(news, look), soft_wrap=True)

    return tell


def _tell_json(run: Run, news: News) -> None:
    import sys

    from sonde.cli.answer import print_json
    from sonde.cli.describe import describe_event, describe_mark

    worst: dict[str, Any] | None = None
    if news.worst is not None:
        worst = {"site": news.worst.site.key, **describe_mark(news.worst.mark)}
    print_json(
        {
            "status": run.status,
            "step": news.step,
            "new_steps": news.new_steps,
            "loss": news.loss,
            "learning_rate": news.learning_rate,
            "nonfinite": news.nonfinite,
            "worst": worst,
            "values": news.values,
            "events": [describe_event(event) for event in news.events],
        }
    )
    sys.stdout.flush()


def _tell_end(run: Run, *, width: int | None, json: bool) -> None:
    from sonde.analysis import count_steps
    from sonde.cli.answer import print_json
    from sonde.views.terminal import make_console
    from sonde.views.terminal.numbers import plural
    from sonde.views.terminal.palette import STATUS_STYLES

    steps = count_steps(run)
    if json:
        print_json({"status": run.status, "steps": steps})
        return
    console = make_console(width=width)
    console.print(f"[{STATUS_STYLES[run.status]}]{run.status}[/] after {plural(steps, 'step')}")
