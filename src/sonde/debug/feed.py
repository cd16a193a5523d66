"""Brings what a recording session measures to the debug session's parts."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde import measures, schema, vitals
from sonde.debug.diagnostics_records import ModelPerformanceMetrics
from sonde.debug.gradient_debugger import GradientDebugger
from sonde.debug.gradient_layer import GradientPoint
from sonde.debug.model_diagnostics import ModelDiagnostics
from sonde.debug.profiler import Profiler
from sonde.debug.tensor_inspector import TensorInspector
from sonde.probes.process_memory import RSS
from sonde.records import Block, Event, Finding, Site
from sonde.schema import Rows

_MAX_LOSSES: Final = 10_000
_MAX_NUMBERS: Final = 10_000
_TIMES: Final = {
    vitals.part_of(vitals.STEP_TIME): "step",
    vitals.part_of(vitals.DATA_WAIT): "data_wait",
    **{vitals.part_of(vitals.time_of(phase)): phase for phase in vitals.PHASE_TIMES},
}
"""Parts of the loop's vital signs that are seconds, and the timers they go to."""


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    sites: NDArray[np.uint32]
    rows: Rows


class Feed:
    """A sink of the recording session, called in its worker thread, and emptied by the thread of the user.

    It holds as many steps as a layer's history does: older ones would be forgotten anyway. Losses are kept for all
    steps, since how a training goes shows in the whole curve.
    """

    def __init__(self, history: int) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, Site] = {}
        self._gradients: list[int] = []
        self._values: list[int] = []
        self._steps: deque[_Step] = deque(maxlen=history)
        self._loss_site: int | None = None
        self._losses: dict[int, float] = {}
        self._loop: dict[int, str] = {}
        self._numbers: deque[tuple[str, float]] = deque(maxlen=_MAX_NUMBERS)
        self.last_loss: float | None = None
        self.last_gradient_norm: float | None = None

    def take_sites(self, sites: list[Site]) -> None:
        """Take new sites."""
        with self._lock:
            for site in sites:
                self._sites[site.id] = site
                if site.quantity == "gradient":
                    self._gradients.append(site.id)
                elif site.quantity in ("parameter", "output") and site.phase == "train":
                    self._values.append(site.id)
                elif site.name == vitals.LOOP and site.part in _TIMES:
                    self._loop[site.id] = _TIMES[site.part]
                elif site.name == RSS:
                    self._loop[site.id] = RSS
                self._see_loss_site(site)

    def take_block(self, block: Block) -> None:
        """Take a step."""
        with self._lock:
            wanted = np.isin(block.sites, [*self._gradients, *self._values])
            if wanted.any():
                self._steps.append(_Step(block.step, block.sites[wanted], block.rows[wanted]))
            self._take_numbers(block)
            self._take_loop(block)

    def take_event(self, event: Event) -> None:
        """Events are in the run."""

    def take_finding(self, finding: Finding) -> None:
        """Leave findings to the recording session, which is asked for them."""

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Nothing is open here."""

    def empty_into(
        self,
        inspector: TensorInspector,
        gradients: GradientDebugger,
        diagnostics: ModelDiagnostics,
        profiler: Profiler,
    ) -> None:
        """Hand over what has come since the last time."""
        with self._lock:
            steps, self._steps = list(self._steps), deque(maxlen=self._steps.maxlen)
            losses, self._losses = self._losses, {}
            numbers, self._numbers = list(self._numbers), deque(maxlen=_MAX_NUMBERS)
            sites = dict(self._sites)
        for step in steps:
            for number, row in zip(step.sites.tolist(), step.rows, strict=True):
                site = sites[number]
                if site.quantity == "gradient":
                    gradients.record_point(site.name, _point(step.step, row))
                else:
                    inspector.update_time_series(site.key, float(row[schema.MEAN]), _std(row))
        for number, loss in losses.items():
            diagnostics.record_performance(ModelPerformanceMetrics(training_step=number, loss=loss))
        for name, value in numbers:
            if name == RSS:
                profiler.record_memory(value / 2**20)
            else:
                profiler.record_time(name, value)

    def _take_loop(self, block: Block) -> None:
        """Keep the seconds of the step's phases and the memory of the process."""
        chosen = np.isin(block.sites, list(self._loop))
        for number, value in zip(block.sites[chosen].tolist(), block.rows[chosen, schema.MEAN].tolist(), strict=True):
            self._numbers.append((self._loop[number], value))

    def _see_loss_site(self, site: Site) -> None:
        """Prefer what the user logs as a loss to what the loss function returned."""
        logged = site.quantity == "scalar" and site.name in ("loss", "train_loss")
        returned = site.name == vitals.LOSS and site.quantity == "output" and site.phase == "train"
        if logged or (returned and self._loss_site is None):
            self._loss_site = site.id

    def _take_numbers(self, block: Block) -> None:
        at = int(np.searchsorted(block.sites, -1 if self._loss_site is None else self._loss_site))
        if self._loss_site is not None and at < len(block.sites) and int(block.sites[at]) == self._loss_site:
            row = block.rows[at]
            loss = float(row[schema.MEAN]) if schema.finite(row) == row[schema.COUNT] else math.nan
            self.last_loss = loss
            if len(self._losses) < _MAX_LOSSES:
                self._losses[block.step] = loss
        chosen = np.isin(block.sites, self._gradients)
        if chosen.any():
            norms = measures.compute("norm", block.rows[chosen])
            self.last_gradient_norm = float(np.sqrt(np.nansum(norms**2)))


def _point(step: int, row: Rows) -> GradientPoint:
    return GradientPoint(
        step=step,
        norm=float(measures.compute("norm", row)),
        mean=float(row[schema.MEAN]),
        std=_std(row),
        nonfinite=int(row[schema.COUNT] - schema.finite(row)),
    )


def _std(row: Rows) -> float | None:
    value = float(measures.compute("std", row))
    return None if math.isnan(value) else value
