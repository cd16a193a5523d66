"""What a program of the fault benchmark says about itself, and how it is run.

A program is a function `train(attach, fixed)` that trains for a second. It calls `attach(model, optimizer, ...)` where
a user would call `sonde.watch`, logs what people log with what it gets back, and returns how ill it was in the end: one
number, low if all is well. `fixed` is used once, in the expression that is wrong.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch


class Session(Protocol):
    """What programs use of a session."""

    def log(self, **scalars: Any) -> None: ...

    def epoch(self, number: int) -> None: ...


class NoSession:
    """What `attach` returns if nobody watches."""

    def log(self, **scalars: Any) -> None: ...

    def epoch(self, number: int) -> None: ...


Attach = Callable[..., Session]
Train = Callable[..., float]


def unwatched(model: Any, optimizer: Any = None, **helpers: Any) -> NoSession:
    """Attach nothing."""
    return NoSession()


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program and the truth about it."""

    name: str
    train: Train
    arch: str
    task: str
    well: float
    """A repaired twin or a healthy program ends at this illness or below."""
    ill: float | None = None
    """The faulty program ends at this illness or above."""
    kind: str | None = None
    """The fault, or None for a healthy program."""
    also: tuple[str, ...] = ()
    """Names that are just as right, since the same edit would cure them."""
    cascade: tuple[str, ...] = ()
    """What the fault brings about: right to report, but not as the cause."""
    sites: tuple[str, ...] = ()
    """Where the fault sits: any of these modules, parameters or helpers. Empty if it has no place."""
    onset: int = 1
    """The step from which on the fault acts."""
    exact: bool = True
    """The fault breaks an exact relation; else it shows in statistics only."""
    group: str = ""
    deceptive: bool = False
    """A healthy program that looks ill."""
    set: str = "dev"
    """The set it belongs to, which is the folder of its file: `dev`, or a held-out one. Each is scored by itself."""

    @property
    def held_out(self) -> bool:
        """Not to be looked at while rules are made."""
        return self.set != "dev"

    def run(self, attach: Attach = unwatched, *, seed: int = 0, fixed: bool = False) -> float:
        """Train, with all random numbers from `seed`, and return the illness; not finite counts as infinitely ill."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch itself warns of some of the mistakes
            illness = self.train(attach, fixed) if self.kind else self.train(attach)
        return illness if np.isfinite(illness) else float("inf")


PROGRAMS: dict[str, Program] = {}


def _add(train: Train, **about: Any) -> None:
    program = Program(name=train.__name__, train=train, set=Path(train.__code__.co_filename).parent.name, **about)
    known = PROGRAMS.setdefault(program.name, program)
    # Test collection may import a file under a second name; two different programs of one name are a mistake.
    if known.train.__code__.co_filename != program.train.__code__.co_filename:
        raise ValueError(f"two programs are called {program.name}")


def fault(kind: str, **about: Any) -> Callable[[Train], Train]:
    """Register a program with a fault. Its name is the function's."""

    def register(train: Train) -> Train:
        _add(train, kind=kind, **about)
        return train

    return register


def healthy(**about: Any) -> Callable[[Train], Train]:
    """Register a program without a fault: `train(attach)`."""

    def register(train: Train) -> Train:
        _add(train, **about)
        return train

    return register
