"""The cell magic `%%sonde`: watch whatever trains in a cell, as `sonde run` does in a script.

%load_ext sonde

%%sonde --run runs/first
train(model, optimizer)
"""

from __future__ import annotations

import shlex
import sys
from typing import Any, Final

from sonde.errors import OptionError
from sonde.integrations.discovery import Discovery

USUAL_PLACE: Final = "runs/notebook-*"


def load(shell: Any) -> None:
    """Register the magic with a shell of IPython."""
    shell.register_magic_function(lambda line, cell: watch_cell(shell, line, cell), "cell", "sonde")


def watch_cell(shell: Any, line: str, cell: str) -> None:
    """Run a cell, record what trains in it, show it live, and print what was found.

    Args:
        shell: The shell of IPython, which runs the cell as it runs any other.
        line: What follows `%%sonde`: nothing, or `--run FOLDER`, in which a star becomes a number.
        cell: The code.

    """
    discovery: Discovery = Discovery(_place(line), {}, on_start=lambda: _show(discovery))
    discovery.install(existing=True)
    error: BaseException | None = None
    try:
        error = shell.run_cell(cell).error_in_exec  # the shell shows the traceback itself
    finally:
        why_not = discovery.finish(error)
        if why_not:
            sys.stderr.write(f"sonde: nothing was recorded: {why_not}\n")


def _place(line: str) -> str:
    words = shlex.split(line)
    if not words:
        return USUAL_PLACE
    if len(words) != 2 or words[0] != "--run":
        raise OptionError(f"%%sonde takes --run FOLDER; got {line!r}.")
    return words[1]


def _show(discovery: Discovery) -> None:
    if discovery.session is not None:
        discovery.session.show()
