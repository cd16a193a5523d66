"""`sonde note RUN`: tags and a note that lists of runs show."""

from __future__ import annotations

from typing import Annotated

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, RunPath, require_run
from sonde.errors import OptionError, escaped

EXAMPLES = """
sonde note runs/first "wider, with warm-up" --tag baseline
sonde note runs/first --remove baseline
sonde note runs/first  # what is noted
"""

Text = Annotated[str | None, typer.Argument(metavar="NOTE", help="The note; it replaces the one that is there.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="WORD", help="Add a tag.")]
Gone = Annotated[list[str] | None, typer.Option("--remove", metavar="WORD", help="Remove a tag.")]

_MOST = 100


def note(run: RunPath, text: Text = None, tag: Tags = None, remove: Gone = None, json: AsJson = False) -> None:
    """Tag a run, or write a note about it."""
    from sonde.store.header import Labels, read_header, read_labels, write_labels

    require_run(run)
    user = read_header(run).config.get("user")
    labels = read_labels(run, user if isinstance(user, dict) else {})
    added = [each.strip() for each in tag or ()]
    if any(not each or len(each) > _MOST for each in added):
        raise OptionError(f"--tag takes a word of 1 to {_MOST} characters.")
    if text is not None or tag or remove:
        kept = dict.fromkeys(each for each in (*labels.tags, *added) if each not in (remove or ()))
        labels = Labels(tuple(kept), labels.note if text is None else text)
        write_labels(run, labels)
    if json:
        print_json({"tags": list(labels.tags), "note": labels.note})
    else:
        typer.echo(escaped(" ".join(f"#{each}" for each in labels.tags)) or "no tags")
        typer.echo(escaped(labels.note) or "no note")
