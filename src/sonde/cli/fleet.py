"""`sonde fleet diagnose|export|query|report`: diagnose and query thousands of runs."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.export import make_progress
from sonde.cli.guard import FOUND
from sonde.cli.opening import AsJson, Width
from sonde.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.analysis.fleet import Engine as EngineFunction
    from sonde.analysis.fleet import Work

EXAMPLES = """
sonde fleet diagnose runs --out fleet  # all runs below a folder, in processes
sonde fleet export runs s3://bucket/runs --out fleet  # the same runs as Parquet tables
sonde fleet report fleet  # which findings, in which projects, since when
sonde fleet query "select run from diagnosed_runs where steps > 9" fleet
"""


class Action(StrEnum):
    """What to do."""

    diagnose = "diagnose"
    export = "export"
    query = "query"
    report = "report"


class Engine(StrEnum):
    """What the work runs on."""

    local = "local"
    ray = "ray"


What = Annotated[Action, typer.Argument(metavar="diagnose|export|query|report", help="What to do.", show_default=False)]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="DIR...",
        help="diagnose, export: folders or addresses (s3://...) with runs below them. query: the SQL, then OUT. "
        "report: OUT.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="OUT", help="diagnose, export: the folder that keeps the results.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, metavar="N", help="diagnose, export: how many processes. By default all cores."),
]
On = Annotated[
    Engine,
    typer.Option("--engine", metavar="local|ray", help="diagnose, export: local processes, or a running Ray cluster."),
]


def fleet(
    action: What,
    words: Words,
    out: Out = None,
    jobs: Jobs = None,
    engine: On = Engine.local,
    width: Width = None,
    json: AsJson = False,
) -> None:
    """Diagnose, export, query and sum up thousands of runs.

    diagnose judges all runs below folders and keeps one line per run in OUT/diagnoses.jsonl; export writes them as
    Parquet tables (runs, series, findings, events), as sonde export --to dataset does. Interrupted, both go on where
    they stopped; runs that did not change are left out. report sums up the diagnoses. query runs SQL (DuckDB) on
    diagnosed_runs and diagnosed_findings, and on the tables of export; both may be in the same folder.
    """
    from sonde.analysis import fleet as work

    if action in (Action.diagnose, Action.export):
        if out is None:
            raise OptionError(f"Name the folder for the results: sonde fleet {action.value} DIR... --out OUT")
        plan = work.plan_diagnosis if action is Action.diagnose else work.plan_export
        failed = do(plan(words, out), work.choose_engine(engine.value, jobs), action.value, out, json=json)
        if failed and action is Action.diagnose:
            raise typer.Exit(FOUND)
    elif action is Action.query:
        if len(words) != 2:
            raise OptionError('query takes the SQL and one folder of results: sonde fleet query "select ..." OUT')
        _query(words[0], Path(words[1]), width=width, json=json)
    else:
        if len(words) != 1:
            raise OptionError("report takes one folder of results: sonde fleet report OUT")
        _report(Path(words[0]), width=width, json=json)


_DONE = {"diagnose": "diagnosed", "export": "written"}


def do(plan: Work, engine: EngineFunction, action: str, out: Path, *, json: bool) -> dict[str, str]:
    """Do the work with a progress bar, and print what was done; return the problems by run."""
    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import plural

    done, problems = 0, {}
    with make_progress(json) as progress:
        for line in progress.track(
            plan.run(engine), total=len(plan.todo), description=f"{action.removesuffix('e')}ing"
        ):
            done += 1
            if line.get("problem"):
                problems[line["run"]] = line["problem"]
    if json:
        about = {"format": "dataset"} if action == "export" else {}
        counts = {"runs": len(plan.todo) + plan.unchanged, _DONE[action]: done, "unchanged": plan.unchanged}
        print_json({"out": str(out), **about, **counts, "problems": problems})
        return problems
    console = make_console()
    where = f" to {out}" if action == "export" else ""
    console.print(f"{plural(done, 'run')} {_DONE[action]}{where}, {plan.unchanged} unchanged", soft_wrap=True)
    _print_problems(console, problems)
    if action == "diagnose":
        console.print(f"Run: sonde fleet report {out}", soft_wrap=True, markup=False)
    return problems


def _print_problems(console: Console, failed: dict[str, str]) -> None:
    for run, problem in failed.items():
        console.print(f"  {run}: {problem}", soft_wrap=True, markup=False)


def _query(sql: str, out: Path, *, width: int | None, json: bool) -> None:
    from sonde.analysis.fleet import run_query
    from sonde.views.terminal import make_console
    from sonde.views.terminal.tables import plain_table

    columns, rows = run_query(sql, out)
    if json:
        print_json([dict(zip(columns, map(_plain, row), strict=True)) for row in rows])
        return
    from rich.text import Text

    table = plain_table(*columns)
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    make_console(width=width).print(table)


def _plain(cell: Any) -> Any:
    return cell if isinstance(cell, str | int | float | bool | list | dict | None) else str(cell)


def _report(out: Path, *, width: int | None, json: bool) -> None:
    from sonde.analysis import fleet as work
    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import plural
    from sonde.views.terminal.tables import plain_table

    work.require_results(out)
    lines = work.read_results(out)
    rows, failed = work.sum_up(lines), {line["run"]: line["problem"] for line in lines if line.get("problem")}
    found, projects = sum(bool(line["findings"]) for line in lines), len({line["project"] for line in lines})
    if json:
        counts = {"runs": len(lines), "projects": projects, "with_findings": found}
        print_json({"out": str(out), **counts, "findings": rows, "problems": failed})
        return
    from rich.text import Text

    console = make_console(width=width)
    console.print(f"{plural(len(lines), 'run')} in {plural(projects, 'project')}, {found} with findings")
    table = plain_table("finding", "severity", "project", "runs", "of", "since", "latest", right=("runs", "of"))
    for row in rows:
        days = [time.strftime("%Y-%m-%d", time.localtime(row[name])) for name in ("since", "latest")]
        cells = (row["finding"], row["severity"], row["project"], str(row["runs"]), str(row["of"]), *days)
        table.add_row(*map(Text, cells))
    if rows:
        console.print(table)
    if failed:
        console.print(f"{plural(len(failed), 'run')} could not be judged:")
        _print_problems(console, failed)
