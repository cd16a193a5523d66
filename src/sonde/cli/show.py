"""`sonde show RUN`: the summary page of a run, or the sites and steps asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.answer import describe_page, describe_readings, describe_sites, print_json
from sonde.cli.opening import AsJson, LastSteps, OneRank, RunPath, SiteGlob, StatName, Width, find_sites, open_run
from sonde.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.analysis import SiteSummary
    from sonde.records import Reading, Site
    from sonde.store import Run

EXAMPLES = """
sonde show runs/first  # the summary page
sonde show runs/first --site '*:gradient'  # every gradient, worst first
sonde show runs/first --site head.weight:gradient  # one site in full
sonde show runs/first --stat ratio --last 100  # recent update ratios
sonde show runs/first --step 310  # every site at one step
sonde show runs/first --rank 3  # one rank of several by itself
"""

Step = Annotated[int | None, typer.Option("--step", metavar="N", help="All readings of one step.")]
Rows = Annotated[int, typer.Option("--rows", min=0, metavar="N", help="Show at most N sites; 0 shows all.")]


def show(
    run: RunPath,
    site: SiteGlob = None,
    stat: StatName = None,
    step: Step = None,
    last: LastSteps = None,
    rows: Rows = 40,
    rank: OneRank = None,
    width: Width = None,
    json: AsJson = False,
) -> None:
    """Show how a run went, worst layers first.

    Without options: the summary page. With --site or --stat: a table of sites, and for a single site its curve and
    histogram. With --step: the readings of one step.
    """
    opened = open_run(run, rank)
    if step is not None:
        _show_step(opened, site, step, rows=rows, width=width, json=json)
    elif site is not None or stat is not None:
        _show_sites(opened, site, stat, last=last, rows=rows, width=width, json=json)
    else:
        _show_page(opened, last=last, width=width, json=json)


def _show_page(run: Run, *, last: int | None, width: int | None, json: bool) -> None:
    from sonde.views.terminal import make_console, print_summary, read_page

    if json:
        print_json(describe_page(read_page(run, last=last)))
    else:
        print_summary(run, make_console(width=width), last=last)


def _show_sites(
    run: Run,
    pattern: str | None,
    stat: str | None,
    *,
    last: int | None,
    rows: int,
    width: int | None,
    json: bool,
) -> None:
    from sonde.views.terminal import make_console

    found = judged(run, choose_sites(run, pattern, stat), stat, last)
    if json:
        print_json(describe_sites(run, found))
    else:
        _print_sites(run, found, rows, make_console(width=width))


def choose_sites(run: Run, pattern: str | None, stat: str | None) -> list[Site]:
    """Return the sites to show: those that match and have the statistic.

    Raises:
        OptionError: There is no such statistic, or none of the sites has it.
        SelectionError: No site matches.

    """
    from sonde.core import statistics

    wanted = None if stat is None else statistics.find(stat).quantity
    chosen = [site for site in find_sites(run, pattern) if wanted in (None, site.quantity)]
    if not chosen:
        raise OptionError(f"{stat!r} is a statistic of {wanted} sites, and none is among these.")
    # A table of magnitudes is not about learning rates, unless they were asked for.
    tensors = [site for site in chosen if site.quantity not in ("scalar", "vital")]
    return chosen if pattern is not None or stat == "value" or not tensors else tensors


def judged(run: Run, sites: list[Site], stat: str | None, last: int | None) -> list[SiteSummary]:
    """Summarise sites, worst first."""
    from sonde.analysis import ModelOrder, summarise_sites, worst_first

    return worst_first(summarise_sites(run, sites, stat=stat, last=last), ModelOrder(run.header, run.sites))


def _print_sites(run: Run, found: list[SiteSummary], rows: int, console: Console) -> None:
    from rich.text import Text

    from sonde.views.terminal import Look, render_site, site_table

    look = Look.of(console)
    shown = found[:rows] if rows else found
    steps = [int(step) for row in shown if len(row.steps) for step in (row.steps[0], row.steps[-1])]
    console.print(site_table(shown, (min(steps, default=0), max(steps, default=0)), look))
    if len(shown) < len(found):
        console.print(Text(f"and {len(found) - len(shown)} more sites; --rows 0 shows all", "dim"))
    if len(found) == 1:
        for part in render_site(run, found[0], look):
            console.print(part)


def _show_step(run: Run, pattern: str | None, step: int, *, rows: int, width: int | None, json: bool) -> None:
    from rich.text import Text

    from sonde.views.terminal import Look, make_console, reading_table

    readings = readings_at(run, pattern, step)
    if json:
        print_json(describe_readings(run, step, readings))
        return
    console = make_console(width=width)
    shown = readings[:rows] if rows else readings
    console.print(Text.assemble((f"{Path(run.path).name} at step {step}", "bold")))
    console.print(reading_table(shown, Look.of(console)))
    if len(shown) < len(readings):
        console.print(Text(f"and {len(readings) - len(shown)} more sites; --rows 0 shows all", "dim"))


def readings_at(run: Run, pattern: str | None, step: int) -> list[tuple[Site, Reading]]:
    """Return what the sites read at a step: those that were not finite first, then in model order.

    Raises:
        OptionError: The step was not recorded; the message names the nearest that was.

    """
    import numpy as np

    from sonde.analysis import ModelOrder

    keys = {site.key for site in find_sites(run, pattern)}
    readings = [(site, reading) for site, reading in run.at(step).items() if site.key in keys]
    if not readings:
        if not len(run.steps):
            raise OptionError(f"{run.address} has no steps.")
        nearest = int(run.steps[np.abs(run.steps - step).argmin()])
        span = f"{run.steps[0]} to {run.steps[-1]}"
        raise OptionError(f"Nothing was read at step {step}; the run has steps {span}. Nearest: --step {nearest}")
    order = ModelOrder(run.header, run.sites)
    return sorted(readings, key=lambda pair: (pair[1].nonfinite == 0, order.of_site(pair[0])))
