"""Help pages: what a verb is for, how to call it, examples, and every option on a line or two."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperCommand

if TYPE_CHECKING:
    from rich.table import Table

_ACTING: Final = ("run", "train", "eval", "replay", "resume", "note", "import-pages")
"""Verbs that run a user's code or write files others rely on; all others only read."""


class Verb(TyperCommand):
    """A verb whose help is one of our pages. Its epilog lists examples: `command  # what it is for`, one on a line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        print_verb_help(self, ctx)


def print_verb_help(verb: Any, ctx: Any, *, options_first: bool = False) -> None:
    """Print the help of one verb."""
    parameters = list(verb.get_params(ctx))
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    names = " ".join(each.metavar if each.required else f"[{each.metavar}]" for each in arguments)
    sections: dict[str, Iterable[tuple[str, str]]] = {
        "arguments": [(each.metavar, each.help or "") for each in arguments],
        "options": [_option(each, ctx) for each in parameters if each not in arguments and not each.hidden],
        "examples": _examples(verb.epilog),
    }
    parts = (ctx.command_path, "[OPTIONS]", names) if options_first else (ctx.command_path, names, "[OPTIONS]")
    usage = " ".join(part for part in parts if part)
    _print_page(usage, verb.help or "", sections)


def print_group_help(group: Any, ctx: Any) -> None:
    """Print the help of the whole command."""
    verbs = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    options = [each for each in group.get_params(ctx) if each.param_type_name == "option"]
    sections: dict[str, Iterable[tuple[str, str]]] = {
        "commands that read runs": [(name, _first_line(verbs[name].help)) for name in verbs if name not in _ACTING],
        "commands that run code or change files": [
            (name, _first_line(verbs[name].help)) for name in verbs if name in _ACTING
        ],
        "options": [_option(each, ctx) for each in options],
        "examples": _examples(group.epilog),
        "exit codes": [
            ("0", "done"),
            ("1", "found something: damage in a run, or a run that failed"),
            ("2", "invalid arguments, or a run that cannot be read"),
            ("", "diagnose: 0 nothing wrong, 1 warnings, 2 something critical, 3 invalid arguments"),
        ],
    }
    _print_page(f"{ctx.command_path} COMMAND [OPTIONS]", group.help or "", sections)


def _print_page(usage: str, text: str, sections: dict[str, Iterable[tuple[str, str]]]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from sonde.views.terminal.style import make_console

    console = make_console()
    console.print(Text.assemble(("usage ", "dim"), (usage, "bold cyan")))
    for paragraph in _paragraphs(text):
        console.print(Padding(Text(paragraph), (1, 0, 0, 2)))
    for title, rows in ((title, list(rows)) for title, rows in sections.items()):
        if not rows:
            continue
        console.print(Text(f"\n{title}", "bold"))
        if title == "examples" and not _fit_beside(rows, console.width - 4):
            for left, right in rows:
                # A command is copied whole: the terminal may wrap it, we must not.
                gap = "   " if len(left) + len(right) + 5 <= console.width else "\n      "
                line = Text.assemble("  ", (left, "cyan"), (gap + right if right else "", "dim"))
                console.print(line, soft_wrap=True)
        else:
            console.print(Padding(_columns(rows, quiet=title == "examples"), (0, 0, 0, 2)))


def _fit_beside(rows: list[tuple[str, str]], width: int) -> bool:
    return max(len(left) for left, _ in rows) + max(len(right) for _, right in rows) + 2 <= width


def _columns(rows: list[tuple[str, str]], *, quiet: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows:
        table.add_row(left, Text(right, "dim" if quiet else ""))
    return table


def _option(option: Any, ctx: Any) -> tuple[str, str]:
    names = ", ".join(sorted(option.opts, key=len))
    choices = getattr(getattr(option, "type", None), "choices", None)
    metavar = "" if getattr(option, "is_flag", False) else f" {option.metavar or '|'.join(map(str, choices or ()))}"
    default = option.get_default(ctx) if option.name != "help" else None
    plain = default is None or isinstance(default, bool) or callable(default)
    text = (option.help or "").replace("{statistics}", _statistics() if "{statistics}" in (option.help or "") else "")
    return names + metavar.rstrip(), text + ("" if plain else f" Default: {default}.")


def _statistics() -> str:
    # Imported here: it needs numpy, which most help pages can do without.
    from sonde.core.statistics import STATISTICS

    return ", ".join(STATISTICS)


def _examples(epilog: str | None) -> Iterator[tuple[str, str]]:
    for line in inspect.cleandoc(epilog or "").splitlines():
        command, _, purpose = line.partition("  # ")
        yield command.strip(), purpose.strip()


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n") if part.strip()]


def _first_line(text: str | None) -> str:
    paragraphs = _paragraphs(text or "")
    return paragraphs[0] if paragraphs else ""
