"""Keep what the program prints and the source of its own files, on request (`sonde.watch(logs=True)`); bounded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from sonde.core import files
from sonde.hooks.guard import Guard
from sonde.store import logs

_MOST_LINE: Final = 4000
_MOST_FILE: Final = 200 << 10
_MOST_CODE: Final = 1 << 20
_MOST_FILES: Final = 100
_MOST_SECONDS: Final = 10.0
DIFF: Final = "git diff HEAD"
"""Under what name changes that were not committed are kept among the files."""
_INSTALLED: Final = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python3")


class PrintedOutput:
    """Writes every line that goes through `sys.stdout` and `sys.stderr` of this process to the run too.

    The streams stay what they are: only their `write` is called through, so output of loggers that hold them is
    recorded too. A fault here switches it off and never reaches the program.
    """

    def __init__(self, run: Path, step: Callable[[], int], guard: Guard) -> None:
        self._folder = run / logs.LOGS
        self._folder.mkdir(exist_ok=True)
        self._step, self._process = step, os.getpid()
        self._take = guard.wrap("keeping what is printed", self._keep)
        self._lock, self._is_busy = threading.RLock(), False
        self._parts = {"out": "", "err": ""}
        self._file: Any = (self._folder / logs.FIRST).open("ab")
        self._written, self._limit = self._file.tell(), logs.FIRST_BYTES
        self._undo: list[Callable[[], None]] = []
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            self._listen(name, stream)

    def _listen(self, name: str, stream: TextIO | None) -> None:
        write: Any = getattr(stream, "write", None)
        if write is None:
            return

        def write_and_keep(text: str) -> Any:
            done = write(text)
            self._take(name, text)
            return done

        try:
            stream.write = write_and_keep  # type: ignore[method-assign, union-attr]
        except AttributeError:  # a stream whose methods cannot be replaced
            return

        def undo() -> None:
            if vars(stream).get("write") is write_and_keep:
                del stream.write  # type: ignore[union-attr]

        self._undo.append(undo)

    def _keep(self, stream: str, text: str) -> None:
        if self._file is None or os.getpid() != self._process or not isinstance(text, str):
            return
        with self._lock:
            if self._is_busy:  # printed by a destructor or a signal handler while a line is written
                return
            self._is_busy = True
            try:
                *lines, rest = (self._parts[stream] + text).split("\n")
                self._parts[stream] = rest[-_MOST_LINE:]
                for line in lines:
                    self._write(stream, line)
            finally:
                self._is_busy = False

    def _write(self, stream: str, line: str) -> None:
        # Of a progress bar only its last state: what a terminal would show in the end.
        shown = line.rstrip("\r").rpartition("\r")[2][:_MOST_LINE]
        content = files.dumps({"text": shown, "stream": stream, "time": round(time.time(), 3), "step": self._step()})
        if self._written + len(content) > self._limit:
            self._turn_over()
        self._file.write(content + b"\n")
        self._file.flush()
        self._written += len(content) + 1

    def _turn_over(self) -> None:
        """Continue in the file of the last lines; when that is full, its lines become the old ones."""
        self._file.close()
        new = self._folder / logs.NEW
        if self._limit == logs.LAST_BYTES:
            new.replace(self._folder / logs.OLD)
        self._limit, self._written = logs.LAST_BYTES, 0
        self._file = new.open("wb")

    def finish(self) -> None:
        """Stop, and write what was printed without a line's end."""
        for undo in self._undo:
            undo()
        for stream in self._parts:
            if self._parts[stream]:
                self._keep(stream, "\n")  # not guarded: a session that closes has switched its callbacks off
        file, self._file = self._file, None
        if file is not None:
            file.close()


def save_code(run: Path) -> None:
    """Write the source of the modules below the script or the current folder, and what is not committed of it."""
    kept, room = [], _MOST_CODE
    for path in _own_files():
        text = path.read_text("utf-8", "replace")
        part = text[: min(_MOST_FILE, room)]
        kept.append({"path": _shown(path), "text": part, "is_cut": len(part) < len(text)})
        room -= len(part)
        if room <= 0 or len(kept) >= _MOST_FILES:
            break
    changes = read_changes(Path.cwd())
    if changes:
        kept.append({"path": DIFF, "text": changes[:_MOST_FILE], "is_cut": len(changes) > _MOST_FILE})
    folder = run / logs.LOGS
    folder.mkdir(exist_ok=True)
    files.write(folder / logs.CODE, {"files": kept})


def read_changes(folder: Path) -> str:
    """Return how the files of a git repository differ from its last commit; nothing where there is none or no git."""
    # Neither programs of the user's configuration nor locks: a commit that is made meanwhile must not notice.
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *DIFF.split()[1:]]
    command += ["--no-color", "--no-ext-diff", "--no-textconv"]
    try:
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            watch = threading.Timer(_MOST_SECONDS, process.kill)
            watch.start()
            assert process.stdout is not None
            text = process.stdout.read(_MOST_FILE + 1)
            process.kill()  # of a longer one the beginning is kept
            watch.cancel()
    except OSError:
        return ""
    return text.decode("utf-8", "replace")


def _own_files() -> Iterator[Path]:
    """Yield the files of loaded modules that are the user's own, the main script first."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    roots = [Path.cwd(), *([Path(main).resolve().parent] if main else [])]
    names = [main, *(getattr(module, "__file__", None) for module in list(sys.modules.values()))]
    ours = Path(__file__).parents[1]
    for name in dict.fromkeys(name for name in names if isinstance(name, str) and name.endswith(".py")):
        path = Path(name).resolve()
        is_installed = any(sign in str(path) for sign in _INSTALLED) or path.is_relative_to(ours)
        if not is_installed and any(path.is_relative_to(root) for root in roots) and path.is_file():
            yield path


def _shown(path: Path) -> str:
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)
