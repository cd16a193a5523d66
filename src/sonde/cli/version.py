"""`sonde version`: which versions are installed and which kernels and hooks are in use."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from sonde.cli.answer import print_json
from sonde.cli.opening import AsJson

EXAMPLES = """
sonde version
sonde version --verbose  # for a bug report
sonde version --verbose --json
"""

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Add packages, kernels, hooks and why a slower one is used.")
]
# "plotly>=6; extra == 'view'": name, lowest version, extra.
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?:>=(?P<lowest>[\d.]+))?[^;]*(?:;.*extra == ['\"](?P<extra>[\w-]+)['\"])?"
)
_NOT_FOR_USERS = ("bench", "compare", "dev", "docs", "frameworks", "release")


def version(verbose: Verbose = False, json: AsJson = False) -> None:
    """Print the version; with --verbose also packages, kernels and hooks.

    A kernel is what computes statistics of tensors. Where a slower one is used, the reason is printed: no C compiler at
    install time, an older torch, a variable in the environment.
    """
    from sonde.version import VERSION

    facts: dict[str, Any] = {"sonde": VERSION}
    if verbose:
        facts |= _details()
    if json:
        print_json(facts)
        return
    typer.echo(f"sonde {VERSION}")
    if verbose:
        _print(facts)


def _details() -> dict[str, Any]:
    return {
        "folder": str(Path(__file__).parents[1]),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("SONDE_")},
        "packages": _packages(),
        "kernels": _kernels(),
    }


def _packages() -> list[dict[str, str | None]]:
    """Return what Sonde and its extras need, and which version of it is installed."""
    try:
        lines = metadata.requires("sonde") or []
    except metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return []
    found: dict[str, dict[str, str | None]] = {}
    for match in filter(None, map(_REQUIREMENT.match, lines)):
        if match["name"] != "sonde" and match["extra"] not in _NOT_FOR_USERS:
            found.setdefault(match["name"], {**match.groupdict(), "installed": _installed(match["name"])})
    return list(found.values())


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> list[dict[str, str]] | None:
    """Return what computes statistics here, or None without torch."""
    if find_spec("torch") is None:
        return None
    found = import_module("sonde.stats.self_check").check_kernels()
    return [{"part": each.part, "used": each.used, "why": each.why} for each in found]


def _print(facts: dict[str, Any]) -> None:
    rows = [(name, facts[name]) for name in ("folder", "python", "executable", "platform")]
    rows += [("environment", f"{name}={value}") for name, value in facts["environment"].items()]
    rows += [(each["name"], _state(each)) for each in facts["packages"]]
    rows += [
        (each["part"], each["used"] + (f": {each['why']}" if each["why"] else "")) for each in facts["kernels"] or []
    ]
    if facts["kernels"] is None:
        rows.append(("recording", "not possible: torch is not installed. Run: pip install 'sonde[torch]'"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def _state(package: dict[str, str | None]) -> str:
    installed, lowest, extra = package["installed"], package["lowest"], package["extra"]
    if installed is None:
        return f"not installed. Run: pip install 'sonde[{extra}]'" if extra else "MISSING: reinstall Sonde"
    if lowest and _numbers(installed) < _numbers(lowest):
        return f"{installed}, but {lowest} or later is needed"
    return installed + (f"  ({extra})" if extra else "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
