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
        self._bad: list[Site] = []
        self._guarded: int | None = None
        self._spoilt: int | None = None
        self._taken_until = -1

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

    def take_guarded(self) -> int | None:
        """Return the first step in which a fused optimizer held itself back, once."""
        with self._lock:
            step, self._guarded = self._guarded, None
            return step

    def note_spoilt(self, step: int) -> None:
        """Take a step as one whose gradients or parameters are not finite."""
        with self._lock:
            self._note_spoilt(step)

    def take_spoilt(self, until: int) -> int | None:
        """Return the first step whose gradients or parameters are not finite, once.

        Readings of steps up to `until` that arrive later tell of the same, and are not taken for another.
        """
        with self._lock:
            step, self._spoilt = self._spoilt, None
            if step is not None:
                self._taken_until = until
            return step

    def take_sites(self, sites: list[Site]) -> None:
        """Take sites that are new."""
        with self._lock:
            self._sites |= {site.id: site for site in sites}
            self._guard_site = next((site.id for site in sites if site.name == GUARD_SITE), self._guard_site)

    def take_block(self, block: Block) -> None:
        """Take the readings of one step."""
        with self._lock:
            guarded = block.skipped and self._guard_site in block.sites
            if guarded and self._guarded is None:
                self._guarded = block.step
            if guarded or not block.skipped:  # else it is a gradient scaler's business
                self._judge(block, guarded)
            self._blocks.append((block.step, block.sites, block.rows))

    def _judge(self, block: Block, guarded: bool) -> None:
        bad = _is_bad(block.rows)
        if not bad.any():
            return
        numbers = [int(site) for site in block.sites[bad] if int(site) in self._sites]
        sites = [self._sites[number] for number in numbers]
        if not any(site.quantity == "gradient" or self._was_finite(site) for site in sites):
            return
        if not guarded:
            self._note_spoilt(block.step)
        if self.bad_step is None:
            self.bad_step, self._bad = block.step, sites

    def _note_spoilt(self, step: int) -> None:
        if step > self._taken_until:
            self._spoilt = step if self._spoilt is None else min(step, self._spoilt)

    def _was_finite(self, site: Site) -> bool:
        """Say whether a parameter was finite before: one that never was is a mask of infinities that are meant."""
        return site.quantity == "parameter" and any(
            bool((~_is_bad(rows[sites == site.id])).any()) for _, sites, rows in self._blocks
        )

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


def _is_bad(rows: Rows) -> Any:
    return rows[:, schema.NAN : schema.NEG_INF + 1].any(axis=1)


def _worst(rows: Rows) -> dict[str, float]:
    return {
        "min": float(rows[:, schema.MIN].min()),
        "max": float(rows[:, schema.MAX].max()),
        "nonfinite": int(measures.nonfinite(rows).sum()),
    }
