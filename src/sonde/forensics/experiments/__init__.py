"""Experiments on a tape: the taped step is repeated with one thing changed, as tests that need no knowledge of a fault.

Each experiment is a function of a `Subject` that returns what it measured. What a measurement means is decided by the
rules of `sonde.diagnosis.rules.experiments`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch

from sonde.core import tape as tapes
from sonde.core.examination import SECONDS, Examination, Result, check_names
from sonde.core.tape import Tape
from sonde.forensics.experiments.dependence import dependence
from sonde.forensics.experiments.descent import descent
from sonde.forensics.experiments.information import information
from sonde.forensics.experiments.kernels import CannotRepeat
from sonde.forensics.experiments.learnability import learnability
from sonde.forensics.experiments.outputs import free_outputs
from sonde.forensics.experiments.program import Program
from sonde.forensics.experiments.subject import DoesNotApply, Measured, Subject

TOLERANCE: Final = 1e-3
"""By how much a repeated loss may differ from the taped one, relative to it: other devices round otherwise."""

EXPERIMENTS: Final[dict[str, Callable[[Subject], Measured]]] = {
    "free_outputs": free_outputs,
    "dependence": dependence,
    "information": information,
    "descent": descent,
    "learnability": learnability,
}


def examine(
    tape: Tape,
    *,
    only: Iterable[str] | None = None,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Examination:
    """Run experiments on a tape.

    Args:
        tape: A tape with its tensors.
        only: Names of experiments; all by default.
        seconds: When to stop.
        clock: Tells the time.

    Raises:
        OptionError: There is no such experiment.

    """
    chosen = check_names(EXPERIMENTS if only is None else only)
    began = clock()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            subject = Subject(tape, seconds=seconds, clock=clock)
            check(subject.program)
        except CannotRepeat as reason:
            return Examination(step=tape.step, note=f"The step cannot be repeated: {reason}.")
        results = tuple(_run(name, subject) for name in chosen)
    return Examination(step=tape.step, results=results, seconds=round(clock() - began, 3))


def check(program: Program) -> None:
    """Raise CannotRepeat unless the repeated step gives the taped losses and gradients."""
    world = program.world()
    done = program.repeat(world)
    if not all(bool(loss.detach().isfinite().all()) for loss in done.losses):
        raise CannotRepeat("its loss is not finite")
    for root, loss in zip(program.roots, done.losses, strict=True):
        taped = program.saved(root)
        if taped is not None and not _is_close(float(taped.sum()), float(loss.detach().sum())):
            raise CannotRepeat(
                f"the repeated loss is {float(loss.detach().sum()):.6g}, the taped {float(taped.sum()):.6g}"
            )


def _is_close(one: float, two: float) -> bool:
    if not math.isfinite(one) or not math.isfinite(two):
        return (math.isnan(one) and math.isnan(two)) or one == two
    return abs(one - two) <= TOLERANCE * max(abs(one), abs(two), 1e-12)


def _run(name: str, subject: Subject) -> Result:
    changes = (EXPERIMENTS[name].__doc__ or "").partition("\n")[0]
    began = time.perf_counter()
    if subject.left() <= 0:
        return Result(experiment=name, changes=changes, skipped="no time was left")
    try:
        measured = EXPERIMENTS[name](subject)
    except (CannotRepeat, DoesNotApply) as reason:
        return Result(experiment=name, changes=changes, skipped=str(reason))
    except (RuntimeError, IndexError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        return Result(experiment=name, changes=changes, skipped=f"it failed: {type(error).__name__}: {error}"[:300])
    return Result(
        experiment=name,
        changes=changes,
        said=measured.said,
        numbers=measured.plain_numbers(),
        words={key: text for key, text in measured.words.items() if text},
        seconds=round(time.perf_counter() - began, 3),
    )


def examine_folder(folder: Path, *, only: Iterable[str] | None = None, seconds: float = SECONDS) -> Examination:
    """Run experiments on the tape in a folder, with one thread; `seconds` are of processor time."""
    torch.set_num_threads(1)
    return examine(tapes.read(folder), only=only, seconds=seconds, clock=time.process_time)
