"""Addresses of runs in object stores, such as `s3://bucket/runs/first`, and the local folders that hold their copies.

Any file system that fsspec knows can hold runs. Credentials and endpoints come from fsspec's own settings (for S3 the
usual AWS variables and files, or `FSSPEC_S3_ENDPOINT_URL`); none of them is ever written to a run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from sonde.core import files
from sonde.errors import MissingExtra, OptionError

SPOOL_VARIABLE: Final = "SONDE_SPOOL"
PARTS: Final = ".parts"
"""The folder, beside the files of a run in the store, of pieces of files that still grow."""

_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)
_COLLAPSED: Final = re.compile(r"([a-z][a-z0-9+.-]+):/([^/].*)", re.DOTALL)  # what pathlib makes of an address
_LOCAL: Final = ("file", "local")


def as_address(place: str | os.PathLike[str]) -> str | None:
    """Return the address in an object store that a place names; None for a folder of this machine.

    >>> as_address("s3://bucket/runs/x"), as_address("runs/x"), as_address(PurePosixPath("s3://bucket/x"))
    ('s3://bucket/runs/x', None, 's3://bucket/x')
    """
    text = os.fspath(place)
    if found := _ADDRESS.fullmatch(text):
        return f"{found[1]}://{found[2].rstrip('/')}"
    if not isinstance(place, str) and (found := _COLLAPSED.fullmatch(text)):
        return f"{found[1]}://{'/' if found[1] in _LOCAL else ''}{found[2]}"
    return None


def split(address: str) -> tuple[str, PurePosixPath]:
    """Return the scheme of an address, and the rest as a relative path.

    Raises:
        OptionError: It names no place below a bucket.

    """
    found = _ADDRESS.fullmatch(address)
    rest = PurePosixPath(found[2].strip("/")) if found else PurePosixPath()
    if found is None or not rest.parts or ".." in rest.parts:
        raise OptionError(f"{address!r:.200} is not the address of a run; one looks like s3://bucket/runs/first.")
    return found[1], rest


def below(root: Path, address: str) -> Path:
    """Return the folder below `root` for an address."""
    scheme, rest = split(address)
    return root / scheme / rest


def address_below(root: Path, path: Path) -> str | None:
    """Return the address of a folder below `root`; None if it lies elsewhere."""
    try:
        scheme, *rest = path.relative_to(root).parts
    except ValueError:
        return None
    return f"{scheme}://{'/' if scheme in _LOCAL else ''}{'/'.join(rest)}" if rest else None


def spool_root() -> Path:
    """Return the folder in which runs wait to be carried to an object store."""
    chosen = os.environ.get(SPOOL_VARIABLE, "").strip()
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(cache) if cache else Path.home() / ".cache") / "sonde" / "spool"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object: how long it is, and a text that changes with its content."""

    size: int
    version: str


class ObjectStore:
    """The objects below one address.

    Every method raises OSError where the store refuses or does not answer; `FileNotFoundError` means that the object is
    not there. Each file system has errors of its own, which are turned into these here.
    """

    def __init__(self, address: str) -> None:
        scheme, _ = split(address)
        try:
            import fsspec
        except ModuleNotFoundError:
            raise MissingExtra("fsspec", "remote", f"Reaching {scheme}:// addresses") from None
        self.address = address
        # Listings must be new each time: other processes write.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": scheme != "memory"}
        try:
            self._fs, root = fsspec.core.url_to_fs(address, **options)
        except ImportError as error:
            raise MissingExtra(error.name or scheme, "remote", f"Reaching {scheme}:// addresses") from error
        except ValueError as error:
            raise OptionError(f"{address!r:.200} cannot be reached: {error}") from error
        self._root: str = root.rstrip("/")
        self._is_local = scheme in _LOCAL

    def objects(self) -> dict[str, Stored]:
        """Return all objects below the address, by their name there."""
        with _as_os_errors():
            found = self._fs.find(self._root, detail=True)
        named = ((self._name(path), info) for path, info in found.items() if info["type"] == "file")
        return {name: _describe(info) for name, info in named if is_inside(name) and not info.get("islink")}

    def list_level(self) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files directly below the address."""
        try:
            with _as_os_errors():
                found = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        named = [(self._name(info["name"]), info["type"]) for info in found if is_inside(self._name(info["name"]))]
        folders = sorted(name for name, kind in named if kind == "directory")
        return folders, sorted(name for name, kind in named if kind == "file")

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes of an object, or those from `start` to `end`."""
        with _as_os_errors():
            content: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
        return content

    def put(self, name: str, content: bytes) -> None:
        """Write an object in one step."""
        if self._is_local:
            with files.replacing(self._made(name)) as file:
                file.write(content)
        else:
            with _as_os_errors():
                self._fs.pipe_file(self._path(name), content)

    def put_file(self, name: str, path: Path) -> None:
        """Copy a file of this machine to an object."""
        if self._is_local:
            with path.open("rb") as source, files.replacing(self._made(name)) as file:
                while piece := source.read(1 << 20):
                    file.write(piece)
        else:
            with _as_os_errors():
                self._fs.put_file(str(path), self._path(name))

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _made(self, name: str) -> Path:
        path = Path(self._path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _name(self, path: str) -> str:
        return path.rstrip("/")[len(self._root) :].lstrip("/")


def is_inside(name: str) -> bool:
    """Return whether a name leads to a file below the folder that it is put in; a store takes any text as a name.

    >>> is_inside("a/b.json"), is_inside("a/../../b"), is_inside("/etc/passwd"), is_inside("a//b"), is_inside("")
    (True, False, False, False, False)
    """
    return not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _describe(info: dict[str, Any]) -> Stored:
    marks = (info.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created", "ino"))
    return Stored(int(info["size"] or 0), "|".join(str(mark) for mark in marks if mark is not None))


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file's bytes, and the object that holds it."""

    start: int
    end: int
    name: str


def part_name(name: str, start: int, end: int) -> str:
    """Return the name of the object that holds a range of a file that still grows."""
    return f"{PARTS}/{name}/{start:015d}-{end:015d}"


def read_part(name: str) -> tuple[str, Piece] | None:
    """Return the file that an object holds a range of, and which; None for an object that is a whole file."""
    found = re.fullmatch(rf"{re.escape(PARTS)}/(.+)/([0-9]{{15}})-([0-9]{{15}})", name, re.DOTALL)
    return None if found is None else (found[1], Piece(int(found[2]), int(found[3]), name))


def assemble(objects: dict[str, Stored]) -> dict[str, list[Piece]]:
    """Return by file the pieces that make it up, in order; a piece may begin before the one before it ends.

    A file is one object of its own name, or pieces that were added while it grew, or both: the object is its beginning.
    """
    found: dict[str, list[Piece]] = {}
    for name, stored in objects.items():
        part = read_part(name)
        if part is None and not name.startswith("."):
            found.setdefault(name, []).append(Piece(0, stored.size, name))
        elif part is not None and is_inside(part[0]) and part[1].end - part[1].start == stored.size:
            found.setdefault(part[0], []).append(part[1])
    return {name: _cover(pieces) for name, pieces in found.items()}


def _cover(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that cover a file from its first byte as far as possible."""
    chosen: list[Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.start, -piece.end)):
        if piece.start > end:
            break
        if piece.end > end:
            chosen.append(piece)
            end = piece.end
    return chosen
