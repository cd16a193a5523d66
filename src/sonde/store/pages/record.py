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
from typing import Any, Final, cast

import numpy as np

from sonde import strict_json
from sonde.errors import OptionError, RunDamaged
from sonde.store import framing
from sonde.store.framing import Record
from sonde.store.pages import dtypes, nodes, preview

FORMAT: Final = "sonde-page"
VERSION: Final = 1
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
    text = json.dumps(encoder.encode(value, path), allow_nan=False, separators=(",", ":"))
    if len(text) > MAX_TEXT // 4:
        del encoder.leaves[before:]
        words = f"{len(text):,} bytes of structure; at most {MAX_TEXT // 4:,} are stored"
        text = json.dumps({"unsupported": nodes.Unsupported.of(value, words)})
    return text


def _blob(key: Datapoint, leaf: nodes.Leaf, array: Any) -> Blob:
    content = dtypes.raw(array)
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


def encode_end(sequence: int, table: list[tuple[Datapoint, int]], offset: int) -> bytes:
    """Return the last record of a journal: where the record of each datapoint begins, and at the very end its own."""
    text = strict_json.dumps(table)
    padded = text + b" " * (-len(text) % ALIGN)
    return framing.encode(Kind.END, 0, sequence, [padded, offset.to_bytes(8, "little")])


def read_end(payload: memoryview, where: str) -> list[tuple[Datapoint, int]]:
    """Undo `encode_end`.

    Raises:
        RunDamaged: It makes no sense.

    """
    table = strict_json.loads(payload[:-8], where)
    good = isinstance(table, list) and all(isinstance(each, list) and len(each) == 2 for each in table)
    if not good or not all(type(key) in (int, str) and type(at) is int and at >= 0 for key, at in table):
        raise RunDamaged(f"{where}: no table of datapoints.")
    return [(key, at) for key, at in table]


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
    found = strict_json.loads(key, where)
    if type(found) not in (int, str):
        raise RunDamaged(f"{where}: a datapoint called {found!r:.80}.")
    return cast("Datapoint", found)


def decode(payload: memoryview, where: str) -> Entry:
    """Read a datapoint's record.

    Raises:
        RunDamaged: It makes no sense.

    """
    _, text, packed = _split(payload, where)
    plain = strict_json.loads(text, where)
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


def parse(plain: Any, text: str, where: str) -> Entry:
    """Read a datapoint's JSON.

    Raises:
        RunDamaged: It makes no sense.

    """
    try:
        datapoint, time, outputs = plain["datapoint"], plain["time"], plain["outputs"]
        listed = plain["tensors"]
        good = type(datapoint) in (int, str) and type(time) in (int, float) and isinstance(outputs, dict)
        places = [parse_place(each) for each in listed] if good else []
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunDamaged(f"{where}: no description of a datapoint: {type(error).__name__}: {error}") from None
    if not good:
        raise RunDamaged(f"{where}: no description of a datapoint.")
    return Entry(datapoint, float(time), outputs, plain.get("info"), places, text, None)


def parse_place(listed: Any) -> Place:
    """Read where a tensor lies.

    Raises:
        ValueError: It makes no sense.

    """
    name, described, shape, start, nbytes, crc, origin = listed
    dtype = dtypes.parse(described)
    numbers = (*shape, start, nbytes, crc)
    sane = all(type(number) is int and 0 <= number < 2**63 for number in numbers) and len(shape) <= MAX_DIMENSIONS
    if dtype is None or not sane or not isinstance(name, str) or not isinstance(origin, str):
        raise ValueError(f"a tensor described as {listed!r:.150}")
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"a tensor of shape {shape!r:.80} and type {described!r:.80} in {nbytes} bytes")
    return Place(name, dtype, described, tuple(shape), start, nbytes, crc, origin)


def render(draft: Draft, names: list[str], starts: list[int]) -> str:
    """Return a datapoint's JSON, now that the places of its tensors are known."""
    table = [
        [name, blob.dtype, list(blob.shape), start, len(blob.content), blob.crc, blob.origin]
        for name, blob, start in zip(names, draft.blobs, starts, strict=True)
    ]
    tensors = json.dumps(table, allow_nan=False, separators=(",", ":"))
    key = json.dumps(draft.datapoint)
    time = json.dumps(float(draft.time), allow_nan=False)
    return f'{{"datapoint":{key},"time":{time},"outputs":{draft.outputs},"info":{draft.info},"tensors":{tensors}}}'
