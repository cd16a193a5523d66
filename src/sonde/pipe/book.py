"""The book of sites: gives every place its number, once."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sonde.records import QUANTITIES, Phase, Quantity, Site

_Identity = tuple[str, Quantity, Phase, int, str]
_WITHOUT_HISTOGRAM: frozenset[Quantity] = frozenset({"scalar", "vital"})


class SiteBook:
    """Numbers sites in the order of their first use. Sites of a run that is continued keep their numbers."""

    def __init__(self, known: Iterable[Site] = ()) -> None:
        self._lock = threading.Lock()
        self._ids: dict[_Identity, int] = {}
        self._sites: list[Site] = []
        self._unsent: list[Site] = []
        self._histograms = bytearray()  # a flag per site
        for site in known:
            self._ids[_identity(site)] = site.id
            self._append(site)

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, site: int) -> Site:
        return self._sites[site]

    def number(self, site: Site) -> int:
        """Return the id of a site like this one, giving it the next number if it is new."""
        with self._lock:
            known = self._ids.get(_identity(site))
            if known is not None:
                return known
            numbered = replace(site, id=len(self._sites))
            self._ids[_identity(site)] = numbered.id
            self._append(numbered)
            self._unsent.append(numbered)
            return numbered.id

    def _append(self, site: Site) -> None:
        self._sites.append(site)
        self._histograms.append(site.quantity not in _WITHOUT_HISTOGRAM)

    def take_new(self) -> list[Site]:
        """Return the sites that are new since the last call."""
        with self._lock:
            new, self._unsent = self._unsent, []
            return new

    def has_histogram(self, site: int) -> bool:
        """Say whether readings of a site carry a histogram when histograms are on."""
        return bool(self._histograms[site])

    def have_histograms(self, sites: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Say the same of many sites."""
        return np.frombuffer(bytes(self._histograms), dtype=np.bool_)[sites]


def _identity(site: Site) -> _Identity:
    assert site.quantity in QUANTITIES
    return site.name, site.quantity, site.phase, site.call, site.part
