"""The front end as one classic script: one request in place of forty, and browsers load no modules from disk.

Each module becomes a function in a table, run when it is first needed. This is not a parser: it knows the few forms of
`import` and `export` that the front end uses, each at the beginning of a line, and refuses any other.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from sonde.errors import OptionError

ENTRY: Final = '<script type="module" src="assets/main.js"></script>'
"""How the page loads its first module."""

_IMPORT: Final = re.compile(
    r'^import\s+(?:(?P<names>\{[^}]*\})|\*\s+as\s+(?P<whole>\w+))\s+from\s+"(?P<path>[^"]+)";?[^\S\n]*$', re.M
)
_BARE_IMPORT: Final = re.compile(r'^import\s+"(?P<path>[^"]+)";?[^\S\n]*$', re.M)
_LAZY_IMPORT: Final = re.compile(r'\bimport\("(?P<path>[^"]+)"\)')
_EXPORT: Final = re.compile(
    r"^export\s+(?P<kept>(?:async\s+)?function\*?\s+(?P<function>\w+)|class\s+(?P<class>\w+)|(?:const|let)\s+(?P<value>\w+)\s*=)",
    re.M,
)
_EXPORT_LIST: Final = re.compile(r"^export\s+\{(?P<names>[^}]*)\};?[^\S\n]*$", re.M)
_LEFT_OVER: Final = re.compile(r"^\s*(?:import|export)\b(?!\s*[(:])[^\n]*|\bimport\.meta\b|\bimport\([^\n]*", re.M)

_HEAD: Final = """(() => {
"use strict";
const modules = {}, loaded = {};
const need = (name) => {
  if (!(name in loaded)) { loaded[name] = {}; modules[name](loaded[name]); }
  return loaded[name];
};
const later = async (name) => need(name);
"""


def read_sources(folder: Any = None, before: str = "") -> dict[str, str]:
    """Return the texts of the front end by their paths, such as `pages/runs.js`: scripts, style sheets and icons."""
    folder = files("sonde.views.web") / "assets" if folder is None else folder
    found: dict[str, str] = {}
    for each in sorted(folder.iterdir(), key=lambda one: one.name):
        if each.is_dir():
            found |= read_sources(each, f"{before}{each.name}/")
        elif each.name.endswith((".js", ".css", ".svg")):
            found[f"{before}{each.name}"] = each.read_text("utf-8")
    return found


def bundle_viewer() -> str:
    """Return all modules of the viewer as one script."""
    return bundle({name: text for name, text in read_sources().items() if name.endswith(".js")}, "main.js")


def read_page(scripts: str) -> str:
    """Return the page of the viewer with other scripts in the place of its first module.

    Raises:
        OptionError: The page loads its script in some other way.

    """
    page = (files("sonde.views.web") / "assets" / "index.html").read_text("utf-8")
    if ENTRY not in page:
        raise OptionError(f"index.html of the viewer does not load its script by {ENTRY}; it cannot be copied.")
    return page.replace(ENTRY, scripts)


def bundle(sources: Mapping[str, str], entry: str) -> str:
    """Return one script that does what loading the module `entry` would.

    Args:
        sources: The modules by their paths, such as `pages/runs.js`.
        entry: The module to begin with.

    Raises:
        OptionError: A module has a form of import or export that is not known here, or imports one that is not there.

    """
    parts = [_HEAD]
    for path, source in sorted(sources.items()):
        parts.append(f"modules[{json.dumps(path)}] = (exports) => {{\n{as_function(path, source, sources)}\n}};\n")
    return "".join([*parts, f"need({json.dumps(entry)});\n}})();\n"])


def as_function(path: str, source: str, known: Mapping[str, str]) -> str:
    r"""Return a module as the body of a function that fills `exports`.

    >>> print(as_function("a.js", 'import { b } from "./b.js";\nexport const c = b + 1;', {"b.js": ""}))
    Object.defineProperty(exports, "c", { get: () => c });
    const { b } = need("b.js");
    const c = b + 1;
    """
    exported: dict[str, str] = {}

    def target(match: re.Match[str]) -> str:
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
        if found not in known:
            raise OptionError(f"{path} of the viewer imports {match['path']}, which is not there.")
        return json.dumps(found)

    def taken(match: re.Match[str]) -> str:
        names = match["whole"] or " ".join(match["names"].split()).replace(" as ", ": ")
        return f"const {names} = need({target(match)});"

    def given(match: re.Match[str]) -> str:
        name = match["function"] or match["class"] or match["value"]
        exported[name] = name
        return match["kept"]

    def listed(match: re.Match[str]) -> str:
        for each in filter(None, (part.strip() for part in match["names"].split(","))):
            inner, _, outer = each.partition(" as ")
            exported[(outer or inner).strip()] = inner.strip()
        return ""

    steps: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
        (_IMPORT, taken),
        (_BARE_IMPORT, lambda match: f"need({target(match)});"),
        (_LAZY_IMPORT, lambda match: f"later({target(match)})"),
        (_EXPORT, given),
        (_EXPORT_LIST, listed),
    )
    for pattern, change in steps:
        source = pattern.sub(change, source)
    left = _LEFT_OVER.search(_without_comments(source))
    if left:
        raise OptionError(f"{path} of the viewer cannot be bundled: {left[0].strip()[:120]!r} is not understood.")
    # Getters, set before anything runs: a ring of modules finds the functions of each other.
    getters = "".join(
        f"Object.defineProperty(exports, {json.dumps(outer)}, {{ get: () => {inner} }});\n"
        for outer, inner in exported.items()
    )
    return getters + source


def _without_comments(source: str) -> str:
    """Drop comments that stand on lines of their own, where prose may begin with any word."""
    return re.sub(r"^\s*(?://.*|/\*\*?[\s\S]*?\*/)", "", source, flags=re.M)
