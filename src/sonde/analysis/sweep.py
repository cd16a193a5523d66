"""Compare several runs in a table: settings that differ, last and best metrics, problems, groups of repeats.

`read_row` describes one run; the page *Runs*, `sonde runs` and `sonde compare` all show its rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sonde.analysis.divergence import common_sites, recent_rms
from sonde.analysis.overview import ending_of, find_learning_rate, find_loss
from sonde.analysis.run_curves import is_counter
from sonde.analysis.scores import guess_direction
from sonde.diagnosis.second_opinion import was_judged
from sonde.errors import RunError
from sonde.records import SEVERITIES, Finding, Severity, Site
from sonde.store import Run, RunSummary, layout, open_run
from sonde.store.header import Labels, read_labels
from sonde.store.timeline import rank_of_finding

_NOT_METRICS: Final = ("optimizer", "scheduler.", "process.", "system.", "memory.", "scaler.")
_USERS: Final = "user."
_LABELS: Final = ("tags", "note")
_SEEDS: Final = re.compile(r"(^|[._])(init_)?(seed|repeat|rep|fold|replicate)s?$", re.IGNORECASE)
PATHS: Final = re.compile(r"(^|[._])(work_dir|out|output|output_dir|log_dir|run|run_name|name)$", re.IGNORECASE)
_MOST_SETTINGS: Final = 500
_MOST_METRICS: Final = 60
_MOST_TEXT: Final = 200
_RESOLUTION: Final = 0.01
"""Doublings: a scatter between repeats below 0.7 % counts as this much."""


# --------------------------------------------------------------------------------
# One run as a row.


@dataclass(frozen=True, slots=True)
class Metric:
    """A logged number: its last value, its best, and the step of the best. None where no value is finite."""

    last: float
    best: float | None
    best_step: int | None
    direction: int
    """1 where more is better, -1 where less is; guessed from the name."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong with a run: a finding, or how it ended."""

    kind: str
    severity: Severity
    cause: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as one row of a table."""

    name: str
    status: str
    last_step: int | None
    settings: dict[str, Any]
    metrics: dict[str, Metric]
    loss: str | None
    """Which metric is the training loss."""
    troubles: tuple[Trouble, ...]
    """What is wrong, worst first. A run that crashed, failed or ended with a non-finite loss has at least one."""
    judged: bool
    """Whether the doctor looked at the run while it was recorded; without that no trouble proves nothing."""
    labels: Labels = field(default_factory=Labels)

    @property
    def severity(self) -> Severity | None:
        """The severity of the worst trouble."""
        return self.troubles[0].severity if self.troubles else None


def read_row(run: Run, name: str = "") -> RunRow:
    """Describe a run as one row."""
    loss = find_loss(run.sites)
    user = run.header.config.get("user")
    return RunRow(
        name=name or run.path.name,
        status=run.status,
        last_step=int(run.steps[-1]) if len(run.steps) else None,
        settings=settings_of(run),
        metrics={site.name: metric for site in _metric_sites(run, loss) if (metric := _metric(run, site)) is not None},
        loss=None if loss is None else loss.name,
        troubles=_troubles(run, loss),
        judged=was_judged(run),
        labels=read_labels(run.path, user if isinstance(user, Mapping) else {}),
    )


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings by their path.

    >>> dict(flatten("model", {"width": 8, "act": {"name": "relu"}}))
    {'model.width': 8, 'model.act.name': 'relu'}
    >>> dict(flatten("", {}))
    {}
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(f"{name}.{key}" if name else str(key), item)
    elif name:
        yield name, value if isinstance(value, str | int | float | bool | None) else repr(value)[:_MOST_TEXT]


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings: the user's own by their plain names, what was watched and helped with by longer ones."""
    found: dict[str, Any] = {}
    for key, value in flatten("", {key: value for key, value in run.header.config.items() if value != {}}):
        plain = key.removeprefix(_USERS)
        if len(found) < _MOST_SETTINGS and plain not in _LABELS:
            found[plain if plain not in found else key] = value
    found.setdefault("model", run.header.model.get("name"))
    found.setdefault("parameters", run.header.model.get("num_parameters"))
    last_parts = {key.rpartition(".")[2] for key in found}
    rate = find_learning_rate(run.sites)
    if rate is not None and not last_parts & {"lr", "learning_rate"}:
        first = run.series(rate, "value").values[:1]
        found["lr"] = float(first[0]) if len(first) else None
    if not any(_SEEDS.search(key) for key in found):
        found["seed"] = run.header.environment.get("seed")
    return found


