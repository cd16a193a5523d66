"""Summarise the sites and layers of a run in tables, those to look at first on top."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.downsample import Steps, Values
from sonde.analysis.unusual import RECENT, History, Mark, ModelOrder, layer_of, mark_all
from sonde.core import statistics
from sonde.diagnosis.second_opinion import findings_of
from sonde.records import Quantity, Site
from sonde.store import Run
from sonde.store.series import Readings, compute

# How many readings are read by default, over all sites. It bounds the time a page takes on a run of any length:
# five million readings take about two seconds.
_READING_BUDGET: Final = 5_000_000
_LEAST_STEPS: Final = 10 * RECENT
DEFAULT_STATS: Final[Mapping[str, str]] = statistics.USUAL


@dataclass(frozen=True, slots=True, eq=False)
class SiteSummary:
    """One site over the steps looked at: the values of one statistic, which readings were not finite, and a mark."""

    site: Site
    stat: str
    steps: Steps
    values: Values
    nonfinite: Values
    mark: Mark = field(default_factory=Mark)

    @property
    def bad(self) -> NDArray[np.bool_]:
        """Which readings hold a NaN or an infinity."""
        result: NDArray[np.bool_] = self.nonfinite > 0
        return result

    @property
    def last(self) -> float:
        """The latest value; NaN where it is not known."""
        return float(self.values[-1]) if len(self.values) else float("nan")

    @property
    def low(self) -> float:
        """The smallest finite value."""
        return float(np.min(self._finite, initial=np.inf)) if len(self._finite) else float("nan")

    @property
    def high(self) -> float:
        """The largest finite value."""
        return float(np.max(self._finite, initial=-np.inf)) if len(self._finite) else float("nan")

    @property
    def now(self) -> float:
        """The median of the recent values, which one odd step does not move."""
        recent = self.values[-RECENT:]
        recent = recent[np.isfinite(recent)]
        return float(np.median(recent)) if len(recent) else float("nan")

    @property
    def _finite(self) -> Values:
        return self.values[np.isfinite(self.values)]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSummary:
    """The readings of one layer: the main site of each quantity, and the mark of its worst site."""

    name: str
    kind: str
    sites: Mapping[Quantity, SiteSummary]
    worst: SiteSummary

    @property
    def mark(self) -> Mark:
        """The mark of the site that stands out most."""
        return self.worst.mark

    def now(self, quantity: Quantity) -> float:
        """Return the recent value of a quantity; NaN where the layer has none."""
        return self.sites[quantity].now if quantity in self.sites else float("nan")


def first_step(run: Run, *, sites: int, last: int | None = None) -> int | None:
    """Return the step to read from: the `last` steps where given, else as many as reading `sites` sites can afford."""
    wanted = last if last is not None else max(_LEAST_STEPS, _READING_BUDGET // max(sites, 1))
    return None if wanted >= len(run.steps) else int(run.steps[-max(wanted, 1)])


def summarise_sites(
    run: Run, sites: Sequence[Site], *, stat: str | None = None, last: int | None = None
) -> list[SiteSummary]:
    """Summarise sites in the order given, marking those that findings name or that left the bands at some step.

    Args:
        run: The run to read.
        sites: Which sites.
        stat: The statistic of every row; by default the one that suits the quantity.
        last: How many steps to look back.

    """
    start = first_step(run, sites=len(sites), last=last)
    keys = keys_of(run)
    usual = [usual_stat(site, keys) for site in sites]
    stored = [_stored(run, site, name, start, keys) for site, name in zip(sites, usual, strict=True)]
    # Marks are always made from the usual statistic: what stands out does not depend on the column shown.
    skipped = run.blocks.step[run.blocks.skipped]
    histories = [History(row.site, row.steps, row.values, row.harmful(skipped)) for row in stored]
    summaries = []
    for row, mark, name in zip(stored, mark_all(histories, findings_of(run)), usual, strict=True):
        shown = row if stat in (None, name) else _stored(run, row.site, str(stat), start, keys)
        nonfinite = compute("nonfinite", shown.found)
        summaries.append(SiteSummary(row.site, stat or name, shown.steps, shown.values, nonfinite, mark))
    return summaries


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """The readings of a site, and the values of one statistic."""

    site: Site
    found: Readings
    values: Values

    @property
    def steps(self) -> Steps:
        return self.found.step

    def harmful(self, skipped: Steps) -> Values:
        """Return how many elements were not finite, less those that the rules take for harmless."""
        if self.site.quantity == "scalar":
            return compute("nonfinite", self.found)
        bad = compute("nan", self.found) + compute("pos_inf", self.found)
        if self.site.quantity in ("gradient", "output_gradient") and len(skipped):
            bad[np.isin(self.steps, skipped)] = 0
        return bad


def _stored(run: Run, site: Site, stat: str, start: int | None, keys: Set[str]) -> _Stored:
    row = statistics.find(stat)
    wanted = {*statistics.find("nonfinite").needs, *(row.needs if row.over is None else ())}
    # Both columns come from one read: on a large run reading is what takes the time.
    found = run.stored(site, tuple(sorted(wanted)), bins=row.quantile is not None, start=start)
    values = np.full(len(found), np.nan)
    if row.over is not None and has_stat(site, stat, keys):
        series = run.series(site, stat, start=start)
        # A ratio is known only where both of its sides were read.
        values[np.searchsorted(found.step, series.steps)] = series.values
    elif has_stat(site, stat, keys):
        values = compute(stat, found)
    return _Stored(site, found, values)


def keys_of(run: Run) -> Set[str]:
    """Return the keys of all sites of a run."""
    return frozenset(site.key for site in run.sites)


def usual_stat(site: Site, keys: Set[str]) -> str:
    """Return the statistic that says most about a site, in a run that has the sites `keys`."""
    usual = statistics.USUAL.get(site.quantity, "rms")  # a quantity of a later version has no entry
    return usual if has_stat(site, usual, keys) else "rms"


def has_stat(site: Site, stat: str, keys: Set[str]) -> bool:
    """Return whether a site has a statistic: a ratio needs an update and its parameter, a value needs a scalar."""
    row = statistics.find(stat)
    if row.quantity not in (None, site.quantity):
        return False
    return row.over is None or f"{site.name}:{row.over}" in keys


def tag_of(site: Site, stat: str) -> str:
    """Return a curve's name in TensorBoard and other trackers; the part before the first slash is its section.

    >>> tag_of(Site(id=0, name="fc.weight", quantity="gradient"), "rms")
    'gradient_rms/fc.weight'
    >>> tag_of(Site(id=0, name="val/accuracy", quantity="scalar"), "value")
    'val/accuracy'
    """
    if site.quantity == "scalar" and stat == "value":
        return site.key.replace(":scalar", "")
    return f"{site.quantity}_{stat}/{site.key.replace(f':{site.quantity}', '', 1)}"


def worst_first(summaries: Iterable[SiteSummary], order: ModelOrder) -> list[SiteSummary]:
    """Sort by how much each site stands out; sites that do not come last, in model order."""
    return sorted(summaries, key=lambda row: (*_urgency(row.mark), order.of_site(row.site)))


def summarise_layers(summaries: Iterable[SiteSummary], order: ModelOrder) -> list[LayerSummary]:
    """Fold sites into layers, the layer that stands out most first.

    A layer's weight stands for its parameters: of several sites of one quantity the one with the most elements.
    """
    rows: dict[str, list[SiteSummary]] = {}
    for row in summaries:
        if row.site.quantity not in ("scalar", "value", "vital", "input") and row.site.phase == "train":
            rows.setdefault(layer_of(row.site), []).append(row)
    layers = [_layer(name, members, order) for name, members in rows.items()]
    return sorted(layers, key=lambda layer: (*_urgency(layer.mark), order.of_layer(layer.name)))


def _layer(name: str, members: list[SiteSummary], order: ModelOrder) -> LayerSummary:
    main: dict[Quantity, SiteSummary] = {}
    for row in members:
        rival = main.get(row.site.quantity)
        if rival is None or _size(row.site) > _size(rival.site):
            main[row.site.quantity] = row
    worst = min(members, key=lambda row: row.mark.sort_key)
    kind = order.kind(name) or next((row.site.kind for row in members if row.site.kind), "")
    return LayerSummary(name, kind, main, worst)


def _size(site: Site) -> int:
    return int(np.prod(site.shape)) if site.shape else 0


def _urgency(mark: Mark) -> tuple[int, float]:
    # Among rows that do not stand out the model's own order reads better than a score of small differences.
    return mark.sort_key if mark.level != "fine" else (mark.sort_key[0], 0.0)


# --------------------------------------------------------------------------------
# Gradient flow: how large gradients are, and how far each layer moves, from the first layer to the last.


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One layer: the recent rms of its weight's gradient, and its recent update ratio; NaN where not recorded."""

    name: str
    kind: str
    gradient: float
    ratio: float
    mark: Mark


