"""Sonde sees inside a neural network while it trains.

Record, in the process that trains (needs torch):

    with sonde.watch(model, optimizer, run="runs/first") as session:
        ...                                  # your loop
        session.log(loss=loss)

Read, anywhere, live or later (needs no torch):

    run = sonde.open_run("runs/first")
    run.series("0.weight:gradient", "norm").values
    print(sonde.diagnose(run))

On the command line: sonde --help. docs/api.md lists all names, with examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sonde.lazy import loader

if TYPE_CHECKING:
    from sonde.attach import open_session, watch
    from sonde.capture import Capture
    from sonde.diagnosis import Diagnosis, diagnose
    from sonde.errors import (
        ClosedError,
        MissingExtra,
        NonFiniteError,
        OptionError,
        RunDamaged,
        RunError,
        RunExists,
        RunInUse,
        RunNotFound,
        SelectionError,
        SondeError,
    )
    from sonde.forensics.bundle import Bundle, load_bundle
    from sonde.forensics.checkup import Checkup, checkup
    from sonde.records import Block, Event, Evidence, Finding, Reading, Site
    from sonde.schedule import at, between, every, first, log_spaced
    from sonde.select import glob, kind, regex
    from sonde.session import Session
    from sonde.store import DebugOutputs, Run, Series, list_runs, load_debug_outputs, open_run
    from sonde.store.verify import verify
    from sonde.version import VERSION as __version__

# Loaded at first use, so that reading a run never imports torch, and recording never imports what only readers need.
_HOMES = {
    "Block": "records",
    "Bundle": "forensics.bundle",
    "Capture": "capture",
    "Checkup": "forensics.checkup",
    "ClosedError": "errors",
    "DebugOutputs": "store",
    "Diagnosis": "diagnosis",
    "Event": "records",
    "Evidence": "records",
    "Finding": "records",
    "MissingExtra": "errors",
    "NonFiniteError": "errors",
    "OptionError": "errors",
    "Reading": "records",
    "Run": "store",
    "RunDamaged": "errors",
    "RunError": "errors",
    "RunExists": "errors",
    "RunInUse": "errors",
    "RunNotFound": "errors",
    "SelectionError": "errors",
    "Series": "store",
    "Session": "session",
    "Site": "records",
    "SondeError": "errors",
    "at": "schedule",
    "between": "schedule",
    "checkup": "forensics.checkup",
    "diagnose": "diagnosis",
    "every": "schedule",
    "first": "schedule",
    "glob": "select",
    "kind": "select",
    "list_runs": "store",
    "load_bundle": "forensics.bundle",
    "load_debug_outputs": "store",
    "log_spaced": "schedule",
    "open_run": "store",
    "open_session": "attach",
    "regex": "select",
    "verify": "store",
    "watch": "attach",
}

__all__ = [
    "Block",
    "Bundle",
    "Capture",
    "Checkup",
    "ClosedError",
    "DebugOutputs",
    "Diagnosis",
    "Event",
    "Evidence",
    "Finding",
    "MissingExtra",
    "NonFiniteError",
    "OptionError",
    "Reading",
    "Run",
    "RunDamaged",
    "RunError",
    "RunExists",
    "RunInUse",
    "RunNotFound",
    "SelectionError",
    "Series",
    "Session",
    "Site",
    "SondeError",
    "__version__",
    "at",
    "between",
    "checkup",
    "diagnose",
    "every",
    "first",
    "glob",
    "kind",
    "list_runs",
    "load_bundle",
    "load_debug_outputs",
    "log_spaced",
    "open_run",
    "open_session",
    "regex",
    "verify",
    "watch",
]


_load = loader(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from sonde.version import VERSION

        return VERSION
    return _load(name)


def __dir__() -> list[str]:
    return __all__
