"""Model order: which layer comes first, and which layer a site belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sonde.records import RunHeader, Site

# Quantities whose name is a parameter's, so that the layer is its owner.
_OF_PARAMETERS = frozenset({"parameter", "gradient", "update", "state"})


class ModelOrder:
    """Sorts names of modules and parameters as the model lists them; names it does not know come in site order."""

    def __init__(self, header: RunHeader, sites: Iterable[Site]) -> None:
        self._kinds = {_text(entry, "name"): _text(entry, "kind") for entry in _list(header, "modules")}
        names = [*self._kinds, *(_text(entry, "name") for entry in _list(header, "parameters"))]
        names += [site.name for site in sites]
        self._position: dict[str, int] = {}
        for name in names:
            self._position.setdefault(name, len(self._position))
        # Without a module tree the owners are known only through their parameters.
        self._first_inside: dict[str, int] = {}
        for name, position in self._position.items():
            self._first_inside.setdefault(name.rpartition(".")[0], position)

    def of_layer(self, name: str) -> int:
        """Return where a layer stands: its own place, or that of the first thing inside it."""
        return self._position.get(name, self._first_inside.get(name, len(self._position)))

    def of_site(self, site: Site) -> tuple[int, int, int]:
        """Return a sort key: by layer, then by parameter, then by site."""
        return self.of_layer(layer_of(site)), self._position.get(site.name, 0), site.id

    def kind(self, layer: str) -> str:
        """Return the class of a layer, or an empty string where the run does not say."""
        return self._kinds.get(layer, "")


def layer_of(site: Site) -> str:
    """Return the name of the module a site belongs to: a parameter's owner, or the module itself."""
    return site.name.rpartition(".")[0] if site.quantity in _OF_PARAMETERS else site.name


def _list(header: RunHeader, name: str) -> list[dict[str, Any]]:
    # A header comes from a file that a stranger may have written.
    entries = header.model.get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _text(entry: dict[str, Any], name: str) -> str:
    return str(entry.get(name, ""))
