"""Results of experiments on a tape, as plain data: `tapes/step_N/examination.json`. Reading it needs no torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sonde.core import files, tape
from sonde.core.files import Natural
from sonde.errors import OptionError, RunDamaged

FORMAT: Final = 1
NAME: Final = "examination.json"
SECONDS: Final = 60.0
"""How much processor time an examination may take."""
BUSY: Final = 3.0
"""How many times as long it may take by the clock, on a busy machine, before its process is killed."""
EXPERIMENTS: Final = ("free_outputs", "dependence", "information", "descent", "learnability")
"""The names of all experiments, in the order in which they run."""
_CHILD: Final = "sonde.forensics.experiments.child"

Number = float | str | None
"""A number; one that is not finite is written as text."""


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one experiment measured."""

    experiment: str
    changes: str = ""
    """What was different in the repeated step."""
    said: str = ""
    """The outcome in a sentence, with numbers."""
    numbers: dict[str, Number] = {}
    words: dict[str, str] = {}
    """Names that go with the numbers: of parameters, operations, lines."""
    skipped: str = ""
    """Why it could not be run, if so."""
    seconds: float = 0.0

    def number(self, name: str) -> float | None:
        """Return a number by name, or None if it was not measured."""
        found = self.numbers.get(name)
        return None if found is None else float(found)

    def part(self, prefix: str) -> dict[str, float]:
        """Return the numbers whose names begin with a prefix and a dot, without it."""
        start = f"{prefix}."
        return {
            name.removeprefix(start): float(value)
            for name, value in self.numbers.items()
            if name.startswith(start) and value is not None
        }


class Examination(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The experiments on the tape of one step."""

    step: Natural
    results: tuple[Result, ...] = ()
    note: str = ""
    """Why no experiment could be run, if so."""
    seconds: float = 0.0
    format: int = FORMAT

    def result(self, experiment: str) -> Result | None:
        """Return the result of an experiment that was run, or None."""
        found = (each for each in self.results if each.experiment == experiment and not each.skipped)
        return next(found, None)

    def number(self, experiment: str, name: str) -> float | None:
        """Return one number of an experiment, or None if it was not measured."""
        result = self.result(experiment)
        return None if result is None else result.number(name)


def number(value: float) -> Number:
    """Return a number as it is stored.

    >>> number(0.5), number(math.inf)
    (0.5, 'inf')
    """
    return float(value) if math.isfinite(value) else str(float(value))


def write(folder: Path, examination: Examination) -> Path:
    """Write an examination beside its tape, in one step."""
    path = folder / NAME
    with files.replacing(path, sync=False) as file:
        file.write(files.encode(examination))
    return path


def read(folder: Path) -> Examination | None:
    """Return the examination of a tape, or None if there is none.

    Raises:
        RunDamaged: It cannot be read.

    """
    path = folder / NAME
    try:
        found = files.read_as(path, _DECODER, "an examination")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if found.format == FORMAT else None


_DECODER: Final = msgspec.json.Decoder(Examination)


def of_run(run: Path) -> Mapping[int, Examination]:
    """Return all examinations of a run by step, in order; damaged ones are left out."""
    found: dict[int, Examination] = {}
    for step, folder in tape.folders(run).items():
        try:
            examination = read(folder)
        except RunDamaged:
            continue
        if examination is not None:
            found[step] = examination
    return found


def to_plain(examination: Examination) -> dict[str, Any]:
    """Return an examination as JSON-ready values."""
    plain: dict[str, Any] = msgspec.to_builtins(examination)
    return plain


# --------------------------------------------------------------------------------
# The process that makes an examination: on the CPU alone, with one thread and low priority. It never shares a device or
# memory with training, and nothing waits for it unless asked to.


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names of experiments.

    Raises:
        OptionError: There is no such experiment.

    """
    chosen = list(names)
    unknown = [name for name in chosen if name not in EXPERIMENTS]
    if unknown:
        raise OptionError(f"There is no experiment {unknown[0]!r}. Choose from: {', '.join(EXPERIMENTS)}.")
    return chosen


def start(folder: Path, *, only: Iterable[str] = (), seconds: float = SECONDS) -> subprocess.Popen[bytes]:
    """Start to examine the tape in a folder, in a process of its own, and return that process.

    It writes `examination.json` beside the tape and ends by itself after `seconds` of processor time at the latest.

    Raises:
        OptionError: There is no such experiment.
        OSError: The process cannot be started.

    """
    names = [argument for name in check_names(only) for argument in ("--only", name)]
    command = [sys.executable, "-m", _CHILD, str(folder), "--seconds", str(seconds), *names]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "SONDE_EXAMINE": "0"}
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        command,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Not a session of its own: Linux shares processors between sessions first, whatever the priority of a process.
        process_group=0,
    )


def examine(folder: Path, *, only: Iterable[str] = (), seconds: float = SECONDS) -> Examination:
    """Examine the tape in a folder in a process of its own, wait for it, and return the results."""
    process = start(folder, only=only, seconds=seconds)
    try:
        process.wait(BUSY * seconds + GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:
        process.kill()
        raise
    found = read(folder)
    if found is None:
        step = next((step for step, each in tape.folders(folder.parent.parent).items() if each == folder), 0)
        return Examination(
            step=step, note=f"The process that repeats the step ended without a result ({process.returncode})."
        )
    return found


GRACE: Final = 15.0
"""Seconds beyond its limit that a process gets, to import torch and to finish an operation."""
