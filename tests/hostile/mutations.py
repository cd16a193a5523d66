"""Damage of every kind to bytes: flipped, cut, inserted, repeated, removed, and JSON with other values in it."""

from __future__ import annotations

import json
import random
from typing import Any

NASTY = [
    "\x1b]0;owned\x07\x1b[31m",
    "\u202egpj.exe\u2069",
    "\x9b31m\x85\x00\r\n\x08",
    "[/red][link=file:///etc/passwd]x[/link]",
    "<img src=x onerror=alert(1)>",
    "</script><b>]]>--><script>alert(1)</script>",
    "[x](javascript:alert(1)) `$(id)` $'{{7*7}}",
    "=cmd|' /C calc'!A0",
    "x\n::error file=a,title=b::owned\n\u2028\x0b::set-output name=a::b",
    "../../../../etc/passwd",
    "a" * 100_000,
    "\ud800",
    "%s{0}{x!r}",
]
ODD_NUMBERS = [10**400, -(10**30), 2**63, -1, 0, 1e308, -0.0, 5e-324, 2**53 + 1]


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Return damaged bytes."""
    kinds = [_flip, _cut, _insert, _repeat, _remove, _overwrite]
    if content[:1] in (b"{", b"["):
        kinds += [_other_json] * 6
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        content = chance.choice(kinds)(content, chance)
    return content


def _flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 30]) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def _insert(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    new = chance.choice([bytes(8), b"\xff" * 8, chance.randbytes(chance.randrange(1, 200)), b"NaN", b"{}", b"\n"])
    return content[:at] + new + content[at:]


def _piece(content: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content) + 1)
    return start, min(len(content), start + chance.choice([1, 8, 40, 500]))


def _repeat(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    return content[:end] + content[start:end] + content[end:]


def _remove(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    return content[:start] + content[end:]


def _overwrite(content: bytes, chance: random.Random) -> bytes:
    start, end = _piece(content, chance)
    filling = chance.choice([b"\0", b"\xff", b"9", b"[", b'"'])
    return content[:start] + filling * (end - start) + content[end:]


def _other_json(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    at = chance.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except ValueError:
        return content
    lines[at] = json.dumps(replaced(value, chance)).encode()
    return b"\n".join(lines)


def replaced(value: Any, chance: random.Random) -> Any:
    """Return nested JSON with one part replaced, left out or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        if chance.random() < 0.05:
            return {**value, nasty(chance): value[key]}
        return value | {key: replaced(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        if chance.random() < 0.15:
            return value[:at] + value[at + 1 :]
        return [*value[:at], replaced(value[at], chance), *value[at + 1 :]]
    return odd_value(value, chance)


def nasty(chance: random.Random) -> str:
    """Return a text that should never reach a terminal or a file system as it is."""
    return chance.choice(NASTY)


def odd_value(value: Any, chance: random.Random) -> Any:
    """Return something else in place of a value, often of the same type."""
    if isinstance(value, str) and chance.random() < 0.7:
        return nasty(chance)
    if isinstance(value, int | float) and chance.random() < 0.7:
        return chance.choice(ODD_NUMBERS)
    deep: Any = 1
    for _ in range(chance.choice([50, 500])):
        deep = [deep]
    return chance.choice([None, True, [], {}, "", 0, deep if chance.random() < 0.2 else [[]], {"a": {"b": [1]}}, "x"])


def resealed(content: bytes, chance: random.Random) -> bytes:
    """Return a sealed file or a journal with other values whose checksums are right: what a stranger would write."""
    from sonde.store import framing

    if content[:4] == framing.MAGIC:
        return _other_records(content, chance)
    length = int.from_bytes(content[:8], "little")
    if not 0 < length <= len(content) - 8 or content[8:9] != b"{":
        return mutate(content, chance)
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if metadata and chance.random() < 0.8:
        key = chance.choice([each for each in metadata if each != "check"] or [""])
        metadata[key] = _other_text(metadata.get(key, ""), chance)
    else:
        header = replaced(header, chance)
    return _with_header(header, content[8 + length :])


def _other_text(text: str, chance: random.Random) -> Any:
    try:
        return json.dumps(replaced(json.loads(text), chance))
    except ValueError:
        return chance.choice([nasty(chance), "", "9" * 400, 7])


def _with_header(header: Any, data: bytes) -> bytes:
    from zlib import crc32

    if not isinstance(header, dict):
        header = {"__metadata__": header}
    metadata = header.pop("__metadata__", {})
    if isinstance(metadata, dict):
        metadata = {"check": "00000000", **{key: value for key, value in metadata.items() if key != "check"}}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(b'{"__metadata__":{"check":"')
    text = text[:start] + f"{crc32(text):08x}".encode() + text[start + 8 :]
    return len(text).to_bytes(8, "little") + text + data


def _other_records(content: bytes, chance: random.Random) -> bytes:
    from sonde.store import framing

    records = [item for item in framing.scan(content) if isinstance(item, framing.Record)]
    if not records:
        return mutate(content, chance)
    at = chance.randrange(len(records))
    out = []
    for number, item in enumerate(records):
        payload, kind, step, sequence = bytes(item.payload), item.kind, item.step, item.sequence
        if number == at:
            payload = mutate(payload, chance)
            payload += b" " * (-len(payload) % 8)
            if chance.random() < 0.2:
                kind, step = chance.choice([0, 1, 2, 3, 4, 9]), chance.choice([-1, 2**63 - 1, step])
        out.append(framing.encode(kind, step, sequence, [payload]))
    return b"".join(out)
