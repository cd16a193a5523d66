"""What is new in a run since the last look: one line of a live log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sonde.analysis.facts import find_learning_rate, find_loss
from sonde.analysis.order import ModelOrder
from sonde.analysis.summary import SiteSummary, keys_of, summarise_sites, usual_stat, worst_first
from sonde.analysis.unusual import RECENT
from sonde.records import Event, Site
from sonde.store import Run

# Steps that the worst layer is judged by: enough past for a jump to be one, few enough to read at every look.
_WINDOW = 10 * RECENT


@dataclass(frozen=True, slots=True, eq=False)
class News:
    """What came since the last look. None where the run has no such scalar; `nonfinite` counts elements."""

    step: int | None
    new_steps: int
    loss: float | None
    learning_rate: float | None
    nonfinite: int
    worst: SiteSummary | None
    values: dict[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


class Newspaper:
    """Remembers what was told already. `sites` adds the latest values of these to every piece of news."""

    def __init__(self, run: Run, *, sites: Sequence[Site] = (), stat: str | None = None) -> None:
        self._run, self._sites, self._stat = run, list(sites), stat
        self._last_step: int | None = None
        self._told_events = 0

    def skip_to_end(self) -> None:
        """Count everything there is as told, but for the latest step."""
        steps = self._run.steps
        self._last_step = int(steps[-2]) if len(steps) > 1 else None
        self._told_events = len(self._run.events)

    def read(self) -> News | None:
        """Return what is new since the last call, or None."""
        run = self._run
        events = tuple(run.events[self._told_events :])
        self._told_events += len(events)
        new = run.steps if self._last_step is None else run.steps[run.steps > self._last_step]
        if not len(new):
            return News(None, 0, None, None, 0, None, {}, events) if events else None
        since, self._last_step = int(new[0]), int(new[-1])
        tensors = [site for site in run.sites if site.quantity not in ("scalar", "vital") and site.same_as is None]
        return News(
            step=self._last_step,
            new_steps=len(new),
            loss=self._latest(find_loss(run.sites)),
            learning_rate=self._latest(find_learning_rate(run.sites)),
            nonfinite=sum(int(run.series(site, "nonfinite", start=since).values.sum()) for site in tensors),
            worst=self._worst(tensors),
            values={site.key: value for site in self._sites if (value := self._latest(site)) is not None},
            events=events,
        )

    def _latest(self, site: Site | None) -> float | None:
        if site is None:
            return None
        stat = self._stat if site in self._sites and self._stat else usual_stat(site, keys_of(self._run))
        values = self._run.series(site, stat, start=self._last_step).values
        return float(values[-1]) if len(values) else None

    def _worst(self, tensors: list[Site]) -> SiteSummary | None:
        # Gradients tell first, and are a fraction of all sites; without them anything will do.
        judged = [site for site in tensors if site.quantity == "gradient"] or tensors
        if not judged:
            return None
        order = ModelOrder(self._run.header, self._run.sites)
        worst = worst_first(summarise_sites(self._run, judged, last=_WINDOW), order)[0]
        return worst if worst.mark.level != "fine" else None
