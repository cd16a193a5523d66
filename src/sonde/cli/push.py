"""`sonde push RUN`: carry a run to an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson, require_run
from sonde.errors import RunError

EXAMPLES = """
sonde push ~/.cache/sonde/spool/s3/bucket/runs/first  # the rest of a run that was cut off
sonde push runs/first --to s3://bucket/runs/first  # a run of this machine
"""

Local = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
To = Annotated[
    str | None, typer.Option("--to", metavar="ADDRESS", help="Where to; by default where it was carried before.")
]
Patience = Annotated[
    float, typer.Option("--patience", min=0, metavar="SECONDS", help="How long to try while the store does not answer.")
]


def push(run: Local, to: To = None, patience: Patience = 60.0, json: AsJson = False) -> None:
    """Carry a run to an object store, or what is left of it.

    A run that is recorded with an address such as s3://bucket/runs/first is written to a local spool and carried up
    meanwhile. This carries what a crash or a store that did not answer has left.
    """
    from dataclasses import asdict

    from sonde.store.remote.spool import push as carry
    from sonde.views.terminal import make_console

    require_run(run)
    done = carry(run, to, patience_s=patience)
    if json:
        print_json({"run": str(run), "is_complete": done.is_complete, **asdict(done)})
    elif done.is_complete:
        make_console().print(f"Everything of {run} is at {done.address}.", soft_wrap=True, markup=False)
    if not done.is_complete:
        left = f"{done.left_files} files ({done.left_bytes / 1e6:.1f} MB) of {run} are not at {done.address}"
        raise RunError(f"{left} yet: {done.error or 'it is still being written'}.")
