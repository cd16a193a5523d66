"""`sonde query RUN "expr"`: list the samples of a run that match an expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, RunPath, Width, require_run

if TYPE_CHECKING:
    from sonde.analysis.samples import Picked

EXAMPLES = """
sonde query runs/digits "loss > 0.5"  # in the last epoch, the worst first
sonde query runs/digits "label in (3, 5) and accuracy == 0"  # misclassified digits
sonde query runs/digits "percentile(loss) >= 99"  # the highest hundredth
sonde query runs/digits "rank(loss) <= 5 and epoch >= 2"  # in several epochs
"""

Expression = Annotated[
    str,
    typer.Argument(
        metavar="EXPR",
        help="A condition on metrics, idx, epoch, label and prediction; also percentile(loss), rank(loss).",
        show_default=False,
    ),
]
At = Annotated[
    str | None, typer.Option("--epoch", metavar="N", help="An epoch, or test or eval; by default the last with scores.")
]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="How many rows to print; --json prints all.")]


def query(
    run: RunPath, expression: Expression, epoch: At = None, limit: Limit = 20, width: Width = None, json: AsJson = False
) -> None:
    """Select samples of a run by their scores, labels and predictions.

    Scores come from sonde train and sonde eval; labels and predictions are known of the samples that were kept
    (`save_samples`). A comparison with what is not known is false. The viewer takes the same expressions.
    """
    from sonde.analysis.samples import pick
    from sonde.analysis.scores import find_evaluations

    if not find_evaluations(run):  # scores do: an evaluation, or a training with watch=False, records no run
        require_run(run)
    found = pick(run, expression, evaluation=epoch or "")
    if json:
        print_json({"run": str(run), "expression": expression, "count": len(found), "samples": found})
        return
    _print(found, limit, width)


def _print(found: list[Picked], limit: int, width: int | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from sonde.views.terminal import make_console

    console = make_console(width=width)
    if not found:
        console.print("No sample is like that.")
        return
    noted = [name for name in ("label", "prediction") if any(getattr(each, name) is not None for each in found)]
    metrics = list(found[0].scores)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("epoch", justify="right")
    table.add_column("idx", justify="right")
    for name in (*noted, *metrics):
        table.add_column(Text(name), justify="right")
    for each in found[:limit]:
        values = [str(getattr(each, name)) if getattr(each, name) is not None else "" for name in noted]
        scores = [f"{each.scores.get(name, float('nan')):.4g}" for name in metrics]
        table.add_row(*(Text(cell) for cell in (each.evaluation, str(each.idx), *values, *scores)))
    console.print(table)
    more = f"; the first {limit} are shown, --limit shows more" if len(found) > limit else ""
    console.print(f"{len(found):,} sample{'' if len(found) == 1 else 's'}{more}", highlight=False)
