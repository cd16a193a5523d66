"""The main curves of a training: losses, metrics, learning rates, gradient norm and update ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from weakref import WeakKeyDictionary

import numpy as np

from sonde.analysis.downsample import Steps, Values
from sonde.core import signals, statistics
from sonde.core.metric_names import UNLIKE, is_loss_name, likeness
from sonde.records import Site
from sonde.store import Run
from sonde.store.series import compute

Role = Literal["loss", "metric", "rate", "gradient", "update"]
GRADIENT_NORM: Final = "gradient norm"
UPDATE_RATIO: Final = "update ratio"
LEARNING_RATE: Final = "learning rate"
_SETTINGS: Final = ("momentum", "betas", "weight_decay", "eps", "dampening", "alpha", "rho")
_OF_THE_MACHINE: Final = ("process.", "system.", "scheduler")
_MEMORY: Final = ("memory", "allocated", "reserved", "rss")
_COUNTERS: Final = ("epoch", "step", "global_step", "iteration", "tokens", "num_tokens", "samples")
"""Numbers that only count; they are axes, not results."""


@dataclass(frozen=True, slots=True, eq=False)
class RunCurve:
    """One curve of a run, in its recorded values."""

    name: str
    role: Role
    steps: Steps
    values: Values
    key: str = ""
    """The site it was logged as; empty for one that is computed from all layers."""

    @property
    def constant(self) -> float | None:
        """Its only value, if it never changed and is not a loss."""
        known = self.values[np.isfinite(self.values)]
        if (
            self.role == "loss"
            or not len(known)
            or len(known) < len(self.values)
            or (self.role != "rate" and len(known) < 3)
        ):
            return None
        return float(known[0]) if known.min() == known.max() else None


@dataclass(frozen=True, slots=True, eq=False)
class RunCurves:
    """All curves of a run, and what never changed."""

    curves: tuple[RunCurve, ...]
    constants: dict[str, float]
    """Learning rates, settings of optimizers and logged numbers that had one value all along."""
    counters: tuple[RunCurve, ...]
    """Numbers that count epochs or tokens."""

    def of(self, *roles: Role) -> list[RunCurve]:
        """Return the curves of some roles."""
        return [curve for curve in self.curves if curve.role in roles]


_KEPT: Final[WeakKeyDictionary[Run, dict[bool, tuple[object, RunCurves]]]] = WeakKeyDictionary()


def curves_of(run: Run, *, whole: bool = True) -> RunCurves:
    """Return the curves of a run; they are read once for each state that the run is in.

    Without `whole` only what was logged is read, which is quick: norms over all layers take a second on a large run.
    """
    state = (len(run.steps), len(run.sites), int(run.steps[-1]) if len(run.steps) else None)
    kept = _KEPT.setdefault(run, {})
    known = kept.get(True) or kept.get(whole)
    if known is None or known[0] != state:
        known = kept[whole] = (state, _read(run, whole))
    return known[1]


def _read(run: Run, whole: bool) -> RunCurves:
    scalars = [site for site in run.sites if site.quantity == "scalar" and not _is_of_the_machine(site)]
    logged = [curve for site in scalars if len((curve := _logged(run, site)).steps)]
    counters = tuple(curve for curve in logged if is_counter(curve.name))
    rest = [curve for curve in logged if curve not in counters]
    constants = {curve.name: value for curve in rest if (value := curve.constant) is not None}
    moving = [curve for curve in rest if curve.name not in constants and not _is_setting(curve.name)]
    moving.sort(key=lambda curve: (_ROLES.index(curve.role), likeness(curve.name), not is_loss_name(curve.name)))
    found = [*moving, *(_of_all_layers(run) if whole else ())]
    return RunCurves(tuple(found), _renamed(constants), counters)


_ROLES: Final = ("loss", "metric", "rate", "gradient", "update")


def is_counter(name: str) -> bool:
    """Return whether a logged number only counts, such as epochs or tokens: an axis, and no result."""
    return name.rpartition("/")[2].lower() in _COUNTERS


def _is_of_the_machine(site: Site) -> bool:
    lowered = site.name.lower()
    return lowered.startswith(_OF_THE_MACHINE) or any(word in lowered for word in _MEMORY)


def _is_setting(name: str) -> bool:
    return name.startswith("optimizer") and name.rpartition(".")[2].rstrip("0123456789") in _SETTINGS


def _logged(run: Run, site: Site) -> RunCurve:
    series = run.series(site, "value")
    return RunCurve(site.key.replace(":scalar", ""), _role(site.name), series.steps, series.values, site.key)


def _role(name: str) -> Role:
    lowered = name.lower()
    if lowered.rpartition(".")[2] == "lr" or lowered.replace("/", "_").endswith("learning_rate"):
        return "rate"
    return "loss" if likeness(name) < UNLIKE else "metric"


def _renamed(constants: dict[str, float]) -> dict[str, float]:
    """Name settings without their optimizer where there is one of them only: `optimizer.group0.lr` is `lr`."""
    short: dict[str, list[str]] = {}
    for name in constants:
        short.setdefault(name.rpartition(".")[2] if name.startswith("optimizer") else name, []).append(name)
    out: dict[str, float] = {}
    for leaf, names in short.items():
        same = len({constants[name] for name in names}) == 1
        out |= {leaf: constants[names[0]]} if same else {name: constants[name] for name in names}
    return out


def is_training_loss(curve: RunCurve) -> bool:
    """Return whether a curve is a loss of the training, not of a validation."""
    return curve.role == "loss" and is_loss_name(curve.name) and "@" not in curve.name


# --------------------------------------------------------------------------------
# Curves over all layers together.


def _of_all_layers(run: Run) -> Iterable[RunCurve]:
    sites = [site for site in run.sites if site.same_as is None and site.phase == "train" and not site.call]
    gradients = [site for site in sites if site.quantity == "gradient"]
    clip_norm = signals.part_of(signals.CLIP_NORM)
    clipped = next((site for site in run.sites if site.quantity == "vital" and site.part == clip_norm), None)
    norm = _total_norm(run, gradients)
    if clipped is not None:
        series = run.series(clipped, "mean")
        if len(series.steps) > len(norm[0]):
            norm = series.steps, series.values
    if len(norm[0]):
        yield RunCurve(GRADIENT_NORM, "gradient", *norm)
    updates = [site for site in sites if site.quantity == "update"]
    names = {site.name for site in updates}
    weights = [site for site in sites if site.quantity == "parameter" and site.name in names]
    if updates and len(weights) == len(updates):
        moved, size = _total_norm(run, updates), _total_norm(run, weights)
        steps, left, right = np.intersect1d(moved[0], size[0], assume_unique=True, return_indices=True)
        norms = size[1][right]
        ratio = np.divide(moved[1][left], norms, out=np.full(len(steps), np.nan), where=norms > 0)
        if len(steps):
            yield RunCurve(UPDATE_RATIO, "update", steps, ratio)


def _total_norm(run: Run, sites: Sequence[Site]) -> tuple[Steps, Values]:
    """Return the norm of several tensors taken as one, at the steps at which all of them were read."""
    needs = tuple(sorted({*statistics.find("norm").needs, *statistics.find("nonfinite").needs}))
    seen: dict[bytes, list[Values]] = {}
    for found in run.stored_many(sites, needs) if sites else ():
        squares = compute("norm", found) ** 2
        squares[compute("nonfinite", found) > 0] = np.nan
        seen.setdefault(found.step.tobytes(), []).append(squares)
    # Nearly always all are read at the same steps.
    parts = [(np.frombuffer(raw, np.int64), np.sum(rows, axis=0), len(rows)) for raw, rows in seen.items()]
    return _joined(parts)


def _joined(parts: Sequence[tuple[Steps, Values, int]]) -> tuple[Steps, Values]:
    if len(parts) == 1:
        return parts[0][0], np.sqrt(parts[0][1])
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0)
    steps = np.unique(np.concatenate([part[0] for part in parts]))
    total, held = np.zeros(len(steps)), np.zeros(len(steps), np.int64)
    for own, squares, number in parts:
        at = np.searchsorted(steps, own)
        total[at] += squares
        held[at] += number
    whole = held == held.max()
    return steps[whole], np.sqrt(total[whole])
