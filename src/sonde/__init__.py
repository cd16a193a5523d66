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

from typing import TYPE_CHECKING

from sonde.core.lazy import attach

if TYPE_CHECKING:  # The one list of public names: `attach` reads it too.
    from sonde.capture import Capture as Capture
    from sonde.diagnosis import Diagnosis as Diagnosis
    from sonde.diagnosis import diagnose as diagnose
    from sonde.errors import ClosedError as ClosedError
    from sonde.errors import MissingExtra as MissingExtra
    from sonde.errors import NonFiniteError as NonFiniteError
    from sonde.errors import OptionError as OptionError
    from sonde.errors import RunDamaged as RunDamaged
    from sonde.errors import RunError as RunError
    from sonde.errors import RunExists as RunExists
    from sonde.errors import RunInUse as RunInUse
    from sonde.errors import RunNotFound as RunNotFound
    from sonde.errors import SelectionError as SelectionError
    from sonde.errors import SondeError as SondeError
    from sonde.forensics.bundle import Bundle as Bundle
    from sonde.forensics.bundle import load_bundle as load_bundle
    from sonde.forensics.checkup import Checkup as Checkup
    from sonde.forensics.checkup import checkup as checkup
    from sonde.integrations.trackers import to_comet as to_comet
    from sonde.integrations.trackers import to_mlflow as to_mlflow
    from sonde.integrations.trackers import to_tensorboard as to_tensorboard
    from sonde.integrations.trackers import to_wandb as to_wandb
    from sonde.options import Options as Options
    from sonde.records import Block as Block
    from sonde.records import Event as Event
    from sonde.records import Evidence as Evidence
    from sonde.records import Finding as Finding
    from sonde.records import Reading as Reading
    from sonde.records import Site as Site
    from sonde.schedule import at as at
    from sonde.schedule import between as between
    from sonde.schedule import every as every
    from sonde.schedule import first as first
    from sonde.schedule import log_spaced as log_spaced
    from sonde.select import glob as glob
    from sonde.select import kind as kind
    from sonde.select import regex as regex
    from sonde.session import Session as Session
    from sonde.store import BatchValue as BatchValue
    from sonde.store import DebugOutputs as DebugOutputs
    from sonde.store import Run as Run
    from sonde.store import Series as Series
    from sonde.store import list_runs as list_runs
    from sonde.store import load_debug_outputs as load_debug_outputs
    from sonde.store import open_run as open_run
    from sonde.store.verify import verify as verify
    from sonde.version import __version__ as __version__
    from sonde.views.debug_outputs import display_debug_outputs as display_debug_outputs
    from sonde.watching import open_session as open_session
    from sonde.watching import watch as watch
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)


def load_ipython_extension(shell: object) -> None:
    """Add the cell magic `%%sonde` to a notebook: `%load_ext sonde` calls this."""
    from importlib import import_module

    import_module("sonde.integrations.notebook").load(shell)
