"""The loss that a list of runs shows: the latest one that was written, told with each sign of life."""

from __future__ import annotations

from collections.abc import Iterable

from sonde import schema
from sonde.records import Block, Site
from sonde.store import table


class LatestLoss:
    """Remembers which scalar is the loss and the last block that has it. It is read only when it is asked for."""

    def __init__(self) -> None:
        self._site: int | None = None
        self._block: Block | None = None

    def meet(self, new: Iterable[Site]) -> None:
        """Look for the loss among new sites; the first that sounds like one counts."""
        for site in new:
            if self._site is None and site.quantity == "scalar" and "loss" in site.name.lower():
                self._site = site.id

    def see(self, block: Block) -> None:
        """Keep a block that has the loss."""
        if self._site is not None and table.find_site(block.sites, self._site) is not None:
            self._block = block

    def value(self) -> float | str | None:
        """Return the loss, `"nan"` if it is not finite; None if none was written."""
        at = None if self._site is None or self._block is None else table.find_site(self._block.sites, self._site)
        if self._block is None or at is None:
            return None
        row = self._block.rows[at]
        return float(row[schema.MEAN]) if schema.finite(row) > 0 else "nan"
