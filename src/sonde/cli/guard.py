"""Handle errors of the command line: each becomes one line that names a fix, and a closed pipe is not an error.

Exit codes:

    0   done
    1   found something: `verify` found damage, `tail` saw the run end before it finished
    2   invalid arguments, or a run that cannot be read
    130 interrupted
    143 `train` and `eval`: terminated by SIGTERM

`run` ends as its script does.

`diagnose` reports its result in the exit code: 0 nothing wrong, 1 warnings, 2 something critical, 3 invalid arguments.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup

from sonde.cli.help import print_group_help
from sonde.errors import SondeError

OK: Final = 0
FOUND: Final = 1
UNUSABLE: Final = 2
INTERRUPTED: Final = 130
UNUSABLE_BY_VERB: Final = {"diagnose": 3}

# Typer carries click inside since 0.20 and needed it from outside before; its own exception leads to either.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickError: Any = typer.BadParameter.__mro__[2]


class _ReaderLeft(Exception):
    """The reader of our output has closed it, as `head` does when it has enough."""


class Verbs(TyperGroup):
    """The group of all verbs. It turns what goes wrong in any of them into a line on standard error."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run the command line and exit with its code; return what to call where a script is to be run."""
        more["standalone_mode"] = False
        code = self._run(args, *rest, **more)
        if callable(code):
            return code  # `run` has a script to start, whose errors are its own
        sys.exit(code)

    def _run(self, args: Sequence[str] | None, *rest: Any, **more: Any) -> int | Callable[[], None]:
        try:
            code = super().main(args, *rest, **more)
            sys.stdout.flush()
        except (_ReaderLeft, BrokenPipeError):
            _forget_output()
            return OK
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except _ClickError as error:
            message = _usage_message(error, sys.argv[1:] if args is None else args)
            return _complain(message, args) if message else UNUSABLE  # without a verb, the help has said it all
        except SondeError as error:
            return _complain(str(error), args)
        except OSError as error:
            return _complain(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), args)
        return code if isinstance(code, int) or callable(code) else OK

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Typer would take this for a failure and exit with 1.
            raise _ReaderLeft from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print our own page."""
        print_group_help(self, ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb, or name the nearest one."""
        verbs = self.list_commands(ctx)
        if args and args[0] not in verbs and not args[0].startswith("-"):
            raise _UsageError(f"There is no command {args[0]!r}{_instead(args[0], verbs)}", ctx)
        return super().resolve_command(ctx, args)


def _instead(word: str, verbs: Sequence[str]) -> str:
    if (Path(word) / "run.json").is_file():
        return f"; this is a run. Run: sonde show {word}"
    near = get_close_matches(word, verbs, n=1)
    return f" (nearest: {near[0]}). Run: sonde --help" if near else f". Commands: {', '.join(verbs)}. Run: sonde --help"


def _usage_message(error: Any, args: Sequence[str]) -> str:
    option = getattr(error, "option_name", None)
    near = getattr(error, "possibilities", None)
    message = str(error.format_message()).strip()
    if option is not None and hasattr(error, "possibilities"):
        message = f"There is no option {option}" + (f" (nearest: {', '.join(sorted(near))})." if near else ".")
    elif isinstance(error, typer.BadParameter):
        message = _plain_words(message, error, args)
    ctx = getattr(error, "ctx", None)
    if message and "Run: " not in message and ctx is not None:
        message += f"{'' if message.endswith('.') else '.'} Run: {ctx.command_path} --help"
    return " ".join(message.split())


def _plain_words(message: str, error: Any, args: Sequence[str]) -> str:
    """Describe which value was given and which are accepted, whichever library reports it."""
    message = message.replace(" (env var: 'None')", "")  # of options without a variable, in typer before 0.24
    head, _, rest = message.partition(": ")
    rest = rest.removeprefix("Value error, ")
    given = _given(args, getattr(getattr(error, "param", None), "opts", ()))
    named = re.findall(r"'([^']*)'", rest)
    near = get_close_matches(given, named[1:], n=1) if named[:1] == [given] else []
    if near:
        rest = f"{rest.removesuffix('.')} (nearest: {near[0]})."
    for kind, words in (("integer", "a whole number"), ("number", "a number")):
        if rest.startswith(f"Input should be a valid {kind}"):
            rest = f"{given!r} is not {words}."
    if rest.startswith("Input "):
        rest = given + rest.removeprefix("Input")
    return f"{head}: {rest}" if rest else message


def _given(args: Sequence[str], options: Sequence[str]) -> str:
    for word, following in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else following
    return ""


def _complain(message: str, args: Sequence[str] | None) -> int:
    from sonde.views.terminal.style import make_console

    console = make_console(stderr=True)
    with contextlib.suppress(BrokenPipeError):
        console.print(f"[bold red]error:[/] {_escaped(message)}", soft_wrap=True)
    verb = next((each for each in (sys.argv[1:] if args is None else args) if not each.startswith("-")), "")
    return UNUSABLE_BY_VERB.get(verb, UNUSABLE)


def _escaped(message: str) -> str:
    from rich.markup import escape

    from sonde.views.terminal.style import printable

    return escape(printable(message))


def _forget_output() -> None:
    # The reader has left (`| head`). Python would complain once more when it flushes at exit, so give it a place to.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
