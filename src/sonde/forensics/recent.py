"""The readings of the last few steps, as the worker hands them out: what led to something non-finite."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import numpy as np

from sonde import measures, schema
from sonde.records import Block, Event, Finding, Quantity, Site
from sonde.schema import Rows

NUM_STEPS: Final = 16
GUARD_SITE: Final = "guard.found_inf"
"""Where it is recorded whether a fused optimizer held itself back."""


class Recent:
    """A sink that keeps the rows of the last steps, and notes the first step whose readings are not finite."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, Site] = {}
        self._guard_site = -1
        self._blocks: deque[tuple[int, Any, Rows]] = deque(maxlen=NUM_STEPS)
        self.bad_step: int | None = None
        """The first step whose gradients or parameters were seen to be non-finite since `forget_bad`."""
        self.guarded_step: int | None = None
        """The first step in which a fused optimizer held itself back."""
        self._bad: list[Site] = []

    def history(self, name: str, quantity: Quantity = "output") -> list[dict[str, Any]]:
        """Return how large a module's outputs (or other readings by that name) were, step by step."""
        with self._lock:
            ids = {site.id for site in self._sites.values() if (site.name, site.quantity) == (name, quantity)}
            blocks = list(self._blocks)
        found = []
        for step, sites, rows in blocks:
            chosen = rows[np.isin(sites, list(ids))] if ids else rows[:0]
            if len(chosen):
                found.append({"step": step, **_worst(chosen)})
        return found

    def bad_sites(self) -> list[Site]:
        """Return the sites of the first bad step that are not finite, in the order in which they first came up."""
        with self._lock:
            return list(self._bad)

    def forget_bad(self) -> None:
        """Begin to look for a first bad step anew."""
        with self._lock:
            self.bad_step, self._bad = None, []

    def take_sites(self, sites: list[Site]) -> None:
        """Take sites that are new."""
        with self._lock:
            self._sites |= {site.id: site for site in sites}
            self._guard_site = next((site.id for site in sites if site.name == GUARD_SITE), self._guard_site)

    def take_block(self, block: Block) -> None:
        """Take the readings of one step."""
        with self._lock:
            self._blocks.append((block.step, block.sites, block.rows))
            guarded = block.skipped and self._is_guarded(block)
            if guarded and self.guarded_step is None:
                self.guarded_step = block.step
            if self.bad_step is not None or (block.skipped and not guarded):
                return  # a gradient scaler's business
            bad = block.rows[:, schema.NAN : schema.NEG_INF + 1].any(axis=1)
            if not bad.any():
                return
            sites = [self._sites[int(site)] for site in block.sites[bad] if int(site) in self._sites]
            if any(site.quantity in ("gradient", "parameter", "update") for site in sites):
                self.bad_step, self._bad = block.step, sites

    def _is_guarded(self, block: Block) -> bool:
        return self._guard_site in block.sites

    def take_event(self, event: Event) -> None:
        """Leave events to others."""

    def take_finding(self, finding: Finding) -> None:
        """Leave findings to others."""

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Let go of the readings."""
        with self._lock:
            self._blocks.clear()


def _worst(rows: Rows) -> dict[str, float]:
    return {
        "min": float(rows[:, schema.MIN].min()),
        "max": float(rows[:, schema.MAX].max()),
        "nonfinite": int(measures.nonfinite(rows).sum()),
    }
