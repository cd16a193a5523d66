"""Weights side by side: how large they are, how large their gradients, and how far each step moves them.

Only matrices and kernels count. Biases and the scales of norms start at 0 or 1, so ratios to their size mean little;
most rows of an embedding have no gradient in most steps. Where a model is nothing but small tables, these count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.track import Panel, Values
from sonde.records import Quantity, Site


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Root mean squares by step and weight, weights in the order in which their modules run; NaN where not read."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]
    sizes: Values
    gradients: Values
    updates: Values
    began_at_zero: NDArray[np.bool_]
    """Which of them were all zeros at the first reading of the run, as half of the weights of an adapter are."""

    def of(self, names: Collection[str]) -> Weights:
        """Return only the weights of these names."""
        mine = np.isin(self.names, list(names))
        return replace(
            self,
            names=tuple(name for name in self.names if name in names),
            sizes=self.sizes[:, mine],
            gradients=self.gradients[:, mine],
            updates=self.updates[:, mine],
            began_at_zero=self.began_at_zero[mine],
        )

    @property
    def update_ratio(self) -> Values:
        """The update of each weight over its size."""
        return _divide(self.updates, self.sizes)

    @property
    def gradient_ratio(self) -> Values:
        """The gradient of each weight over its size."""
        return _divide(self.gradients, self.sizes)

    def with_gradients(self) -> Weights:
        """Return only the steps at which the gradients of all weights were read."""
        read = np.isfinite(self.gradients).all(axis=1)
        return replace(
            self,
            steps=self.steps[read],
            sizes=self.sizes[read],
            gradients=self.gradients[read],
            updates=self.updates[read],
        )

    def fastest(self) -> Values:
        """Return the highest update ratio of all weights, for each step at which any was read."""
        result: Values = np.nanmax(self._paces(), axis=1)
        return result

    def pace(self) -> Values:
        """Return the median over weights of the update ratio, for each step at which any was read."""
        ratios = self._paces()
        # Leaving NaN out takes many times as long.
        middle = np.nanmedian if np.isnan(ratios).any() else np.median
        result: Values = middle(ratios, axis=1)
        return result

    def _paces(self) -> Values:
        """Return the update ratios that tell how long steps are, at the steps at which any was read.

        Weights that start at 0, such as those of an adapter, consist of their updates: in step t the ratio is about
        1/t at any learning rate. They count only where all weights start so.
        """
        ratios = self.update_ratio
        if not self.began_at_zero.all():
            ratios = ratios[:, ~self.began_at_zero]
        return ratios[np.isfinite(ratios).any(axis=1)]


def first_weights(case: Case) -> Weights:
    """Return the weights at the first steps of the run; raises NotMeasured if there are none."""
    return case.once("first_weights", lambda: _weights(case, case.first_panel))


def last_weights(case: Case) -> Weights:
    """Return the weights at the last steps of the run; raises NotMeasured if there are none."""
    return case.once("last_weights", lambda: _weights(case, case.panel))


def _weights(case: Case, panel_of: Callable[[Quantity], Panel]) -> Weights:
    parameters = panel_of("parameter")
    chosen = [at for at, site in enumerate(parameters.sites) if is_weight(site)]
    chosen = chosen or [at for at, site in enumerate(parameters.sites) if _is_read_whole(case, site)]
    if not chosen:
        raise NotMeasured("parameters")
    names = [parameters.sites[at].name for at in chosen]
    order = {module: at for at, module in enumerate(case.facts.order)}
    if order:
        places = [order.get(name.rpartition(".")[0], len(order)) for name in names]
        ranked = sorted(range(len(names)), key=lambda at: (places[at], at))
        chosen, names = [chosen[at] for at in ranked], [names[at] for at in ranked]
    sizes = parameters.pick(chosen).stat("rms")
    return Weights(
        tuple(names),
        parameters.steps,
        sizes,
        _matching(panel_of("gradient"), names, sizes.shape),
        _matching(panel_of("update"), names, sizes.shape),
        _began_at_zero(case, names),
    )


def _began_at_zero(case: Case, names: list[str]) -> NDArray[np.bool_]:
    panel = case.first_panel("parameter")
    sizes = dict(zip(panel.names, panel.stat("rms")[0].tolist(), strict=True)) if len(panel) else {}
    return np.array([sizes.get(name) == 0 for name in names], np.bool_)


def _is_read_whole(case: Case, site: Site) -> bool:
    """Return whether a table of embeddings is so small that about all its rows take part in every pass."""
    answers = next((each for each in case.sites("output") if each.name == site.name.rpartition(".")[0]), None)
    if answers is None or len(site.shape) != 2 or not answers.shape:
        return False
    return math.prod(answers.shape[:-1]) >= _READ_OFTEN * site.shape[0]


_READ_OFTEN: Final = 4
"""Rows that a pass reads, over those of the table: from then on only rare ones are left out."""


def is_weight(site: Site) -> bool:
    """Return whether a parameter is a matrix or a kernel that takes part in every pass."""
    return len(site.shape) >= 2 and "Embedding" not in site.kind


def _matching(panel: Panel, names: list[str], shape: tuple[int, ...]) -> Values:
    out = np.full(shape, np.nan)
    places = {name: at for at, name in enumerate(panel.names)}
    known = [(at, places[name]) for at, name in enumerate(names) if name in places]
    if known:
        there, here = [at for at, _ in known], [at for _, at in known]
        out[:, there] = panel.pick(here).stat("rms")
    return out


def _divide(numerator: Values, denominator: Values) -> Values:
    out = np.full(numerator.shape, np.nan)
    result: Values = np.divide(numerator, denominator, out=out, where=denominator > 0)
    return result
