"""One datapoint as a record: what its outputs were, where their tensors lie, and previews of them.

The payload of a record, all little-endian, framed like every record of a journal:

    key u32 | text u32 | previews u32 | 0 u32 | key | text | previews | zeros up to a multiple of 8

The first four are lengths. `key` is the datapoint as JSON; `text` is a JSON object; `previews` are the lengths of the
previews (u16 each, one a tensor), then the previews.
"""

from __future__ import annotations

import json
import math
import operator
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from sonde.core import files
from sonde.core.files import Natural
from sonde.errors import OptionError, RunDamaged
from sonde.store import framing, sealed
from sonde.store.framing import Record
from sonde.store.pages import dtypes, nodes, preview

FORMAT: Final = sealed.Format("sonde-page", "page of captures", 1, files.MAX_BYTES)
ALIGN: Final = 8
MAX_TEXT: Final = 16 << 20  # of one datapoint; what is longer is replaced by a placeholder
MAX_DIMENSIONS: Final = 64

_LENGTHS: Final = struct.Struct("<IIII")

Datapoint = int | str


class Kind(IntEnum):
    """What a record of a page's journal holds."""

    PAGE = 16
    DATAPOINT = 17
    END = 18


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """A tensor as it is stored."""

    label: str
    dtype: Any
    shape: tuple[int, ...]
    origin: str
    content: memoryview
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A datapoint that is ready to be written; only the places of its tensors are open."""

    datapoint: Datapoint
    time: float
    outputs: str
    """JSON."""
    info: str
    blobs: list[Blob]
    previews: list[bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(blob.content) for blob in self.blobs)


def check_datapoint(datapoint: object) -> Datapoint:
    """Return a datapoint's id as it is stored: an int or a str.

    Raises:
        OptionError: It is neither.

    """
    if isinstance(datapoint, str):
        return str(datapoint)
    try:
        number = operator.index(datapoint)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(datapoint, bool):
        raise OptionError(f"A datapoint is known by an int or a str; got {datapoint!r:.80}.")
    if not -(2**63) <= number < 2**63:
        raise OptionError(f"A datapoint's number has 64 bits; {hex(number):.80} has more. Use a str.")
    return number


BATCH: Final = "batch"
"""What `info` calls the samples of the batch that some outputs were computed over."""


def make(datapoint: object, outputs: Mapping[str, object], info: Mapping[str, object] | None, time: float) -> Draft:
    """Turn the outputs of a datapoint into what is stored of them."""
    key = check_datapoint(datapoint)
    encoder = nodes.Encoder()
    texts = {str(name): _encode(encoder, value, (str(name),)) for name, value in outputs.items()}
    content = ",".join(f"{json.dumps(name)}:{text}" for name, text in texts.items())
    noted = {**(info or {}), BATCH: list(encoder.batch)} if encoder.batch else dict(info or {})
    about = _encode(encoder, noted, ("info",))
    arrays = [dtypes.to_little(leaf.array) for leaf in encoder.leaves]
    blobs = [_blob(key, leaf, array) for leaf, array in zip(encoder.leaves, arrays, strict=True)]
    bare = (nodes.BYTES, nodes.TEXT)
    previews = [
        b"" if leaf.origin in bare else preview.pack(preview.measure(array))
        for leaf, array in zip(encoder.leaves, arrays, strict=True)
    ]
    return Draft(key, time, f"{{{content}}}", about, blobs, previews)


def _encode(encoder: nodes.Encoder, value: object, path: nodes.Path) -> str:
    before = len(encoder.leaves)
    text = sealed.compact(encoder.encode(value, path))
    if len(text) > MAX_TEXT // 4:
        del encoder.leaves[before:]
        words = f"{len(text):,} bytes of structure; at most {MAX_TEXT // 4:,} are stored"
        text = json.dumps({"unsupported": nodes.Unsupported.of(value, words)})
    return text


def _blob(key: Datapoint, leaf: nodes.Leaf, array: Any) -> Blob:
    content = sealed.raw(array)
    label = "/".join(nodes.escape_key(part) for part in (key, *leaf.path))
    return Blob(
        label=label,
        dtype=dtypes.describe(leaf.array.dtype),
        shape=array.shape,
        origin=leaf.origin,
        content=content,
        crc=zlib.crc32(content),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a tensor lies in its page, and what it is."""

    name: str
    dtype: dtypes.Dtype
    described: Any
    shape: tuple[int, ...]
    start: int
    nbytes: int
    crc: int
    origin: str

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A datapoint as it was read back; its tensors are still in the page."""

    datapoint: Datapoint
    time: float
    outputs: dict[str, Any]
    """Nodes, by debugger."""
    info: Any
    places: list[Place]
    text: str
    previews: list[memoryview] | None
    """None if they were lost."""


def key_text(datapoint: Datapoint) -> bytes:
    """Return a datapoint's id as JSON."""
    return json.dumps(datapoint).encode()


def encode_page(described: dict[str, Any]) -> bytes:
    """Return the first record of a page's journal."""
    # Framed like the records of telemetry, under kinds of their own.
    return framing.encode_json(Kind.PAGE, 0, described)


class _Start(msgspec.Struct):
    """The first record of a page's journal."""

    format: str
    schema_version: Any
    reserved: Annotated[int, msgspec.Meta(ge=8, le=8 + FORMAT.max_header_bytes)]


