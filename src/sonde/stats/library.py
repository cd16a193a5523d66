"""The native library: where it lies, what it offers, which instruction set and which threads it uses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

LEVELS: Final = ("avx512", "avx2", "baseline")

# How code compiled by GCC enters an OpenMP runtime; those of LLVM and Intel offer it as well.
_THREAD_POOL_SYMBOL = "GOMP_parallel"
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class ArenaLayout(ctypes.Structure):
    """Where the library finds an arena's rows and bins."""

    _fields_ = (("rows", _ADDRESS), ("bins", _ADDRESS), ("capacity", _NUMBER))


class Library:
    """The loaded library.

    Calls take addresses and numbers and return 0, or 1 when a row lies outside the arena. `measure` releases the
    interpreter lock; `measure_briefly` and `measure_one` keep it: for work of microseconds, getting it back from a busy
    thread would cost far more than holding it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._releasing, holding = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        batch = (_ADDRESS, _ADDRESS, _NUMBER, _NUMBER)
        self.measure = _declared(self._releasing.sonde_measure, *batch)
        self.measure_briefly = _declared(holding.sonde_measure, *batch)
        self.measure_one = _declared(holding.sonde_measure_one, *batch)
        self.has_threads = self._borrow_threads()
        next(level for level in LEVELS if self.use_level(level))

    @property
    def level(self) -> str:
        """Name of the instruction set in use."""
        name = _declared(self._releasing.sonde_level, result=ctypes.c_char_p)()
        return bytes(name).decode()

    def use_level(self, level: str) -> bool:
        """Use an instruction set, for the whole process; return whether this machine has it."""
        return bool(_declared(self._releasing.sonde_use_level, ctypes.c_char_p)(level.encode()))

    def _borrow_threads(self) -> bool:
        # Torch is imported by now, so the symbol is that of the OpenMP runtime whose threads torch itself uses. Threads
        # of our own would compete with those, which spin for work.
        try:
            function = getattr(ctypes.CDLL(None), _THREAD_POOL_SYMBOL)
        except (AttributeError, OSError, TypeError):
            return False
        _declared(self._releasing.sonde_use_openmp, _ADDRESS, result=None)(ctypes.cast(function, _ADDRESS))
        return True


@cache
def load() -> Library | None:
    """Return the library, or None where it was not built or cannot be loaded."""
    try:
        return _load()
    except (OSError, AttributeError):
        return None


def why_missing() -> str:
    """Return why there is no library, for people; an empty text where there is one."""
    try:
        _load()
    except FileNotFoundError as error:
        return str(error)
    except (OSError, AttributeError) as error:  # built for another machine, or by another version of Sonde
        return f"the C library cannot be loaded ({error})"
    return ""


def _load() -> Library:
    folder = Path(__file__).parent
    paths = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        raise FileNotFoundError("the C library was not built: there was no C compiler when Sonde was installed")
    return Library(found)


def _declared(
    function: ctypes._NamedFuncPointer, *arguments: type[ctypes._CDataType], result: type | None = ctypes.c_int
) -> Callable[..., Any]:
    function.argtypes = arguments
    function.restype = result
    return function
