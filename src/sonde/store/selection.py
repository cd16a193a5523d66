"""Finding sites by key, name, glob or regular expression."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from sonde.errors import SelectionError
from sonde.records import Site


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
