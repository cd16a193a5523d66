"""`sonde run SCRIPT`: record the training of an unmodified script."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sonde.cli.help import Verb, print_verb_help
from sonde.cli.script import Script
from sonde.cli.watched_script import WatchedScript
from sonde.errors import OptionError

EXAMPLES = """
sonde run train.py --lr 1e-3  # everything after the script is its own
sonde run --run runs/first train.py  # where to write
sonde run -m package.train  # a module, as python -m
torchrun --nproc-per-node 2 -m sonde run train.py  # ranks
sonde run -o logs=true train.py  # keep what it prints and its source
sonde run -o every=10 -o what=gradients train.py  # any plain option of sonde.watch
"""

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


def _flag(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError
    return text.lower() in _TRUE


def _share(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


_OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "what": (_list, "names separated by commas"),
    "where": (_list, "patterns separated by commas"),
    "every": (int, "a whole number"),
    "histogram": (_flag, "true or false"),
    "max_calls": (int, "a whole number"),
    "max_memory_mb": (int, "a whole number"),
    "budget": (_share, "a share such as 0.05, or none"),
    "resume": (_flag, "true or false"),
    "logs": (_flag, "true or false"),
    "max_disk_mb": (int, "a whole number"),
    "diagnose": (_flag, "true or false"),
    "guard": (str, "skip, stop or stop_late"),
    "bundles": (_flag, "true or false"),
    "max_bundle_mb": (int, "a whole number"),
    "enabled": (_flag, "true or false"),
}
"""Options of `sonde.watch` that can be written as text: how each is read, and what it takes."""


class ScriptVerb(Verb):
    """A verb whose options end at the script's name, or at the module's: what follows belongs to the script."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        print_verb_help(self, ctx, options_first=True)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split off the script's arguments before ours are read."""
        takes_value = {name for each in self.params for name in each.opts if not getattr(each, "is_flag", False)}
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            name = args[position]
            if name.startswith("-m") and not name.startswith("--"):
                position += 1 if len(name) > 2 else 2
                break
            position += 2 if name in takes_value else 1
        rest = args[position:]
        return super().parse_args(ctx, [*args[:position], *(["--", *rest] if rest[:1] != ["--"] else rest)])


Words = Annotated[
    list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="The script, and its arguments.")
]
Module = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")]
Place = Annotated[
    str | None,
    typer.Option("--run", metavar="DIR", help="The folder to write; a star becomes a number. Default: runs/SCRIPT-*."),
]
Pairs = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="NAME=VALUE", help=f"An option of sonde.watch: {', '.join(_OPTIONS)}."),
]


def run(words: Words = None, module: Module = None, place: Place = None, option: Pairs = None) -> Callable[[], None]:
    """Record the training of an unmodified script.

    Runs the script as Python would and finds its models and optimizers when training begins. Arguments, exit code,
    standard input, signals and tracebacks are the script's own. Findings are printed to standard error at the end.

    Options come from the command line, then from environment variables (SONDE_RUN, SONDE_EVERY, ...), then from
    [tool.sonde] in pyproject.toml.
    """
    given = list(words or ())
    if module is None and not given:
        raise OptionError("run needs a script: sonde run train.py, or sonde run -m package.train")
    script = Script(module, tuple(given), is_module=True) if module else Script(given[0], tuple(given[1:]))
    if not script.is_module and not Path(script.target).exists():
        raise OptionError(f"There is no script {script.target}.")
    settings = _read_settings(option or [], os.environ, Path.cwd())
    if place is not None:
        settings["run"] = place
    place = str(settings.pop("run", f"runs/{script.name}-*"))
    # Called once the command line's own error handling is left.
    return functools.partial(WatchedScript(script.name, place, settings).run, script)


# ---------------------------------------------------------------------- options


def _read_settings(pairs: list[str], environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
    settings = _from_pyproject(folder)
    if "SONDE_RUN" in environment:
        settings["run"] = environment["SONDE_RUN"]
    for name in _OPTIONS:
        text = environment.get(f"SONDE_{name.upper()}")
        if text is not None:
            settings[name] = _read_option(name, text, f"SONDE_{name.upper()}={text}")
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise OptionError(f"-o {pair}: write NAME=VALUE.")
        settings[name] = _read_option(name, text, f"-o {pair}")
    return settings


def _read_option(name: str, text: str, source: str) -> Any:
    if name not in _OPTIONS:
        raise OptionError(f"{source}: there is no option {name}. Options: {', '.join(_OPTIONS)}.")
    read, takes = _OPTIONS[name]
    try:
        return read(text)
    except ValueError:
        raise OptionError(f"{source}: {name} takes {takes}.") from None


def _from_pyproject(folder: Path) -> dict[str, Any]:
    file = next((each for up in (folder, *folder.parents) if (each := up / "pyproject.toml").is_file()), None)
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("sonde", {})
    except (OSError, ValueError) as error:
        raise OptionError(f"{file} cannot be read: {error}") from error
    unknown = set(table) - set(_OPTIONS) - {"run"}
    if unknown:
        raise OptionError(f"{file}: [tool.sonde] has no option {', '.join(sorted(unknown))}.")
    if "run" in table:  # as written in the file, so it is meant relative to it
        table["run"] = str(file.parent / str(table["run"]))
    return dict(table)
