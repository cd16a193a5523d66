"""Shorten names of modules and parameters: leave out what all of them share.

`transformer.layers.37.attention.qkv.weight` becomes `37 · attention.qkv.weight` in a list whose blocks are all in
`transformer.layers`. Tables, figures, reports and the viewer show these names; keys, tooltips and copies have the full
name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

MODEL: Final = "(model)"
"""How the model itself is called, whose own name is empty."""
DOT: Final = " \N{MIDDLE DOT} "
_MOST_OF: Final = 0.5
"""A container with more than this share of the numbered blocks needs no mention."""
_ROLELESS: Final = ((), ("weight",), ("bias",))
"""What follows the number of a layer in a `Sequential`: without the container's name a bare number would be left."""

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShortNames:
    """Short names in the order of the full ones, each different, and what was left out of all of them."""

    names: tuple[str, ...]
    prefix: str = ""
    suffix: str = ""

    @property
    def note(self) -> str:
        """What all names share, as words; empty where nothing was left out."""
        if not self.prefix and not self.suffix:
            return ""
        return f"all names: {self.prefix}\N{HORIZONTAL ELLIPSIS}{self.suffix}"


def short_names(names: Sequence[str], *, keep_role: bool = False) -> ShortNames:
    """Return a short name for each of some dotted names; equal names get equal short ones.

    With `keep_role` what all names end with stays, for places that cannot say it once for all of them.

    >>> short_names(["m.h.0.mlp.weight", "m.h.0.qkv.weight", "m.h.1.mlp.weight", "m.h.1.qkv.weight"]).names
    ('0 · mlp', '0 · qkv', '1 · mlp', '1 · qkv')
    >>> short_names(["embed.weight", "blocks.0.fc.weight", "blocks.1.fc.weight", "head.bias"]).names
    ('embed.weight', '0 · fc.weight', '1 · fc.weight', 'head.bias')
    >>> short_names(["generator.l1", "generator.conv.0", "generator.conv.2", "critic.model.0"]).names
    ('generator.l1', 'generator.conv 0', 'generator.conv 2', 'critic.model 0')
    """
    paths = {name: tuple(name.split(".")) if name else () for name in dict.fromkeys(names)}
    inner, prefix, suffix = _without_common([path for path in paths.values() if path], keep_role)
    parts = {name: inner[path] if path else () for name, path in paths.items()}
    shown = _Blocks(parts.values())
    labels = {name: shown.label(path) or MODEL for name, path in parts.items()}
    # Two names that come out alike keep all of their parts.
    taken = Counter(labels.values())
    labels = {name: label if taken[label] == 1 else ".".join(parts[name]) or MODEL for name, label in labels.items()}
    start, end = ".".join(prefix), ".".join(suffix)
    return ShortNames(tuple(labels[name] for name in names), f"{start}." if start else "", f".{end}" if end else "")


def short_keys(keys: Sequence[str], *, keep_role: bool = False) -> list[str]:
    """Return short names of sites, given their keys; what follows the colon stays where it differs.

    >>> short_keys(["blocks.0.fc.weight:gradient", "blocks.1.fc.weight:gradient"])
    ['0', '1']
    >>> short_keys(["fc.weight:gradient", "fc.weight:update"])
    ['fc.weight:gradient', 'fc.weight:update']
    """
    split = [key.partition(":") for key in keys]
    endings = {ending for _, _, ending in split}
    names = short_names([name for name, _, _ in split], keep_role=keep_role).names
    if len(endings) == 1:
        return list(names)
    return [f"{name}:{ending}" for name, (_, _, ending) in zip(names, split, strict=True)]


def _without_common(paths: Sequence[_Path], keep_role: bool) -> tuple[dict[_Path, _Path], _Path, _Path]:
    """Cut off the parts that all paths begin and end with; something of each is left, and a number is never cut off."""
    if len(set(paths)) < 2:
        return {path: path for path in paths}, (), ()
    least = min(map(len, paths))
    head = 0
    while head < least - 1 and len({path[head] for path in paths}) == 1 and not paths[0][head].isdigit():
        head += 1
    tail = 0
    while not keep_role and tail < least - head - 1 and len({path[-1 - tail] for path in paths}) == 1:
        tail += 1
    kept = {path: path[head : len(path) - tail] for path in paths}
    return kept, paths[0][:head], paths[0][len(paths[0]) - tail :]


class _Blocks:
    """Knows which parts of paths are containers of numbered blocks, and which of them need no mention."""

    def __init__(self, paths: Iterable[_Path]) -> None:
        self._inside: Counter[_Path] = Counter()
        """How many paths go through each place; the number of a block is written `#`."""
        self._containers: Counter[_Path] = Counter()
        """How many paths have their first number in each container."""
        for path in paths:
            for depth in range(len(path) + 1):
                self._inside[_shape(path[:depth])] += 1
            if (at := _first_number(path)) is not None:
                self._containers[path[:at]] += 1

    def label(self, path: _Path) -> str:
        """Return the block and the role of a path."""
        at = _first_number(path)
        if at is None:
            return ".".join(path)
        block, end = path[at], at + 1
        # Blocks within blocks, such as the stages of a vision model.
        while self._has_blocks_inside(path, end):
            block, end = f"{block}.{path[end + 1]}", end + 2
        role = path[end:]
        container = self._name_of(path[:at], has_role=role not in _ROLELESS)
        return DOT.join(filter(None, (f"{container} {block}".strip(), ".".join(role))))

    def _name_of(self, container: _Path, *, has_role: bool) -> str:
        """Return what tells a container from the others; nothing for the one with most of the blocks."""
        if not container or (has_role and self._containers[container] > _MOST_OF * self._containers.total()):
            return ""
        shared = set.intersection(*(set(each) for each in self._containers))
        return ".".join(part for part in container if part not in shared) or ".".join(container)

    def _has_blocks_inside(self, path: _Path, at: int) -> bool:
        if len(path) < at + 2 or not path[at + 1].isdigit() or path[at].isdigit():
            return False
        return self._inside[_shape(path[: at + 2])] > _MOST_OF * self._inside[_shape(path[:at])]


def _first_number(path: _Path) -> int | None:
    return next((at for at, part in enumerate(path) if part.isdigit()), None)


def _shape(path: _Path) -> _Path:
    return tuple("#" if part.isdigit() else part for part in path)