def _metric_sites(run: Run, loss: Site | None) -> list[Site]:
    scalars = [site for site in run.sites if site.quantity == "scalar"]
    sites = [site for site in scalars if not site.name.startswith(_NOT_METRICS) and not is_counter(site.name)]
    first = [] if loss is None else [loss]
    return (first + [site for site in sites if loss is None or site.key != loss.key])[:_MOST_METRICS]


def _metric(run: Run, site: Site) -> Metric | None:
    series = run.series(site, "value")
    if not len(series):
        return None
    direction = guess_direction(site.name)
    finite = np.flatnonzero(np.isfinite(series.values))
    if not len(finite):
        return Metric(float(series.values[-1]), None, None, direction)
    at = int(finite[np.argmax(direction * series.values[finite])])
    return Metric(float(series.values[-1]), float(series.values[at]), int(series.steps[at]), direction)


def _troubles(run: Run, loss: Site | None) -> tuple[Trouble, ...]:
    values = None if loss is None else run.series(loss, "value").values
    found = list(troubles_of(run.findings, None if values is None or not len(values) else float(values[-1])))
    ending = ending_of(run)
    if ending is not None and not ending.by_hand:
        found.insert(0, Trouble(ending.exception or run.status, "critical", ending.text))
    return tuple(found)


def troubles_of(findings: Sequence[Finding], last_loss: float | None) -> tuple[Trouble, ...]:
    """Return what is wrong by the findings and the last loss, worst first."""
    found = [Trouble(each.kind, each.severity, each.cause) for each in sorted(findings, key=rank_of_finding)]
    if last_loss is not None and not math.isfinite(last_loss) and not any("nan" in each.kind for each in found):
        found.insert(0, Trouble("loss_not_finite", "critical", f"The last value of the loss is {last_loss}."))
    return tuple(sorted(found, key=lambda each: -SEVERITIES.index(each.severity)))


def read_troubles(summary: RunSummary) -> tuple[Trouble, ...]:
    """Return what is wrong with a run that a list describes; one that ended well without findings is not opened."""
    if summary.problem:
        return (Trouble("damaged", "critical", summary.problem),)
    has_findings = any(layout.findings_file(summary.path, rank).exists() for rank in layout.ranks(summary.path))
    if summary.status in ("finished", "live") and not has_findings:
        return troubles_of((), summary.last_loss)
    try:
        run = open_run(summary.path)
        return _troubles(run, find_loss(run.sites))
    except (RunError, OSError) as error:
        return (Trouble("damaged", "critical", str(error)),)


# --------------------------------------------------------------------------------
# Several rows: which settings differ, and groups of them.


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of a metric over the runs of a group. The deviation of a single run is None."""

    mean: float
    deviation: float | None
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that have the same values of some settings."""

    settings: dict[str, Any]
    rows: tuple[RunRow, ...]
    last: dict[str, Spread]
    best: dict[str, Spread]

    @property
    def name(self) -> str:
        """Its settings in words: `lr=0.03`."""
        return ", ".join(f"{key}={in_words(value)}" for key, value in self.settings.items()) or "all runs"

    @property
    def troubles(self) -> dict[str, int]:
        """How many of its runs have each kind of trouble, the most severe first."""
        all_of_them = [each for row in self.rows for each in row.troubles]
        ranked = sorted(all_of_them, key=lambda each: -SEVERITIES.index(each.severity))
        kinds = dict.fromkeys(each.kind for each in ranked)
        return {kind: sum(any(each.kind == kind for each in row.troubles) for row in self.rows) for kind in kinds}


