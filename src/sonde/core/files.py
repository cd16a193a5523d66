"""Read and write small files safely: strict JSON within bounds, and replacement in one step."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar

import msgspec

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
# JSON that any parser reads: no bare NaN, nothing too large or too deep to be taken from a stranger.


MAX_BYTES: Final = 64 << 20

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A whole number that is not negative and fits 64 bits."""
Finite = Annotated[float, msgspec.Meta(gt=-1e300, lt=1e300)]
"""A number that is finite: JSON's own numbers have no limits."""
_NOT_FINITE: Final = ("nan", "inf", "-inf")

T = TypeVar("T")


def plain(value: Any, *, nonfinite: Literal["text", "null"] = "text") -> Any:
    """Return `value` as strict JSON can hold it: dataclasses as objects, arrays as lists, anything unknown as its text.

    Args:
        value: Any value.
        nonfinite: What becomes of numbers that are not finite: `"nan"`, `"inf"` or `"-inf"` as text, or null.

    """
    if value is None or isinstance(value, str | bool | int):
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
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return plain(value.tolist(), nonfinite=nonfinite)
    return str(value)


def dumps(value: Any, indent: int | None = None) -> bytes:
    """Return `value` as strict JSON."""
    separators = (",", ":") if indent is None else None
    return json.dumps(plain(value), allow_nan=False, indent=indent, separators=separators).encode()


def text(value: Any, indent: int | None = None) -> str:
    """Return `value` as strict JSON in which what is not finite is null, and letters stay letters."""
    return json.dumps(plain(value, nonfinite="null"), allow_nan=False, ensure_ascii=False, indent=indent)


def loads(text: bytes | memoryview, where: str) -> Any:
    """Parse JSON from a file that anyone may have written.

    Args:
        text: The bytes.
        where: The file (and the place in it) that an error names.

    Raises:
        RunDamaged: It is not JSON, or too large or too deep.

    """
    if len(text) > MAX_BYTES:
        raise RunDamaged(f"{where} holds {len(text):,} bytes of JSON; at most {MAX_BYTES:,} are read.")
    try:
        return json.loads(bytes(text), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise RunDamaged(f"{where} is not valid JSON: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"the bare word {name}")


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
    except msgspec.ValidationError as error:
        raise RunDamaged(f"{where} is not {what}: {error}.") from None


def decode(text: bytes | memoryview, kind: type[T], where: str, what: str) -> T:
    """Parse JSON as `loads` does, and return it as `convert` does."""
    return convert(loads(text, where), kind, where, what)


def number(value: Any) -> Any:
    """Undo what `plain` does to numbers that are not finite; return everything else as it is."""
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        RunDamaged: The file holds something else.
        OSError: It cannot be read.

    """
    with path.open("rb") as file:
        value = loads(file.read(MAX_BYTES + 1), str(path))
    if not isinstance(value, dict):
        raise RunDamaged(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def write(path: Path, value: Any, *, indent: int | None = None, sync: bool = True) -> None:
    """Write JSON so that a reader sees the old file or the new one, and never a part."""
    content = dumps(value, indent)
    with replacing(path, sync=sync) as file:
        file.write(content)