def gradient_flow(summaries: Iterable[SiteSummary], order: ModelOrder) -> list[FlowRow]:
    """Return the layers that have gradients, in model order.

    Weights stand for their layer. Layers that have only vectors (norms, biases) are left out where others have
    matrices, because their gradients live on another scale.
    """
    gradients: dict[str, list[SiteSummary]] = {}
    ratios: dict[str, SiteSummary] = {}
    for row in summaries:
        if row.site.quantity == "gradient":
            gradients.setdefault(layer_of(row.site), []).append(row)
        elif row.site.quantity == "update":
            ratios[row.site.name] = row
    matrices = {name: [row for row in rows if len(row.site.shape) > 1] for name, rows in gradients.items()}
    chosen = {name: rows for name, rows in matrices.items() if rows} or gradients
    flow = [_row(name, rows, ratios, order) for name, rows in chosen.items()]
    return sorted(flow, key=lambda row: order.of_layer(row.name))


def _row(name: str, rows: list[SiteSummary], ratios: dict[str, SiteSummary], order: ModelOrder) -> FlowRow:
    # Several matrices in one module (an LSTM, attention with packed projections): the strongest is what arrives.
    strongest = max(rows, key=lambda row: row.now)
    moved = ratios.get(strongest.site.name)
    worst = min(rows, key=lambda row: row.mark.sort_key).mark
    kind = order.kind(name) or strongest.site.kind
    return FlowRow(name, kind, strongest.now, moved.now if moved else float("nan"), worst)
