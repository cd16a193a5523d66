"""The folders of all ranks of a run, read as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import numpy as np

from sonde.errors import RunDamaged
from sonde.records import Site
from sonde.store import layout, series
from sonde.store.log import table
from sonde.store.log.folder import RankFolder
from sonde.store.log.holdings import Merger, can_merge, is_piece, pieces_of, whole_size
from sonde.store.log.segment import SHARED
from sonde.store.log.sites import Directory
from sonde.store.log.table import Blocks, Snapshot
from sonde.store.series import ALL_COLUMNS, Readings

_MAX_TRIES: Final = 50  # a writer can put a new file in the place of one that is being read, but not this often

P = ParamSpec("P")
T = TypeVar("T")


class AllRanks:
    """Reads all ranks, and retries when a writer has replaced files that are being read.

    Any thread may ask. Sites are those of `directory`, whose ids count over the whole run.
    """

    def __init__(self, path: Path, only: int | None = None) -> None:
        self.path = path
        self._only = only
        self.folders: dict[int, RankFolder] = {}
        self.directory = Directory()
        self.blocks: Blocks = table.empty_blocks()
        """One line a step."""
        self._lock = threading.RLock()
        self._sites_by_rank: dict[int, dict[int, Site]] = {}

    def refresh(self) -> bool:
        """Read what was written since; return whether there was anything."""
        with self._lock:
            changed = False
            for rank in self._present():
                folder = self.folders.setdefault(rank, RankFolder(layout.rank_folder(self.path, rank)))
                try:
                    changed |= folder.refresh()
                except FileNotFoundError:
                    continue  # deleted meanwhile; what was read stays
            if changed:
                self._arrange()
            return changed

    def close(self) -> None:
        """Close all files. What is asked later opens them again."""
        with self._lock:
            for folder in self.folders.values():
                folder.close()

    def _present(self) -> list[int]:
        """Return the ranks to read, as far as they have a folder."""
        if self._only is None:
            return layout.ranks(self.path)
        return [self._only] if layout.rank_folder(self.path, self._only).is_dir() else []

    def _arrange(self) -> None:
        found = {rank: folder.sites for rank, folder in self.folders.items()}
        if found != self._sites_by_rank:
            self._sites_by_rank = found
            self.directory = Directory.merge(found)
        # The lowest rank comes last, so its version of a step wins.
        joined = table.concat_blocks([folder.blocks for _, folder in sorted(self.folders.items(), reverse=True)])
        self.blocks = joined.take(table.last_of_each([joined.step]))

    def places(self, site: Site) -> dict[int, list[int]]:
        """Return by rank under which ids the readings of a site were recorded."""
        return self.directory.places[self.directory.source(self.directory.by_key[site.key]).key]

    def at(self, step: int, rank: int | None) -> Snapshot:
        """Return what every site read at a step; ranks are merged unless one is named."""
        return self._again(self._at, step, rank)

    def stored(
        self, site: Site, columns: tuple[int, ...], *, bins: bool, rank: int | None, start: int | None, stop: int | None
    ) -> Readings:
        """Return the readings of a site, of some columns; ranks are merged unless one is named."""
        return self._again(self._stored, site, columns, bins=bins, rank=rank, start=start, stop=stop)

    def stored_many(
        self, sites: Sequence[Site], columns: tuple[int, ...], *, rank: int | None, start: int | None, stop: int | None
    ) -> list[Readings]:
        """Return the readings of many sites, as `stored` does for one; without bins."""
        return self._again(self._stored_many, sites, columns, rank=rank, start=start, stop=stop)

    def _at(self, step: int, rank: int | None) -> Snapshot:
        shots = []
        merger = Merger(self.directory)
        is_alone = rank is not None or (len(self.folders) == 1 and not self.directory.has_pieces)
        for number in sorted(self.folders) if rank is None else [rank]:
            shot = self.folders[number].at(step) if number in self.folders else Snapshot.none()
            keys = [self.directory.keys.get((number, site)) for site in shot.site.tolist()]
            ids = [-1 if key is None else self.directory.by_key[key].id for key in keys]
            shot = Snapshot(np.array(ids, np.int64), shot.step, shot.span, shot.rows, shot.bins, shot.binned)
            shots.append(shot.take(np.array(merger.wanted(number, keys, alone=is_alone), np.int64)))
        joined = Snapshot.join(shots)
        return joined if is_alone else merger.complete(joined.merged())

    def _stored(
        self, site: Site, columns: tuple[int, ...], *, bins: bool, rank: int | None, start: int | None, stop: int | None
    ) -> Readings:
        wanted = {number: ids for number, ids in sorted(self.places(site).items()) if rank in (None, number)}
        pieces = pieces_of({number: self.holdings(site)[number] for number in wanted})
        if rank is None and (len(wanted) > 1 or any(map(is_piece, pieces))):
            columns = ALL_COLUMNS  # merging takes them all

        def read(number: int) -> Readings:
            return self.folders[number].readings(wanted[number], columns, bins=bins, start=start, stop=stop)

        if not wanted or (rank is None and not can_merge(pieces)):
            return RankFolder(self.path).readings([], columns, bins=bins, start=start, stop=stop)
        parts = [series.first_of([read(number) for number in numbers]) for numbers in pieces.values()]
        merged = parts[0] if len(parts) == 1 else series.merge_overlapping(parts)
        return merged if rank is not None else series.only_whole(merged, whole_size(site, pieces))

    def holdings(self, site: Site) -> dict[int, str]:
        """Return by rank what it holds of a site."""
        return self.directory.holdings[self.directory.source(self.directory.by_key[site.key]).key]

    def _stored_many(
        self, sites: Sequence[Site], columns: tuple[int, ...], *, rank: int | None, start: int | None, stop: int | None
    ) -> list[Readings]:
        found: dict[int, Readings] = {}
        by_rank: dict[int, list[tuple[int, list[int]]]] = {}
        for place, site in enumerate(sites):
            ids = self.places(site)
            wanted = [number for number in sorted(ids) if rank in (None, number)]
            if rank is None and len(wanted) > 1 and self._first_will_do(site, wanted[0]):
                wanted = wanted[:1]
            if len(wanted) == 1 and (rank is not None or not is_piece(self.holdings(site)[wanted[0]])):
                by_rank.setdefault(wanted[0], []).append((place, ids[wanted[0]]))
            else:
                found[place] = self._stored(site, columns, bins=False, rank=rank, start=start, stop=stop)
        for number, asked in by_rank.items():
            folder = self.folders[number]
            read = folder.readings_of([ids for _, ids in asked], columns, start=start, stop=stop)
            found |= {place: each for (place, _), each in zip(asked, read, strict=True)}
        return [found[place] for place in range(len(sites))]

    def _first_will_do(self, site: Site, first: int) -> bool:
        """Return whether all ranks hold copies of a site, and the first has recorded every step."""
        return set(self.holdings(site).values()) == {"replica"} and len(self.folders[first].blocks) == len(self.blocks)

    def _again(self, query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask, and ask again when a segment was put together with others or thinned in between."""
        for number in range(_MAX_TRIES):
            with self._lock:
                try:
                    return query(*args, **kwargs)
                except FileNotFoundError:
                    if number > 1:
                        SHARED.widen(2 * sum(len(folder.segments) for folder in self.folders.values()))
                    self.refresh()
        raise RunDamaged(f"{self.path}: its segments vanish as they are read.")
