"""Every error Sonde raises on purpose.

    SondeError
    ├── SelectionError (ValueError)   a pattern that matches nothing, or cannot be read
    ├── OptionError (ValueError)      an option with a value that means nothing
    ├── ClosedError (RuntimeError)    a verb on a session that is closed
    ├── NonFiniteError (ArithmeticError)   a gradient is not finite and guard="stop" or "stop_late"
    ├── RunError (RuntimeError)       a run folder that cannot be used as asked
    │   ├── RunNotFound               there is no run at that path
    │   ├── RunExists                 a run is there already and was not to be continued
    │   ├── RunInUse                  another live process writes it
    │   └── RunDamaged                its files cannot be read as a run
    └── MissingExtra (ImportError)    an optional package is not installed

A message names the culprit, the state it is in, and the cure. It may quote what a stranger's file holds, so control
characters in it are shown as escapes.
"""

from __future__ import annotations


def escaped(text: str) -> str:
    r"""Return a text in which control characters, bidirectional marks and the like are shown as escapes.

    A terminal obeys them: they can recolour, retitle, hide or reorder what is on the screen. Line breaks stay.

    >>> print(escaped("a\x1b[31m b"))
    a\x1b[31m b
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return " " if character in "\t\u00a0" else character.encode("unicode_escape").decode()


class SondeError(Exception):
    """The root of all errors raised by Sonde."""

    def __str__(self) -> str:
        return escaped(super().__str__())


class SelectionError(SondeError, ValueError):
    """A selector is malformed or selects nothing."""


class OptionError(SondeError, ValueError):
    """An option has a value that means nothing."""


class ClosedError(SondeError, RuntimeError):
    """A closed session was asked to do something."""


class NonFiniteError(SondeError, ArithmeticError):
    """A gradient is not finite, and the session was asked to stop then."""


class RunError(SondeError, RuntimeError):
    """A run folder cannot be used as asked."""


class RunNotFound(RunError):
    """There is no run at the path."""


class RunExists(RunError):
    """The path already holds a run, and `resume` was not requested."""


class RunInUse(RunError):
    """Another live process writes this run."""


class RunDamaged(RunError):
    """The files at the path cannot be read as a run."""


class MissingExtra(SondeError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed. Run: pip install 'sonde[{extra}]'")
