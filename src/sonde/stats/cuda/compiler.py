"""Compile CUDA C at run time, with the NVRTC library that every CUDA build of torch includes.

Compiling takes seconds per element type, so the result is kept on disk: in `$SONDE_CACHE`, or `~/.cache/sonde`.
A cache that cannot be written, or holds something unreadable, costs those seconds again and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import torch

CACHE_VARIABLE: Final = "SONDE_CACHE"


class CompileError(RuntimeError):
    """NVRTC is missing, or did not accept the source."""


def cache_folder() -> Path:
    """Return where compiled code is kept.

    Raises:
        OSError: The user has no home folder, and `SONDE_CACHE` is not set.

    """
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "sonde"
    except RuntimeError as error:  # as for a number without a user, in some containers
        raise FileNotFoundError(f"there is no home folder: {error}") from error


def compiled(source: str, capability: tuple[int, int], options: Sequence[str]) -> bytes:
    """Return loadable code for a device of the compute capability, from the cache if it is there."""
    with suppress(OSError):
        return _unpacked(_cache_path(source, capability, options).read_bytes())
    image = _compile(source, capability, options)
    with suppress(OSError):
        _write_atomically(_cache_path(source, capability, options), _packed(image))
    return image


def forget(source: str, capability: tuple[int, int], options: Sequence[str]) -> None:
    """Drop code from the cache that the driver would not load."""
    with suppress(OSError):
        _cache_path(source, capability, options).unlink(missing_ok=True)


def _cache_path(source: str, capability: tuple[int, int], options: Sequence[str]) -> Path:
    what = "\0".join((source, *options, str(torch.__version__), str(torch.version.cuda)))
    key = hashlib.sha256(what.encode()).hexdigest()[:32]
    return cache_folder() / "cuda" / f"sm_{capability[0]}{capability[1]}-{key}.bin"


def _packed(image: bytes) -> bytes:
    return hashlib.sha256(image).digest() + image


def _unpacked(content: bytes) -> bytes:
    """Return the image; OSError for a file that was cut short or damaged."""
    digest, image = content[:32], content[32:]
    if hashlib.sha256(image).digest() != digest:
        raise OSError("damaged")
    return image


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _compile(source: str, capability: tuple[int, int], options: Sequence[str]) -> bytes:
    library = _nvrtc()
    target, is_final = _target(library, capability)
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"summary.cu", 0, None, None))
    try:
        flags = [option.encode() for option in (f"--gpu-architecture={target}", "--std=c++17", *options)]
        status = library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        if status:
            raise CompileError(f"NVRTC error {status}: {_log(library, program)}")
        return _result(library, program, "CUBIN" if is_final else "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _target(library: ctypes.CDLL, capability: tuple[int, int]) -> tuple[str, bool]:
    """Return the architecture to compile for, and whether that is machine code.

    A device newer than the compiler gets portable code for the newest device the compiler knows.
    """
    count = ctypes.c_int()
    _check(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(library, library.nvrtcGetSupportedArchs(known))
    wanted = 10 * capability[0] + capability[1]
    if wanted in list(known):
        return f"sm_{wanted}", True
    return f"compute_{max(arch for arch in known if arch <= wanted)}", False


def _result(library: ctypes.CDLL, program: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
    image = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{kind}")(program, image))
    return image.raw


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC error {status}: {library.nvrtcGetErrorString(status).decode()}")


@cache
def _nvrtc() -> ctypes.CDLL:
    tried = []
    for candidate in _candidates():
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            tried.append(candidate)
    raise CompileError(f"no NVRTC library was found (tried: {', '.join(tried)})")


def _candidates() -> Iterator[str]:
    """Yield names under which NVRTC may be found: by the loader, among torch's own files, among NVIDIA's packages."""
    if torch.version.cuda is None:
        raise CompileError("this torch was built without CUDA")
    major = torch.version.cuda.split(".")[0]
    if sys.platform == "win32":
        yield f"nvrtc64_{major}0_0.dll"
        return
    yield f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parents[1]
    for pattern in ("torch/lib/libnvrtc-*.so*", "torch/lib/libnvrtc.so*", f"nvidia/*/lib/libnvrtc.so.{major}*"):
        yield from (str(path) for path in sorted(packages.glob(pattern)) if "builtins" not in path.name)
    yield "libnvrtc.so"
