"""The options of `sonde.watch`, in groups: recording, helpers, storage and diagnosis."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict, Unpack

from sonde.errors import OptionError
from sonde.forensics.watcher import GuardAction
from sonde.hooks.guard import OnError
from sonde.record.plan import DEFAULT_WHAT, Helpers, What
from sonde.records import Sink
from sonde.schedule import When
from sonde.select import Where

DEFAULT_BUDGET: Final = 0.05
_BUDGET_VARIABLE: Final = "SONDE_BUDGET"


def _default_budget() -> float | None:
    text = os.environ.get(_BUDGET_VARIABLE, "").strip().lower()
    if text == "none":
        return None
    try:
        return checked_budget(float(text)) if text else DEFAULT_BUDGET
    except ValueError as error:
        raise OptionError(f"{_BUDGET_VARIABLE}={text!r} takes a share such as 0.05, or none.") from error


def checked_budget(budget: Any) -> float | None:
    """Return a budget, or raise OptionError if it is not a positive share."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < math.inf:
        raise OptionError(f"budget={budget!r} takes a share of the training's time such as 0.05, or None for no bound.")
    return float(budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What is measured, where, how often, and within which memory."""

    what: Iterable[What] = DEFAULT_WHAT
    """Any of parameters, gradients, updates, outputs, output_gradients, optimizer_state. Updates come with parameters,
    since their ratio needs both."""
    where: Where = None
    """Which modules and parameters; see `sonde.select`. None: everything."""
    every: When = 1
    """Which steps; a number n for each n-th, or a schedule of `sonde.schedule`."""
    steps_by_hand: bool = False
    """Whether a training iteration ends only where the program calls `session.step()`. False: it ends before an
    optimizer that has stepped in it steps again, until `session.step()` is called for the first time."""
    ranks: When = 1
    """Which ranks of several record in full; a number n for each n-th, or a schedule over ranks. Rank 0 always does.
    The others write their heartbeat and the times of their steps only, which keeps a run of very many ranks small."""
    histogram: bool = True
    """Whether readings carry a histogram of magnitudes."""
    max_calls: int = 16
    """Calls of one module within a step beyond this many share the last call's site."""
    max_memory_mb: int = 1024
    """Bound of what the session holds: steps not yet written, and a copy of the parameters for updates."""
    budget: float | None = field(default_factory=_default_budget)
    """How much longer recording may make the training, as a share of its own time: beyond the first 24 steps Sonde
    measures what it costs and records less often where that is more, what only the diagnosis needs first, then outputs,
    parameters and gradients last. None records all tensors in every step. The environment variable SONDE_BUDGET (a
    number, or none) changes the default of 0.05."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How the run is written."""

    resume: bool = False
    """Append to a run that exists instead of refusing it."""
    start_step: int | None = None
    """In a resumed run, the number of its first step if it continues from before the end. What an earlier attempt
    recorded from there on stays in the files but is no longer shown. None: found from the steps that the state of the
    optimizer counts (Adam and variants), else after the last step."""
    max_disk_mb: int | None = None
    """Bound of the run's telemetry on disk; beyond it old steps are merged into windows. None: a tenth of the free
    space, at most 16 GiB."""
    rank: int | None = None
    """This process's rank in a distributed run. None: found from torch.distributed or the launcher's variables."""
    config: Mapping[str, Any] | None = None
    """Settings of your own to keep in the run."""
    logs: bool = False
    """Whether to keep, in `run/logs`, what the process prints (the first 512 KB and the last 256 KB or more) and the
    source of the program's own files (up to 1 MB). Both are stored as they are: whatever is printed is in the run."""
    to: Sink | Iterable[Sink] = ()
    """Where findings and chosen series go too while the run is recorded, on the first rank: `sonde.to_wandb()`,
    `sonde.to_mlflow()`, `sonde.to_tensorboard(...)`, `sonde.to_comet()`, or a sink of your own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisOptions:
    """What happens when something looks wrong."""

    diagnose: bool = True
    """Whether to record the vital signs that a diagnosis needs, and to judge them while the run goes on, in the
    worker's thread: `session.findings`."""
    guard: GuardAction | None = None
    """What to do when gradients are not finite. "skip" makes that optimizer step do nothing; "stop" raises
    `sonde.NonFiniteError` before anything is written. With an optimizer that is not fused both make the host wait for a
    GPU once per step. "stop_late" never waits and skips nothing: it raises in the first step after the readings have
    shown it, on the CPU before anything is written. None: nothing is skipped or stopped."""
    bundles: bool = True
    """Whether to save what is needed to repeat a step that went non-finite, in `run/bundles`."""
    max_bundle_mb: int = 512
    """Bound of one bundle; if the weights do not fit, it is saved without them."""
    stuck_after: float | None = None
    """With several ranks: seconds without progress after which a rank counts as stuck. None: 30 s, or three times the
    longest of its recent steps where that is more, and 300 s before the first steps."""
    tape: bool = True
    """Whether a few steps are recorded operation by operation, in `run/tapes`: three early ones, and one more when
    something is found. Needs `diagnose`. `SONDE_TAPE=0` in the environment switches it off too."""


class Keywords(TypedDict, total=False):
    """The options as keywords of `watch`: the fields of all groups, by their own names."""

    what: Iterable[What]
    where: Where
    every: When
    steps_by_hand: bool
    ranks: When
    histogram: bool
    max_calls: int
    max_memory_mb: int
    budget: float | None
    loss_fn: Any
    loader: Any
    scheduler: Any
    scaler: Any
    resume: bool
    start_step: int | None
    max_disk_mb: int | None
    rank: int | None
    config: Mapping[str, Any] | None
    logs: bool
    to: Sink | Iterable[Sink]
    diagnose: bool
    guard: GuardAction | None
    bundles: bool
    max_bundle_mb: int
    stuck_after: float | None
    tape: bool
    on_error: OnError
    enabled: bool
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of `watch`, in groups. Every field of a group is also a keyword of `watch` and of `replace`.

    >>> Options().replace(every=10, guard="skip").recording.every
    10
    """

    recording: RecordingOptions = field(default_factory=RecordingOptions)
    helpers: Helpers = field(default_factory=Helpers)
    """Objects of the training loop that are observed: `loss_fn`, `loader`, `scheduler`, `scaler`."""
    storage: StorageOptions = field(default_factory=StorageOptions)
    diagnosis: DiagnosisOptions = field(default_factory=DiagnosisOptions)
    on_error: OnError = "isolate"
    """"isolate" switches a failing part of Sonde off and continues; "raise" lets its error through."""
    enabled: bool = True
    """False attaches nothing and writes nothing; every method of the session then does nothing."""
    clock: Callable[[], float] = time.time
    """Where times come from."""

    def replace(self, **keywords: Unpack[Keywords]) -> Options:
        """Return these options with some of them replaced, each by its own name.

        Raises:
            TypeError: There is no option of that name.

        """
        given: dict[str, Any] = dict(keywords)
        for name in given:
            if name not in OPTION_NAMES:
                raise TypeError(f"watch() got an unexpected keyword argument {name!r}")
        parts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name, part in parts.items():
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                mine = {each.name: given[each.name] for each in dataclasses.fields(part) if each.name in given}
                parts[name] = dataclasses.replace(part, **mine)
            else:
                parts[name] = given.get(name, part)
        return Options(**parts)


OPTION_NAMES: Final = frozenset(Keywords.__annotations__)
"""All keywords of `watch`."""
