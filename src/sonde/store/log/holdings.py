"""Merge the readings of several ranks into those of the whole tensor: copies count once, shards add up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from sonde.records import Site
from sonde.store.log.sites import Directory
from sonde.store.log.table import Snapshot

_UNMERGED: Final = ("partial", "own")
"""Kinds that readings cannot be merged of: of the sum of two tensors their statistics tell nothing."""


def pieces_of(holdings: dict[int, str]) -> dict[str, list[int]]:
    """Return the ranks that hold each piece of a tensor, the lowest first; `holdings` are texts of `sites.holding`."""
    pieces: dict[str, list[int]] = {}
    for rank, text in sorted(holdings.items()):
        pieces.setdefault(text, []).append(rank)
    return pieces


def kind_of(text: str) -> str:
    """Return the kind of what a rank holds: `replica`, `shard`, `partial`, `stage`, `own` or `data`."""
    return text.partition(" ")[0]


def can_merge(pieces: Iterable[str]) -> bool:
    """Return whether readings of these pieces merge into readings of the whole."""
    return not any(kind_of(text) in _UNMERGED for text in pieces)


def is_piece(text: str) -> bool:
    """Return whether a rank holds less than the whole tensor."""
    return kind_of(text) in ("shard", *_UNMERGED)


def whole_size(site: Site, pieces: Iterable[str]) -> int | None:
    """Return how many elements all pieces of a site have together; None where any set of them is good."""
    return math.prod(site.shape) if any(kind_of(text) == "shard" for text in pieces) else None


class Merger:
    """Chooses which ranks' rows of one step count, rank by rank in rising order."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._taken: set[tuple[str, str]] = set()
        self._found: dict[int, int] = {}

    def wanted(self, rank: int, keys: Sequence[str | None], *, alone: bool) -> list[int]:
        """Return the places of those rows of a rank that count; all that have a key if the rank is read `alone`."""
        found = []
        for place, key in enumerate(keys):
            if key is None:
                continue
            text = self._directory.holdings[key][rank]
            if not alone:
                if (key, text) in self._taken or not can_merge([text]):
                    continue
                self._taken.add((key, text))
                number = self._directory.by_key[key].id
                self._found[number] = self._found.get(number, 0) + 1
            found.append(place)
        return found

    def complete(self, shot: Snapshot) -> Snapshot:
        """Return a merged snapshot without sharded sites of which a shard is missing."""
        sites = self._directory.sites
        keep = [
            place
            for place, number in enumerate(shot.site.tolist())
            if (pieces := set(self._directory.holdings[sites[number].key].values()))
            and (whole_size(sites[number], pieces) is None or self._found[number] == len(pieces))
        ]
        return shot if len(keep) == len(shot) else shot.take(np.array(keep, np.int64))
