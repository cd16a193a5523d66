r"""Where to look: predicates over the names and classes of modules and parameters.

A selector is written as plain text in most places:

    "layers.*.attn"     a glob over names (`*` also crosses dots); a module's name selects its parameters too
    "re:layers\.[0-3]"   a regular expression that must match from the start of the name
    "kind:Conv2d"       a class name, or a glob over class names

or built from `glob`, `regex` and `kind`, combined with `|`, `&` and `~`:

>>> first = glob("layers.0.*") & ~kind("Dropout")
>>> first("layers.0.fc", "Linear"), first("layers.0.drop", "Dropout")
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from sonde.errors import SelectionError


@dataclass(frozen=True, slots=True)
class Selector:
    """A predicate over (name, class name), with the text it was made from."""

    text: str
    test: Callable[[str, str], bool]

    def __call__(self, name: str, kind: str = "") -> bool:
        """Return whether a module or parameter is selected."""
        return self.test(name, kind)

    def __or__(self, other: Selector) -> Selector:
        return Selector(f"({self.text} | {other.text})", lambda name, kind: self(name, kind) or other(name, kind))

    def __and__(self, other: Selector) -> Selector:
        return Selector(f"({self.text} & {other.text})", lambda name, kind: self(name, kind) and other(name, kind))

    def __invert__(self) -> Selector:
        return Selector(f"~{self.text}", lambda name, kind: not self(name, kind))


Where = str | Selector | Sequence["str | Selector"] | None


def everything() -> Selector:
    """Select all."""
    return Selector("*", lambda name, kind: True)


def glob(pattern: str) -> Selector:
    """Select names by a shell-like pattern; a plain name selects just itself."""
    return Selector(pattern, lambda name, kind: fnmatchcase(name, pattern))


def regex(pattern: str) -> Selector:
    """Select names that a regular expression matches from their start."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SelectionError(f"'re:{pattern}' is not a regular expression: {error}.") from error
    return Selector(f"re:{pattern}", lambda name, kind: compiled.match(name) is not None)


def kind(pattern: str) -> Selector:
    """Select by class name, such as `Linear` or `*Norm*`."""
    return Selector(f"kind:{pattern}", lambda name, class_name: fnmatchcase(class_name, pattern))


def selector(where: Where) -> Selector:
    """Turn any accepted form into a selector; None selects everything."""
    if where is None:
        return everything()
    if isinstance(where, Selector):
        return where
    if isinstance(where, str):
        return _parse(where)
    if not isinstance(where, Iterable):
        raise SelectionError(f"A selector is text, a Selector or a list of them; got {type(where).__name__}.")
    parts = [selector(part) for part in where]
    if not parts:
        raise SelectionError("An empty list selects nothing. Leave `where` out to select everything.")
    united = parts[0]
    for part in parts[1:]:
        united = united | part
    return united


def _parse(text: str) -> Selector:
    if text.startswith("re:"):
        return regex(text.removeprefix("re:"))
    if text.startswith("kind:"):
        return kind(text.removeprefix("kind:"))
    return glob(text)


def check_each_matches(where: Where, names: dict[str, str], owner: str) -> None:
    """Raise if a part of `where` matches none of `names` (name -> class name), naming the nearest names."""
    selector(where)  # malformed patterns are reported first
    if where is None:
        return
    parts = [where] if isinstance(where, str | Selector) else list(where)
    for part in parts:
        chosen = selector(part)
        if not any(chosen(name, kind) for name, kind in names.items()):
            raise SelectionError(_nothing_matches(chosen.text, names, owner))


def _nothing_matches(text: str, names: dict[str, str], owner: str) -> str:
    if text.startswith("kind:"):
        known, wanted = sorted(set(names.values())), text.removeprefix("kind:")
    else:
        known, wanted = [name for name in names if name], text.removeprefix("re:")
    near = get_close_matches(wanted, known, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}" if near else f"for example: {', '.join(known[:5])}"
    names_are = "Names are those of model.named_modules() and model.named_parameters()."
    return f"Nothing in {owner} matches {text!r} ({hint}). {names_are}"
