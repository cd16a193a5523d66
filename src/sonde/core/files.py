"""Open, read and write files of a run safely: regular files only, strict JSON within bounds, replaced in one step."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar
from uuid import UUID

import msgspec
import numpy as np

from sonde.errors import RunDamaged

# --------------------------------------------------------------------------------
# Writing a file in one step.


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place when the block ends well.

    A reader sees the old content or the new one, and never a part; a block that fails leaves nothing behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def short(path: Path) -> str:
    """Return a path as a person would type it here: relative if it lies below the present folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def claim(candidates: Iterable[Path], make: Callable[[Path], object] = Path.mkdir) -> Path:
    """Make and return the first candidate that does not exist; of several processes that try at once only one gets it.

    `make` makes a folder by default, and raises FileExistsError where something exists.
    """
    for path in candidates:
        with contextlib.suppress(FileExistsError):
            make(path)
            return path
    raise FileExistsError("All candidates exist.")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a loss of power, where the system can."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some systems cannot open folders
    try:
        os.fsync(fd)
    except OSError:
        pass  # some file systems cannot sync them
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------
# Opening a file that anyone may have put there: only a regular one, never through a link, and never waiting for it.


MAX_BYTES: Final = 64 << 20
"""The longest JSON document that is read."""
_ROOT: Final = "run.json"  # lies at the top of a run
_MOST_LEVELS: Final = 6  # of folders inside a run
_KINDS: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_file(path: str | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """Open a file of a run for reading. Every file of a run is opened here.

    Raises:
        RunDamaged: It is not a regular file, or it is a link or lies behind one inside the run: a run from elsewhere
            could use a link to show other files of this machine, and a pipe to make a reader wait forever.
        OSError: It cannot be read.

    """
    return open(path, "rb", buffering=buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    linked = _linked_folder(path)
    if linked:
        raise RunDamaged(_is_a_link(linked))
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and Path(path).is_symlink():
            raise RunDamaged(_is_a_link(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise RunDamaged(f"{path} is not a regular file; it is not opened.") from None
        raise
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise RunDamaged(f"{path} is {_KINDS.get(kind, 'something else')}, not a regular file; it is not opened.")
    return fd


def _is_a_link(path: str) -> str:
    return f"{path} is a link; links inside a run are not followed. To read the run, copy it with: cp -rL"


def _linked_folder(path: str) -> str:
    """Return the folder between a file and the top of its run that is a link; empty if there is none."""
    found = ""
    for folder in list(Path(path).parents)[:_MOST_LEVELS]:
        if os.path.lexists(folder / _ROOT):
            return found
        found = str(folder) if folder.is_symlink() else found
    return ""


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a whole file of at most `most` bytes.

    Raises:
        RunDamaged: It is larger, or not a regular file.
        OSError: It cannot be read.

    """
    with open_file(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise RunDamaged(f"{path} has {max(size, len(content)):,} bytes; at most {most:,} are read.")
    return content


# --------------------------------------------------------------------------------
# JSON that any parser reads: no bare NaN, nothing too large or too deep to be taken from a stranger.


MAX_DEPTH: Final = 128
"""How many lists and objects may lie inside each other."""
MAX_MEMORY: Final = 192 << 20
"""Bytes of memory that the parsed values of one document may take."""
_CHEAP_BYTES: Final = 1 << 20  # documents up to this size cannot take more
_COSTS: Final = {b"[": 72, b"{": 240, b",": 40, b'"': 30}  # bytes of memory for each of these in the text
_ESCAPED: Final = re.compile(rb"\\.", re.DOTALL)
_NEITHER_QUOTE_NOR_BRACKET: Final = bytes(code for code in range(256) if code not in b'"[]{}')
_DEPTHS: Final = np.array([(chr(code) in "[{") - (chr(code) in "]}") for code in range(256)], np.int8)
"""By character: how much deeper the JSON after it is nested."""
_MAX_DIGITS: Final = 300  # a float cannot hold a number with more
_LONG_NUMBER: Final = re.compile(rb"[0-9]{%d}" % (_MAX_DIGITS + 1))

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number that is not negative and fits 64 bits."""
Finite = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]
"""A number that is finite: JSON's own numbers have no limits."""
_AS_IT_IS: Final = frozenset((str, int, bool, type(None)))
_FOR_PLAIN: Final = (bytes, bytearray, memoryview, datetime, date, clock_time, timedelta, UUID, Decimal)
"""Types that msgspec would write in a form of its own."""
_NOT_FINITE: Final = ("nan", "inf", "-inf")

T = TypeVar("T")


def plain(value: Any, *, nonfinite: Literal["text", "null"] = "text") -> Any:
    """Return `value` as strict JSON can hold it: dataclasses as objects, arrays as lists, anything unknown as its text.

    Args:
        value: Any value.
        nonfinite: How to write numbers that are not finite: `"nan"`, `"inf"` or `"-inf"` as text, or null.

    """
    kind = type(value)
    if kind in _AS_IT_IS:  # most values: this runs in the worker thread, at the training's cost
        return value
    if kind is dict:
        return {key if type(key) is str else str(key): plain(item, nonfinite=nonfinite) for key, item in value.items()}
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        known = math.isfinite(value)
        return float(value) if known else str(float(value)) if nonfinite == "text" else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, nonfinite=nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, nonfinite=nonfinite) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        # Not `asdict`, which copies every array in it.
        return {each.name: plain(getattr(value, each.name), nonfinite=nonfinite) for each in fields(value)}
    try:
        # Numpy's numbers and arrays, and tensors, if they have values.
        return plain(value.tolist(), nonfinite=nonfinite) if hasattr(value, "tolist") else str(value)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return f"an object of class {type(value).__name__}"


def dumps(value: Any, indent: int | None = None) -> bytes:
    """Return `value` as strict JSON."""
    separators = (",", ":") if indent is None else None
    try:  # compiled code: this runs beside the training
        ready = msgspec.to_builtins(value, builtin_types=_FOR_PLAIN, str_keys=True, enc_hook=ordinary)
        return json.dumps(ready, allow_nan=False, indent=indent, separators=separators).encode()
    except (TypeError, ValueError):  # a number that is not finite, or a type that `plain` describes
        return json.dumps(plain(value), allow_nan=False, indent=indent, separators=separators).encode()


def ordinary(value: Any) -> Any:
    """Return a value of a type that msgspec does not know as one that it does, such as a subclass of `str` as `str`."""
    for kind in (str, bool, int):
        if isinstance(value, kind):
            return kind(value)
    return plain(value)


def text(value: Any, indent: int | None = None) -> str:
    """Return `value` as strict JSON in which what is not finite is null, and letters stay letters."""
    return json.dumps(plain(value, nonfinite="null"), allow_nan=False, ensure_ascii=False, indent=indent)


def utf8(text: str) -> str:
    """Return a text that UTF-8 can hold: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def encode(value: Any) -> bytes:
    """Return msgspec's structures as JSON, in text that UTF-8 can hold."""
    try:
        return msgspec.json.encode(value, enc_hook=ordinary)
    except UnicodeEncodeError:
        return text(msgspec.to_builtins(value)).encode("utf-8", "replace")


def loads(text: bytes | memoryview, where: str) -> Any:
    """Parse JSON from a file that anyone may have written.

    Args:
        text: The bytes.
        where: The file (and the place in it) that an error names.

    Raises:
        RunDamaged: It is not JSON, or too large or too deep.

    """
    check_json(text, where)
    if _LONG_NUMBER.search(text) is None:
        # Twice as fast as Python's own parser, with half the memory; but it takes no lone surrogates.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(text)
    try:
        return json.loads(bytes(text), parse_constant=_refuse, parse_int=_bounded, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise RunDamaged(f"{where} is not valid JSON: {error}") from None


def check_json(text: bytes | memoryview, where: str) -> None:
    """Raise RunDamaged if a JSON document is too large, too deep, or would take too much memory once parsed."""
    if len(text) > MAX_BYTES:
        raise RunDamaged(f"{where} holds {len(text):,} bytes of JSON; at most {MAX_BYTES:,} are read.")
    content = bytes(text)
    if len(content) > _CHEAP_BYTES:
        cost = memory_of(content)
        if cost > MAX_MEMORY:
            raise RunDamaged(f"{where} holds JSON that would take {cost >> 20:,} MB; at most {MAX_MEMORY >> 20} are.")
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH and _depth(content) > MAX_DEPTH:
        raise RunDamaged(f"{where} holds JSON that is nested more than {MAX_DEPTH} levels deep.")


def memory_of(content: bytes) -> int:
    """Estimate how many bytes of memory JSON takes once it is parsed."""
    return len(content) + sum(content.count(sign) * each for sign, each in _COSTS.items())


def _depth(content: bytes) -> int:
    """Return how deeply lists and objects are nested."""
    if b"\\" in content:
        content = _ESCAPED.sub(b"", content)
    codes = np.frombuffer(content.translate(None, _NEITHER_QUOTE_NOR_BRACKET), np.uint8)
    is_outside = np.cumsum(codes == ord('"')) % 2 == 0  # of strings
    change = _DEPTHS[codes[is_outside]]
    return int(np.cumsum(change, dtype=np.int32).max(initial=0))


def _refuse(name: str) -> None:
    raise ValueError(f"the bare word {name}")


def _bounded(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def convert(value: Any, kind: type[T], where: str, what: str) -> T:
    """Return parsed JSON as a dataclass, a msgspec Struct or a container of such; fields of later versions are ignored.

    Args:
        value: What `loads` returned.
        kind: The type that it should have.
        where: The file (and the place in it) that an error names.
        what: What it should be, in words.

    Raises:
        RunDamaged: It has another type; the message names the field.

    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: keys that no file can hold
        raise RunDamaged(f"{where} is not {what}: {error}.") from None


def decode(text: bytes | memoryview, kind: type[T], where: str, what: str) -> T:
    """Parse JSON as `loads` does, and return it as `convert` does."""
    return convert(loads(text, where), kind, where, what)


def read_as(path: Path, decoder: msgspec.json.Decoder[T], what: str) -> T:
    """Read a JSON file with a decoder of a type; the bounds of `loads` hold.

    Raises:
        RunDamaged: It has another type, or is too large or too deep.
        OSError: It cannot be read.

    """
    content = read_file(path)
    check_json(content, str(path))
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RunDamaged(f"{path} is not {what}: {error}") from None


def number(value: Any) -> Any:
    """Undo what `plain` does to numbers that are not finite; return everything else as it is."""
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        RunDamaged: The file holds something else.
        OSError: It cannot be read.

    """
    value = loads(read_file(path), str(path))
    if not isinstance(value, dict):
        raise RunDamaged(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def create(path: Path, value: Any, *, indent: int | None = None) -> bool:
    """Write JSON unless the file exists; return whether it was written. Of several processes exactly one succeeds."""
    content = dumps(value, indent)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        _write_and_sync(temporary, "wb", content)
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return _create_without_links(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create_without_links(path: Path, content: bytes) -> bool:
    try:
        _write_and_sync(path, "xb", content)
    except FileExistsError:
        return False
    return True


def _write_and_sync(path: Path, mode: Literal["wb", "xb"], content: bytes) -> None:
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, value: Any, *, indent: int | None = None, sync: bool = True) -> None:
    """Write JSON so that a reader sees the old file or the new one, and never a part."""
    content = dumps(value, indent)
    with replacing(path, sync=sync) as file:
        file.write(content)
