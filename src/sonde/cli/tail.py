"""`sonde tail RUN`: follow a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import describe_event, describe_mark, print_json
from sonde.cli.guard import FOUND
from sonde.cli.opening import AsJson, RunPath, SiteGlob, StatName, Width, open_run
from sonde.cli.show import choose_sites

if TYPE_CHECKING:
    from sonde.analysis import News
    from sonde.records import Finding
    from sonde.store import Run

    Reporter = Callable[[Run, News | None, list[Finding]], None]

EXAMPLES = """
sonde tail runs/first  # until it ends
sonde tail runs/first --once  # where it stands now
sonde tail runs/first --site head.weight:gradient --stat norm  # with a statistic of your choice
"""

Interval = Annotated[float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="Time between updates.")]
Once = Annotated[bool, typer.Option("--once", help="Print the current state and stop.")]


def tail(
    run: RunPath,
    site: SiteGlob = None,
    stat: StatName = None,
    interval: Interval = 1.0,
    once: Once = False,
    width: Width = None,
    json: AsJson = False,
) -> None:
    """Follow a run as it trains, line by line.

    Each line covers the steps since the previous one: loss, learning rate, non-finite values, the worst layer, new
    events and findings. Exits with 0 when the run has finished, with 1 when it ended in another way. Ctrl-C stops
    following and does not affect the training.
    """
    from sonde.analysis import Newspaper

    opened = open_run(run)
    chosen = choose_sites(opened, site, stat) if site is not None or stat is not None else []
    paper = Newspaper(opened, sites=chosen, stat=stat)
    paper.skip_to_end()
    report = _report_json if json else _text_reporter(width)
    looks = iter([None]) if once else follow(opened, interval)
    reported: set[str] = set()
    try:
        for _ in looks:
            news, found = paper.read(), _new_findings(opened, reported)
            if news is not None or found:
                report(opened, news, found)
    except KeyboardInterrupt:
        raise typer.Exit from None
    _report_end(opened, width=width, json=json)
    if opened.status not in ("live", "finished"):
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


def _new_findings(run: Run, reported: set[str]) -> list[Finding]:
    new = [finding for finding in run.findings if finding.severity != "info" and finding.kind not in reported]
    reported.update(finding.kind for finding in new)
    return new


def _text_reporter(width: int | None) -> Reporter:
    from sonde.views.terminal import Look, event_line, make_console, news_line
    from sonde.views.terminal.findings import finding_lines

    console = make_console(width=width)
    look = Look.of(console)

    def report(run: Run, news: News | None, found: list[Finding]) -> None:
        for event in news.events if news is not None else ():
            console.print(event_line(event), soft_wrap=True)
        if news is not None and news.step is not None:
            console.print(news_line(news, look), soft_wrap=True)
        if found:
            console.print(finding_lines(found, look, most=len(found)))

    return report


def _report_json(run: Run, news: News | None, found: list[Finding]) -> None:
    import sys

    from sonde.analysis import News

    news = news or News(None, 0, float("nan"), float("nan"), 0, None)
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
            "findings": [finding.kind for finding in found],
            "events": [describe_event(event) for event in news.events],
        }
    )
    sys.stdout.flush()


def _report_end(run: Run, *, width: int | None, json: bool) -> None:
    from rich.markup import escape

    from sonde.analysis import count_steps
    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import STATUS_STYLES, plural

    steps = count_steps(run)
    if json:
        print_json({"status": run.status, "steps": steps})
        return
    console = make_console(width=width)
    grave = sum(finding.severity != "info" for finding in run.findings)
    more = f"; {plural(grave, 'finding')}: sonde diagnose {escape(run.address)}" if grave else ""
    words = f"[{STATUS_STYLES[run.status]}]{run.status}[/] after {plural(steps, 'step')}{more}"
    console.print(words, soft_wrap=True)
