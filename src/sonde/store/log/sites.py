"""Sites as they are stored: checked when read, and merged over the ranks of a run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sonde.core import files
from sonde.errors import RunDamaged, SelectionError
from sonde.records import HELD, Site


def to_json(sites: Iterable[Site]) -> list[dict[str, Any]]:
    """Return sites as JSON-ready values."""
    return [site.to_json() for site in sites]


_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _StoredSite(msgspec.Struct):
    """A site in a file. Later versions may know more quantities and phases; to read them, their names are enough."""

    id: _Id
    name: str
    quantity: str
    phase: str = "train"
    call: _Id = 0
    part: str = ""
    kind: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    aliases: tuple[str, ...] = ()
    same_as: _Id | None = None
    placement: str = ""


def parse(text: bytes | memoryview, where: str) -> list[Site]:
    """Read a JSON list of sites.

    Raises:
        RunDamaged: It is something else.

    """
    try:
        return list(_parse(bytes(text)))
    except RunDamaged:
        files.decode(text, list[_StoredSite], where, "a list of sites")  # the same error, which names the file
        raise


@functools.lru_cache(maxsize=32)
def _parse(text: bytes) -> tuple[Site, ...]:
    """Parse a list of sites; the ranks of a run mostly have the same."""
    stored = files.decode(text, list[_StoredSite], "What was given", "a list of sites")
    return tuple(Site(**msgspec.structs.asdict(site)) for site in stored)


@dataclass
class Directory:
    """The sites of a whole run: one entry for each key, and where each rank keeps its readings."""

    sites: list[Site] = field(default_factory=list)
    by_key: dict[str, Site] = field(default_factory=dict)
    places: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """For each key, for each rank: the ids in that rank's folder."""
    keys: dict[tuple[int, int], str] = field(default_factory=dict)
    """For each rank and id: the key."""
    holdings: dict[str, dict[int, str]] = field(default_factory=dict)
    """For each key, for each rank: what the rank holds; see `holding`."""
    has_pieces: bool = False
    """Whether a rank may hold less than the whole of a tensor."""

    @classmethod
    def merge(cls, ranks: dict[int, dict[int, Site]]) -> Directory:
        """Merge the sites of each rank; the lowest rank that has a site describes it."""
        self = cls()
        for rank, sites in sorted(ranks.items()):
            for number, site in sorted(sites.items()):
                site = self._apart(site) if site.placement else site
                key = site.key
                self.has_pieces |= bool(site.placement)
                self.keys[rank, number] = key
                self.places.setdefault(key, {}).setdefault(rank, []).append(number)
                self.holdings.setdefault(key, {})[rank] = holding(site, rank)
                if key not in self.by_key:
                    same_as = sites.get(site.same_as) if site.same_as is not None else None
                    self._add(site, None if same_as is None else same_as.key)
        return self._link()

    def _apart(self, site: Site) -> Site:
        """Name a site apart from that of another pipeline stage whose module has the same name."""
        known = self.by_key.get(site.key)
        if not site.placement.startswith("stage ") or known is None or known.placement == site.placement:
            return site
        return replace(site, name=f"{site.placement.replace(' ', '')}.{site.name}")

    def _add(self, site: Site, same_as: str | None) -> None:
        numbered = replace(site, id=len(self.sites), same_as=None)
        self.sites.append(numbered)
        self.by_key[site.key] = numbered
        if same_as is not None:
            self._same_as[site.key] = same_as

    _same_as: dict[str, str] = field(default_factory=dict)

    def _link(self) -> Directory:
        # Ids count over the whole run here, so `same_as` follows once every site has its number.
        for key, target in self._same_as.items():
            site = self.by_key[key]
            linked = replace(site, same_as=self.by_key[target].id)
            self.sites[site.id] = self.by_key[key] = linked
        return self

    def source(self, site: Site) -> Site:
        """Return the site under which the readings of `site` were recorded."""
        seen = {site.id}
        while site.same_as is not None and site.same_as not in seen:
            site = self.sites[site.same_as]
            seen.add(site.id)
        return site


def holding(site: Site, rank: int) -> str:
    """Return what a rank holds of a site, as text: ranks with the same text hold copies of the same elements.

    The text begins with the kind: `replica`, `shard` and `stage` can be merged; `partial` and `own` cannot. Readings of
    each rank's own data (outputs, losses) are pieces of the data of all ranks: `data 3`.
    """
    return site.placement or ("replica" if site.quantity in HELD else f"data {rank}")


def find(sites: Sequence[Site], pattern: str, run: Path) -> list[Site]:
    """Return the sites with this key, else this name, else those that match a glob or, after `re:`, a regex.

    Raises:
        SelectionError: Nothing matches, or the regular expression cannot be read.

    """
    found = [site for site in sites if pattern == site.key]
    found = found or [site for site in sites if pattern == site.name or pattern in site.aliases]
    if not found:
        matches = _matcher(pattern)
        found = [site for site in sites if any(matches(name) for name in (site.key, site.name, *site.aliases))]
    if not found:
        raise SelectionError(f"No site of {run} matches {pattern!r}{_near(sites, pattern)}.")
    return found


def find_one(sites: Sequence[Site], pattern: str, run: Path) -> Site:
    """Return the one site that `pattern` means.

    Raises:
        SelectionError: It means none, or several.

    """
    found = find(sites, pattern, run)
    if len(found) > 1:
        keys = ", ".join(site.key for site in found[:6]) + (", ..." if len(found) > 6 else "")
        raise SelectionError(f"{pattern!r} means {len(found)} sites of {run}: {keys}. Name one by its key.")
    return found[0]


def _matcher(pattern: str) -> Callable[[str], bool]:
    if not pattern.startswith("re:"):
        return lambda name: fnmatchcase(name, pattern)
    try:
        compiled = re.compile(pattern[3:])
    except re.error as error:
        raise SelectionError(f"{pattern!r} is not a regular expression: {error}.") from None
    return lambda name: compiled.search(name) is not None


def _near(sites: Sequence[Site], pattern: str) -> str:
    names = dict.fromkeys(name for site in sites for name in (site.key, site.name))
    near = get_close_matches(pattern, names, n=3, cutoff=0.4)
    return f" (nearest: {', '.join(near)})" if near else f" (it has {len(sites)} sites)"
