"""Run a Python script or module as Python itself would, inside this process.

The script gets its own `__main__`, `sys.argv` and `sys.path[0]`. What it raises leaves this process as it would without
Sonde: the interpreter prints the traceback, from which Sonde's frames are removed, and chooses the exit code.
Nothing is imported before the script does: it may set environment variables that torch or numpy read at import.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

_OURS: Final = f"{Path(__file__).parents[1]}/"


@dataclass(frozen=True, slots=True)
class Script:
    """What to run, with its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """The file's name without its suffix, or the last part of the module's.

        >>> Script("tools/train.py").name, Script("package.train", is_module=True).name
        ('train', 'train')
        """
        if self.is_module:
            return self.target.removesuffix(".__main__").rpartition(".")[2]
        return Path(self.target).resolve().stem


def execute(script: Script) -> None:
    """Run the script to its end; what it raises is raised."""
    path = Path(script.target)
    sys.argv = ["-m" if script.is_module else script.target, *script.arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    if script.is_module:
        _set_first_path(Path.cwd())
        _run_module(script.target)
    elif path.is_dir() or path.suffix in (".zip", ".pyz"):
        _set_first_path(path.absolute(), only=True)
        _run_module("__main__", alter_argv=False)
    else:
        _set_first_path(path.resolve().parent)
        _run_file(path.absolute(), main)


def _run_file(path: Path, main: ModuleType) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    vars(main).update(__file__=str(path), __loader__=loader, __package__=None, __spec__=None, __cached__=None)
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    exec(code, vars(main))


def _run_module(name: str, *, alter_argv: bool = True) -> None:
    # What the interpreter calls for `python -m`, so that the module finds itself in the same state.
    run: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined] # the interpreter's own entry
    run(name, alter_argv)


def _set_first_path(folder: Path, *, only: bool = False) -> None:
    if sys.flags.safe_path and not only:
        return  # Python was asked not to put a folder there
    if sys.flags.safe_path:
        sys.path.insert(0, str(folder))
    else:
        sys.path[0] = str(folder)


# ---------------------------------------------------------------------- tracebacks


def hide_our_frames(error: BaseException) -> None:
    """Make the interpreter print this exception without Sonde's frames, through whichever hook is in place."""
    hook = sys.excepthook
    traces = {id(each): _without_ours(each.__traceback__) for each in _chain(error)}

    def print_theirs(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        for each in _chain(value):
            each.__traceback__ = traces.get(id(each), each.__traceback__)
        sys.last_traceback = value.__traceback__
        hook(kind, value, value.__traceback__)

    sys.excepthook = print_theirs


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that came before it."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Remove Sonde's frames from a traceback, except where the exception came from Sonde itself."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    theirs = [index for index, each in enumerate(frames) if not _is_ours(each)]
    last = theirs[-1] if theirs else -1
    # Frames before the script's own first one started it: the interpreter's `runpy` and the `sonde` command.
    first = next((index for index, each in enumerate(frames) if each.tb_frame.f_code is execute.__code__), -1) + 1
    kept = [each for index, each in enumerate(frames) if index >= first and (index > last or not _is_ours(each))]
    for each, following in zip(kept, [*kept[1:], None], strict=True):
        each.tb_next = following
    return kept[0] if kept else None


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)


# ---------------------------------------------------------------------- imports


class WhenImported:
    """Calls a function once, right after a package was imported for the first time. An entry of `sys.meta_path`."""

    def __init__(self, package: str, then: Callable[[], None]) -> None:
        self._package = package
        self._then = then
        if package in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the package as Python would, and listen to its loading; leave all others to Python."""
        if name != self._package or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _call_after_loading(spec.loader, self._then)
        return spec


def _call_after_loading(loader: Any, then: Callable[[], None]) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # Removes an attribute of this object, so that the class's method is visible again. Another tool that listens
        # to imports in the same way may have removed it already.
        vars(loader).pop("exec_module", None)
        load(module)
        then()

    loader.exec_module = exec_module
