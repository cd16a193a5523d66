"""Run scripts in forks of one process that has imported torch: each as `python SCRIPT`, or as `sonde run SCRIPT`."""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PATIENCE_WITHOUT_SONDE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended."""

    code: int
    """As `subprocess` counts: a signal is negative."""
    out: str
    err: str


@contextmanager
def forks() -> Iterator[Callable[..., Ended]]:
    """Hand out a function that runs arguments in a folder; with several environments, at the same time."""
    from tests.waiting import ask, started

    def answer(question: str, is_bare: bool) -> str:
        nonlocal process
        try:
            return ask(process, question, PATIENCE_WITHOUT_SONDE_S if is_bare else None)
        except (AssertionError, OSError):
            # Ranks of torch alone have hung here once in hundreds of runs; the next try must not meet at their file.
            process = running.enter_context(started([sys.executable, __file__]))
            if not is_bare:
                raise
            for place in re.findall(r"file://([^\"]+)", question):
                Path(place).unlink(missing_ok=True)
            return ask(process, question)

    def run(folder: Path, *arguments: object, ranks: list[dict[str, str]] | None = None) -> list[Ended]:
        question = json.dumps([str(folder), list(map(str, arguments)), ranks or [{}]])
        codes = json.loads(answer(question, arguments[0] != "sonde"))
        texts = [[(folder / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(len(codes))]
        return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]

    with ExitStack() as running:
        process = running.enter_context(started([sys.executable, __file__]))
        yield run


def _next_arguments() -> list[str]:
    """Fork for each line that comes, and return its arguments in the children; end when no more come."""
    for line in sys.stdin:
        folder, arguments, environments = json.loads(line)
        children = []
        for rank, environment in enumerate(environments):
            child = os.fork()
            if child == 0:
                os.chdir(folder)
                os.environ.update(environment)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for number, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                return arguments
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    os._exit(0)


def _end_after(program: Callable[[], object]) -> NoReturn:
    """Run a program and end as the interpreter would, but for tearing torch down, which takes a second.

    What the program leaves is kept: when a model of several ranks is freed, torch waits with Python's lock for a
    thread of Gloo, and now and then that thread waits for the lock.
    """
    code, kept = 0, []
    try:
        kept.append(program())
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        code = -2 if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    import torch
    import torch._dynamo
    import torch.distributed

    import sonde.integrations.discovery
    import sonde.views.terminal.findings
    import sonde.watching  # noqa: F401
    from sonde.cli.main import run

    torch.set_num_threads(1)
    sys.argv = _next_arguments()
    _end_after(run if sys.argv[0] == "sonde" else lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