def read_start(payload: memoryview, where: str) -> int:
    """Read the first record of a page's journal and return where tensors begin.

    Raises:
        RunDamaged: Its content has another form.

    """
    start = files.decode(payload, _Start, where, f"the start of a {FORMAT.what}")
    if start.format != FORMAT.name:
        raise RunDamaged(f"{where} is not a {FORMAT.what}.")
    FORMAT.check_version(start.schema_version, where)
    return start.reserved


def encode_end(sequence: int, table: list[tuple[Datapoint, int]], offset: int) -> bytes:
    """Return the last record of a journal: where the record of each datapoint begins, and at the very end its own."""
    text = files.dumps(table)
    padded = text + b" " * (-len(text) % ALIGN)
    return framing.encode(Kind.END, 0, sequence, [padded, offset.to_bytes(8, "little")])


def read_end(payload: memoryview, where: str) -> list[tuple[Datapoint, int]]:
    """Undo `encode_end`.

    Raises:
        RunDamaged: Its content has another form.

    """
    return files.decode(payload[:-8], list[tuple[int | str, Natural]], where, "a table of datapoints")


def encode(sequence: int, key: bytes, text: bytes, previews: list[bytes]) -> bytes:
    """Return the record of a datapoint."""
    lengths = np.array([len(each) for each in previews], "<u2").tobytes()
    packed = b"".join([lengths, *previews])
    fixed = _LENGTHS.pack(len(key), len(text), len(packed), 0)
    return framing.encode(Kind.DATAPOINT, 0, sequence, [fixed, key, text, packed])


def read_key(record: Record, where: str) -> Datapoint:
    """Return the datapoint of a record.

    Raises:
        RunDamaged: It names none.

    """
    key, _, _ = _split(record.payload, where)
    return files.convert(files.loads(key, where), Datapoint, where, "the name of a datapoint")  # type: ignore[arg-type]


def decode(payload: memoryview, where: str) -> Entry:
    """Read a datapoint's record.

    Raises:
        RunDamaged: Its content has another form.

    """
    _, text, packed = _split(payload, where)
    plain = files.loads(text, where)
    entry = parse(plain, bytes(text).decode(), where)
    previews = list(_unpack_previews(packed, len(entry.places), where))
    return Entry(entry.datapoint, entry.time, entry.outputs, entry.info, entry.places, entry.text, previews)


def _split(payload: memoryview, where: str) -> tuple[memoryview, memoryview, memoryview]:
    if len(payload) >= _LENGTHS.size:
        key, text, previews, _ = _LENGTHS.unpack_from(payload)
        ends = list(accumulate((key, text, previews), initial=_LENGTHS.size))
        if ends[-1] <= len(payload) < ends[-1] + ALIGN:
            first, second, third = (payload[start:end] for start, end in pairwise(ends))
            return first, second, third
    raise RunDamaged(f"{where}: a record whose lengths do not fit it.")


def _unpack_previews(packed: memoryview, count: int, where: str) -> Iterator[memoryview]:
    if len(packed) >= 2 * count:
        lengths = np.frombuffer(packed, "<u2", count).tolist()
        ends = list(accumulate(lengths, initial=2 * count))
        if ends[-1] == len(packed):
            return (packed[start:end] for start, end in pairwise(ends))
    raise RunDamaged(f"{where}: previews whose lengths do not fit.")


class _StoredPlace(msgspec.Struct, array_like=True):
    """Where a tensor lies, as a record lists it."""

    name: str
    dtype: Any
    shape: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    start: Natural
    nbytes: Natural
    crc: Natural
    origin: str


class _StoredEntry(msgspec.Struct):
    """A datapoint, as a record describes it."""

    datapoint: Datapoint
    time: float
    outputs: dict[str, Any]
    tensors: list[_StoredPlace]
    info: Any = None


def parse(plain: Any, text: str, where: str) -> Entry:
    """Read a datapoint's JSON.

    Raises:
        RunDamaged: Its content has another form.

    """
    stored = files.convert(plain, _StoredEntry, where, "the description of a datapoint")
    places = [_place(each, where) for each in stored.tensors]
    return Entry(stored.datapoint, stored.time, stored.outputs, stored.info, places, text, None)


def _place(stored: _StoredPlace, where: str) -> Place:
    dtype = dtypes.parse(stored.dtype)
    if dtype is None or math.prod(stored.shape) * dtype.itemsize != stored.nbytes:
        described = f"of shape {stored.shape!r:.80} and type {stored.dtype!r:.80} in {stored.nbytes} bytes"
        raise RunDamaged(f"{where}: it describes a tensor {described}, which cannot be.")
    return Place(stored.name, dtype, stored.dtype, stored.shape, stored.start, stored.nbytes, stored.crc, stored.origin)


def render(draft: Draft, names: list[str], starts: list[int]) -> str:
    """Return a datapoint's JSON, now that the places of its tensors are known."""
    table = [
        [name, blob.dtype, list(blob.shape), start, len(blob.content), blob.crc, blob.origin]
        for name, blob, start in zip(names, draft.blobs, starts, strict=True)
    ]
    tensors = sealed.compact(table)
    key = json.dumps(draft.datapoint)
    time = json.dumps(float(draft.time), allow_nan=False)
    return f'{{"datapoint":{key},"time":{time},"outputs":{draft.outputs},"info":{draft.info},"tensors":{tensors}}}'
