"""Find the line of the user's program that is running: the innermost frame outside torch, Sonde and Python itself."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

_OURS_AND_TORCHS: Final = tuple(
    {
        f"{place}/"
        for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)
        for place in (folder, folder.resolve())
    }
)
_TORCHS: Final = tuple({f"{place}/" for place in (Path(torch.__file__).parent, Path(torch.__file__).parent.resolve())})
_PASSING_ON: Final = frozenset(
    {"_wrapped_call_impl", "_call_impl", "forward", "inner", "decorate_context", "wrapper", "_fn", "__torch_dispatch__"}
    | {"_no_grad_wrapper", "_use_grad", "<listcomp>", "<genexpr>", "<lambda>"}
)
_STDLIB: Final = sysconfig.get_path("stdlib")
_PACKAGES: Final = ("site-packages", "dist-packages")
# What a user typed has no file either; all other code without one was generated.
_TYPED: Final = ("<ipython", "<stdin", "<string")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source code."""

    file: str
    number: int
    function: str = ""

    @property
    def line(self) -> int:
        """The same as `number`."""
        return self.number

    @property
    def text(self) -> str:
        """The source of the line, or nothing where its file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def current_line(boundary: frozenset[CodeType] = frozenset()) -> Line | None:
    """Return the user's line that is running, or None if the stack reaches `boundary` first."""
    frame = users_frame(sys._getframe(1), boundary)
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def source_line() -> str:
    """Return `file:line in function` of the user's line that is running, or "" if there is none."""
    frame = users_frame(sys._getframe(1))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def users_frame(frame: FrameType | None, boundary: frozenset[CodeType] = frozenset()) -> FrameType | None:
    """Return the innermost frame of the user's program, looking outwards from `frame` as far as `boundary`."""
    while frame is not None:
        code = frame.f_code
        if code in boundary:
            return None
        users = _known.get(code.co_filename)  # as in `is_users`, without a call for each frame
        if users or (users is None and is_users(code.co_filename)):
            return frame
        frame = frame.f_back
    return None


def users_call(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the innermost frame of the user's program, and the function of torch's that it called, if any.

    Of functions inside each other the outermost counts; how torch calls modules and wraps functions does not.
    """
    function = ""
    while frame is not None:
        code = frame.f_code
        users = _known.get(code.co_filename)  # as in `users_frame`
        if users or (users is None and is_users(code.co_filename)):
            return frame, function
        if code.co_name not in _PASSING_ON and _is_torchs(code.co_filename):
            function = code.co_name
        frame = frame.f_back
    return None, function


@functools.cache
def _is_torchs(file: str) -> bool:
    return file.startswith(_TORCHS)


_known: dict[str, bool] = {}


def is_users(file: str) -> bool:
    """Return whether a file belongs to the user: not to torch, Sonde or Python, nor made by a compiler."""
    known = _known.get(file)
    if known is None:
        known = _known[file] = _is_users(file)
    return known


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_TYPED)
    if file.startswith(_OURS_AND_TORCHS):
        return False
    return not file.startswith(_STDLIB) or any(part in file for part in _PACKAGES)
