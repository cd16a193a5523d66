"""`sonde export RUN`: export the numbers of a run."""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.answer import print_json, utf8_output
from sonde.cli.opening import AsJson, OneRank, SiteGlob, find_sites, open_run, read_place
from sonde.errors import OptionError

if TYPE_CHECKING:
    from rich.progress import Progress

    from sonde.analysis.export_formats import Writer
    from sonde.records import Site
    from sonde.store import Run


EXAMPLES = """
sonde export runs/first --to parquet --out first.parquet  # everything
sonde export runs/first --to csv --out g.csv --stat norm  # a part
sonde export runs/first --to csv --out - | head  # a first look
sonde export runs/first --to tensorboard --out logs/first  # then: tensorboard --logdir logs
sonde export runs/first --to site --out first-site  # the viewer as plain files; open index.html
sonde export runs --to dataset --out fleet  # all runs below a folder, for DuckDB, Polars and others
"""


class Format(StrEnum):
    """File formats."""

    parquet = "parquet"
    csv = "csv"
    json = "json"
    tensorboard = "tensorboard"
    site = "site"
    dataset = "dataset"


Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="The folder of a run, or its address (s3://...). For dataset: folders with runs below them.",
        show_default=False,
        parser=read_place,
    ),
]
To = Annotated[
    Format,
    typer.Option(
        "--to", metavar="parquet|csv|json|tensorboard|site|dataset", help="What to write.", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="The file to write, - for standard output; for tensorboard, site and dataset a folder.",
        show_default=False,
    ),
]
Stats = Annotated[
    list[str] | None,
    typer.Option("--stat", metavar="NAME", help="Only this statistic; repeat for several. One of: {statistics}."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


def export(
    runs: Runs,
    to: To,
    out: Out = None,
    site: SiteGlob = None,
    stat: Stats = None,
    rank: OneRank = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Export the numbers of a run: CSV, Parquet, JSON, TensorBoard.

    CSV, Parquet and JSON hold one long table: a row for each site and step, a column for each statistic. It is written
    in parts, so memory stays small however long the run is. tensorboard writes a folder with an event file: curves, and
    histograms of magnitudes. site writes the viewer as a folder of plain files, which opens without Sonde.

    dataset writes all runs below folders as Parquet tables: runs, series, findings, events. Runs that did not change
    since the last export are skipped. Its folder may also be the last argument: DIR... --to dataset OUT.
    """
    from sonde.analysis.export_formats import open_writer, replacing
    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import plural, size

    if to is Format.dataset:
        _refuse_parts(site, stat, rank)
        _export_dataset(runs, out, json=json)
        return
    run, out = _one_run(runs, out, to)
    opened = open_run(run, rank)
    if str(out) == "-":
        _print_table(opened, to, find_sites(opened, site), check_columns(stat))
        return
    if to is Format.site:
        _refuse_rank(rank)
        _export_site(opened, out, json=json)
        return
    columns = check_columns(stat)
    sites = find_sites(opened, site)
    if to is Format.tensorboard:
        _export_tensorboard(opened, sites, stat, out, force=force, json=json)
        return
    check_target(out, force)
    with replacing(out) as unfinished, open_writer(to.value, unfinished, columns) as writer:
        rows = _copy(opened, sites, columns, writer, quiet=json)
    if json:
        print_json({"run": opened.address, "out": str(out), "format": to.value, "rows": rows, "sites": len(sites)})
    else:
        console = make_console()
        summary = f"{plural(rows, 'row')} of {plural(len(sites), 'site')} in {out} ({size(out.stat().st_size)})"
        console.print(summary, soft_wrap=True)


def _one_run(runs: list[Path], out: Path | None, to: Format) -> tuple[Path, Path]:
    if out is None:
        raise OptionError("Missing option '--out'. Run: sonde export --help")
    if len(runs) > 1:
        raise OptionError(f"--to {to.value} takes one run; {len(runs)} were named. --to dataset takes several.")
    return runs[0], out


def _refuse_parts(*given: object) -> None:
    if any(each is not None and each != [] for each in given):
        raise OptionError("--to dataset writes all of every run; leave out --site, --stat and --rank.")


def _export_dataset(folders: list[Path], out: Path | None, *, json: bool) -> None:
    from sonde.analysis.fleet import choose_engine, plan_export
    from sonde.cli.fleet import do
    from sonde.store.remote.mirror import shown

    if out is None:
        *folders, out = folders
    if not folders:
        raise OptionError("Name the folder to write: sonde export DIR... --to dataset --out OUT")
    do(plan_export(map(shown, folders), out), choose_engine("local", jobs=1), "export", out, json=json)


def _refuse_rank(rank: int | None) -> None:
    if rank is not None:
        raise OptionError("--to site writes all ranks; leave out --rank.")


def _print_table(run: Run, to: Format, sites: list[Site], columns: tuple[str, ...]) -> None:
    from sonde.analysis.export_formats import text_writer

    if to not in (Format.csv, Format.json):
        raise OptionError(
            f"--to {to.value} cannot go to standard output; name a file with --out, or choose csv or json."
        )
    with text_writer(to.value, utf8_output(), columns) as writer:
        _copy(run, sites, columns, writer, quiet=True)


def _export_tensorboard(
    run: Run, sites: list[Site], stats: list[str] | None, out: Path, *, force: bool, json: bool
) -> None:
    from sonde.analysis.export_formats import check_folder, export_tensorboard
    from sonde.views.terminal import make_console

    check_folder(out, force)
    done = export_tensorboard(run, sites, stats, out)
    if json:
        print_json({"run": run.address, "out": str(out), "format": "tensorboard", **done, "sites": len(sites)})
    else:
        words = f"{done['points']:,} points of {done['tags']:,} tags in {out}; look: tensorboard --logdir {out}"
        make_console().print(words, soft_wrap=True)


def _export_site(run: Run, out: Path, *, json: bool) -> None:
    from sonde.views.site import write_site
    from sonde.views.terminal import make_console
    from sonde.views.terminal.style import size

    done = write_site(run.path, out)
    if json:
        summary = {"answers": done.answers, "bytes": done.nbytes, "left_out": done.left_out}
        print_json({"run": run.address, "out": str(out), "format": "site", **summary})
        return
    console = make_console()
    console.print(f"The viewer with this run in {out} ({size(done.nbytes)}); open {out / 'index.html'}", soft_wrap=True)
    for line in done.left_out:
        console.print(f"  {line}", soft_wrap=True, style="dim", markup=False)


def check_columns(stats: list[str] | None) -> tuple[str, ...]:
    """Return the statistics to write, all by default.

    Raises:
        OptionError: There is no such statistic.

    """
    from sonde.core import statistics

    for name in stats or ():
        statistics.find(name)
    return tuple(dict.fromkeys(stats)) if stats else tuple(name for name in statistics.STATISTICS if name != "value")


def check_target(out: Path, force: bool) -> None:
    """Refuse a file that cannot or must not be written, before any work is done.

    Raises:
        OptionError: It exists, or its folder does not.

    """
    if out.is_dir():
        raise OptionError(f"{out} is a folder; --out names a file.")
    if not out.parent.is_dir():
        raise OptionError(f"There is no folder {out.parent} to write {out.name} in. Make it first.")
    if out.exists() and not force:
        raise OptionError(f"{out} exists and will not be written over without --force.")


def _copy(run: Run, sites: list[Site], columns: tuple[str, ...], writer: Writer, *, quiet: bool) -> int:
    from sonde.analysis import read_rows, windows

    rows = 0
    parts = list(windows(run))
    with make_progress(quiet) as progress:
        task = progress.add_task("exporting", total=len(sites) * len(parts))
        for site, part in product(sites, parts):
            for table in read_rows(run, site, columns, part):
                writer.write(table)
                rows += len(table)
            progress.advance(task)
    return rows


def make_progress(quiet: bool) -> Progress:
    """Return a progress bar on standard error, shown only in a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from sonde.views.terminal import make_console

    console = make_console(stderr=True)
    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*parts, console=console, transient=True, disable=quiet or not console.is_terminal)
