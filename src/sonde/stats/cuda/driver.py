"""The few calls of the CUDA driver that launching a compiled kernel takes, through ctypes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch

_INVALID_CONTEXT: Final = 201
_RELAXED_CAPTURES: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LIBRARY: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class Module:
    """Compiled code, loaded into the context that is current. Never unloaded: launches may be queued."""

    def __init__(self, image: bytes) -> None:
        self._library = driver()
        self._handle = ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        check(self._library.cuCtxGetCurrent(ctypes.byref(self._context)))
        check(self._library.cuModuleLoadData(ctypes.byref(self._handle), image))

    def function(self, name: str) -> Function:
        """Return an `extern "C"` kernel of the module."""
        handle = ctypes.c_void_p()
        check(self._library.cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()))
        return Function(self._library, handle, self._context)


class Function:
    """A kernel that can be launched."""

    __slots__ = ("_context", "_handle", "_launch", "_library")

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, context: ctypes.c_void_p) -> None:
        self._library = library
        self._launch = library.cuLaunchKernel
        self._handle = handle
        self._context = context

    @property
    def address(self) -> int:
        """The driver's handle of the kernel."""
        return self._handle.value or 0

    def launch(self, blocks: int, threads: int, stream: int, arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        """Queue the kernel. `arguments` holds the address of each argument; all are copied before this returns."""
        status = self._launch(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        if status == _INVALID_CONTEXT:
            # A thread that never used CUDA before has no context yet; torch makes one current lazily, in its own calls.
            check(self._library.cuCtxSetCurrent(self._context))
            status = self._launch(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        if status:
            check(status)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread ask about events while another thread captures a graph.

    Otherwise the driver takes the question for a mistake, and ends that capture with an error.
    """
    try:
        exchange = driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # not NVIDIA's driver, or one from before graphs
        yield
        return
    mode = ctypes.c_int(_RELAXED_CAPTURES)
    check(exchange(ctypes.byref(mode)))  # afterwards `mode` holds what was set before
    try:
        yield
    finally:
        check(exchange(ctypes.byref(mode)))


@contextmanager
def noting_failure() -> Iterator[None]:
    """Remember if a device refuses a call: after an error inside a kernel it refuses all that follow."""
    try:
        yield
    except torch.OutOfMemoryError:  # the device works on
        raise
    except RuntimeError:
        _failures.append(True)
        raise


def keep_if_failed(pinned: object) -> None:
    """Never release pinned memory if a device has failed.

    Torch ends the process if it is freed then; the run would lose its end, and the user the error that says why.
    """
    if _failures:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pinned))


_failures: list[bool] = []


@cache
def entry_points() -> tuple[int, int]:
    """Return the addresses of `cuLaunchKernel` and `cuStreamIsCapturing`, for C code that calls them itself."""
    launch, capturing = (getattr(driver(), name) for name in ("cuLaunchKernel", "cuStreamIsCapturing"))
    return tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (launch, capturing))  # type: ignore[return-value]


@cache
def driver() -> ctypes.CDLL:
    """Load the driver library; OSError where there is none."""
    library = ctypes.CDLL(_LIBRARY)
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    # With all types declared ctypes converts plain integers itself, which is what keeps a launch cheap.
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    library.cuLaunchKernel.restype = ctypes.c_int
    library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    library.cuCtxGetCurrent.argtypes = [pointer]
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    library.cuGetErrorString.argtypes = [ctypes.c_int, pointer]
    return library


def check(status: int) -> None:
    """Raise for any status but success."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")