def in_words(value: Any) -> str:
    """Write a setting as a table shows it."""
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def differing(rows: Sequence[RunRow]) -> list[str]:
    """Return the settings whose values are not the same in all rows, the most telling first.

    First come those with several values in many runs, then folders and names, last those that only some runs have.
    """
    names = dict.fromkeys(name for row in rows for name in row.settings)
    values = {name: [repr(row.settings.get(name)) for row in rows] for name in names}
    unlike = [name for name in names if len(set(values[name])) > 1]

    def order(name: str) -> tuple[bool, bool, bool, int]:
        known = [value for value in values[name] if value != repr(None)]
        is_ours = name.startswith(("watch.", "helpers."))
        return len(set(known)) < 2, is_ours, bool(PATHS.search(name)), -len(known)

    return sorted(unlike, key=order)


def usual_grouping(rows: Sequence[RunRow]) -> list[str]:
    """Return the settings that group repeats: all that differ but seeds, and but those unlike in every run.

    >>> usual_grouping([])
    []
    """
    names = [name for name in differing(rows) if not _SEEDS.search(name) and not PATHS.search(name)]
    kept = [name for name in names if len({repr(row.settings.get(name)) for row in rows}) < len(rows)]
    return kept if any(len(group.rows) > 1 for group in group_rows(rows, kept)) else []


def group_rows(rows: Sequence[RunRow], by: Sequence[str]) -> list[Group]:
    """Group rows by settings, and average their metrics."""
    found: dict[str, list[RunRow]] = {}
    for row in rows:
        found.setdefault(repr([row.settings.get(name) for name in by]), []).append(row)
    groups = []
    for members in found.values():
        settings = {name: members[0].settings.get(name) for name in by}
        last, best = _spreads(members, lambda metric: metric.last), _spreads(members, lambda metric: metric.best)
        groups.append(Group(settings, tuple(members), last, best))
    return groups


def _spreads(rows: Iterable[RunRow], value: Callable[[Metric], float | None]) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, metric in row.metrics.items():
            found = value(metric)
            values.setdefault(name, []).append(math.nan if found is None else found)
    return {name: _spread(each) for name, each in values.items()}


def _spread(values: list[float]) -> Spread:
    # A run whose metric is not finite makes the mean of its group not finite: it must not look calm.
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), deviation, float(np.min(values)), float(np.max(values)), len(values))


# --------------------------------------------------------------------------------
# Layers that differ over groups of runs.


@dataclass(frozen=True, slots=True)
class LayerSpread:
    """One site in several groups of runs, by the medians of recent root mean squares."""

    site: str
    values: tuple[float, ...]
    """Of each group; NaN where not measured."""
    doublings: float
    """How often the least value is to be doubled to become the greatest; NaN where any is not positive."""
    scatter: float | None
    """The deviation between repeats within a group, in doublings; None without repeats."""

    @property
    def clearness(self) -> float:
        """How far groups are apart, in units of the scatter between repeats where that is known."""
        if math.isnan(self.doublings):
            return -1.0
        return self.doublings if self.scatter is None else self.doublings / max(self.scatter, _RESOLUTION)


def layers_apart(groups: Sequence[Sequence[Run]]) -> list[LayerSpread]:
    """Return how layers differ between groups of runs, the clearest difference first."""
    runs = [run for group in groups for run in group]
    if len(groups) < 2 or not runs:
        return []
    shared = [site for site in common_sites(runs[0], runs[1] if len(runs) > 1 else runs[0]) if _is_layer(site)]
    for other in runs[2:]:
        theirs = {site.key for site in other.sites}
        shared = [site for site in shared if site.key in theirs]
    rows = [_layer(site.key, [[recent_rms(run, site.key) for run in group] for group in groups]) for site in shared]
    return sorted(rows, key=lambda row: -row.clearness)


def _is_layer(site: Site) -> bool:
    return site.quantity in ("parameter", "gradient", "output") and site.phase == "train"


def _layer(key: str, values: list[list[float]]) -> LayerSpread:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = [np.log2(np.asarray(each)) for each in values]
    means = np.array([float(np.mean(each)) for each in logs])
    repeats = [each for each in logs if len(each) > 1 and np.isfinite(each).all()]
    freedom = sum(len(each) - 1 for each in repeats)
    scatter = (
        math.sqrt(sum(float(((each - each.mean()) ** 2).sum()) for each in repeats) / freedom) if freedom else None
    )
    doublings = float(means.max() - means.min()) if np.isfinite(means).all() else math.nan
    return LayerSpread(key, tuple(float(np.median(each)) for each in values), doublings, scatter)
