"""`sonde compare RUN...`: compare runs side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, Width, require_run
from sonde.errors import OptionError

if TYPE_CHECKING:
    from sonde.analysis.divergence import Divergence
    from sonde.analysis.sweep import Group, LayerSpread, RunRow
    from sonde.store import Run

EXAMPLES = """
sonde compare runs/sweep  # all runs below a folder
sonde compare runs/a runs/b  # settings, metrics, layers, and where they diverge
sonde compare runs/sweep --by lr --metric val_acc  # mean and deviation over seeds
sonde compare runs/sweep --json  # for programs
"""

_MOST_METRICS: Final = 2
_MOST_COLUMNS: Final = 6  # of layers; more do not fit beside each other

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders with runs below them.", show_default=False)
]
By = Annotated[
    list[str] | None,
    typer.Option(
        "--by", metavar="SETTING", help="Group by a setting of the config. Default: repeats with other seeds together."
    ),
]
Metrics = Annotated[list[str] | None, typer.Option("--metric", metavar="NAME", help="Which logged numbers to show.")]


def compare(paths: Runs, by: By = None, metric: Metrics = None, width: Width = None, json: AsJson = False) -> None:
    """Compare runs: settings, metrics, findings, layers.

    Shows the settings that differ, the last and best of metrics, and what is wrong with each run; mean and deviation
    over runs that differ in their seed only; and the layers that differ most. Two runs: also where they diverge.
    """
    from sonde.analysis.divergence import divergence
    from sonde.analysis.sweep import group_rows, layers_apart, read_row, usual_grouping

    runs = dict(_open(paths))
    if len(runs) < 2:
        raise OptionError(f"compare needs two runs or more; {', '.join(map(str, paths))} has {len(runs)}.")
    rows = [read_row(run, name) for name, run in runs.items()]
    settings = _check(by, rows) if by else usual_grouping(rows)
    groups = group_rows(rows, settings) if settings else []
    together = [[runs[row.name] for row in group.rows] for group in groups] or [[run] for run in runs.values()]
    layers = layers_apart(together)
    both = list(runs.values())
    parted = divergence(both[0], both[1]) if len(both) == 2 else None
    if json:
        _print_json(rows, groups, layers, parted)
    else:
        _print(rows, groups, layers, parted, metric, width)


def _open(paths: Sequence[Path]) -> Iterator[tuple[str, Run]]:
    from sonde.store import list_runs, open_run

    # What all paths share says nothing.
    shared = Path(os.path.commonpath([each.absolute().parent if _is_run(each) else each.absolute() for each in paths]))
    for path in paths:
        below = [each for each in list_runs(path) if not each.problem] if path.is_dir() else []
        if not below:
            require_run(path)
        for each in reversed(below):  # the earliest first
            yield str(each.path.absolute().relative_to(shared)), open_run(each.path)


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file()


def _check(by: Sequence[str], rows: Sequence[RunRow]) -> list[str]:
    from sonde.analysis.sweep import differing

    known = {name for row in rows for name in row.settings}
    for name in by:
        if name not in known:
            raise OptionError(f"--by {name}: no run has that setting. Those that differ: {', '.join(differing(rows))}.")
    return list(by)


def _print(
    rows: list[RunRow],
    groups: list[Group],
    layers: list[LayerSpread],
    parted: Divergence | None,
    metric: list[str] | None,
    width: int | None,
) -> None:
    from rich.text import Text

    from sonde.views.terminal import Look, make_console
    from sonde.views.terminal.runs_table import render_comparison
    from sonde.views.terminal.tables import WIDE

    console = make_console(width=width)
    known = dict.fromkeys(name for row in rows for name in row.metrics)
    unknown = [name for name in metric or () if name not in known]
    if unknown:
        raise OptionError(f"--metric {unknown[0]}: no run has logged it. There is: {', '.join(known)}.")
    columns = len(groups) or len(rows)
    shown = layers if columns <= _MOST_COLUMNS else []
    usual = _usual(rows)[: _MOST_METRICS if console.width >= WIDE else 1]
    for part in render_comparison(rows, groups, shown, metric or usual, Look.of(console)):
        console.print(part)
    if parted is not None:
        console.print()
        console.print(Text(_where(parted)))


def _usual(rows: Sequence[RunRow]) -> list[str]:
    """Return metrics that half of the runs have; the training loss last, as it says least about how good a model is."""
    losses = {row.loss for row in rows}
    times = {name: sum(name in row.metrics for row in rows) for row in rows for name in row.metrics}
    common = [name for name in times if 2 * times[name] >= len(rows)] or list(times)
    return sorted(common, key=lambda name: (name in losses, -times[name]))


def _where(parted: Divergence) -> str:
    if parted.first is None:
        return f"They never diverge: {parted.sites} sites read the same at {parted.steps} steps."
    first = parted.first
    return f"They diverge at step {first.step}, first in {first.site}: {first.left:.6g} against {first.right:.6g}."


def _print_json(rows: list[RunRow], groups: list[Group], layers: list[LayerSpread], parted: Divergence | None) -> None:
    from sonde.analysis.sweep import differing

    answer: dict[str, Any] = {
        "runs": [asdict(row) for row in rows],
        "differing": differing(rows),
        "groups": [
            {"name": each.name, "settings": each.settings, "runs": [row.name for row in each.rows]}
            | {"last": each.last, "best": each.best, "troubles": each.troubles}
            for each in groups
        ],
        "layers": [asdict(row) for row in layers],
        "diverge": None if parted is None else parted.first,
    }
    print_json(answer)
