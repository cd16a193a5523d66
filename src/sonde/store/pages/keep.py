"""Decide which captures to keep once the scores are known, and move them to their place."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import OptionError
from sonde.store import sealed
from sonde.store.pages import names
from sonde.store.pages.reader import DebugOutputs
from sonde.store.pages.record import Blob, Datapoint, Draft, Entry
from sonde.store.pages.writer import PageWriter

_MARK = re.compile(r"~\d+$")  # distinguishes tensors of one name
_PART = re.compile(r"(worst|best|control):(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Keep:
    """How many captures stay: the worst by score, the best, and a control drawn from the better half of the others.

    >>> Keep.parse("worst:50")
    Keep(worst=50, best=0, control=5)
    >>> Keep.parse("worst:50+control:20")
    Keep(worst=50, best=0, control=20)
    """

    worst: int = 0
    best: int = 0
    control: int = 0

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Read `worst:50` or `worst:50+best:10+control:5`; the control defaults to a tenth of the others.

        Raises:
            OptionError: It has another form.

        """
        parts = [_PART.fullmatch(part.strip()) for part in text.split("+")]
        counts = {match[1]: int(match[2]) for match in parts if match}
        if len(counts) != len(parts):
            raise OptionError(f"keep={text!r:.80} cannot be read. Write 'worst:50', or 'worst:50+best:10+control:5'.")
        counts.setdefault("control", math.ceil(sum(counts.values()) / 10))
        return cls(**counts)

    def choose(
        self,
        datapoints: Iterable[Datapoint],
        scores: Mapping[Datapoint, float],
        *,
        higher_is_better: bool,
        seed: int,
    ) -> set[Datapoint]:
        """Return the datapoints that stay. A score that is not a number is the worst; what has no score stays."""
        known = sorted(set(datapoints), key=lambda each: (isinstance(each, str), each))
        found = {each: score for each in known if (score := _score(each, scores)) is not None}
        sign = 1.0 if higher_is_better else -1.0
        ranked = sorted(found, key=lambda each: -math.inf if math.isnan(found[each]) else sign * found[each])
        worst = ranked[: self.worst]
        rest = ranked[len(worst) :]
        best = rest[len(rest) - self.best :] if self.best else []
        middle = rest[: len(rest) - len(best)]
        good = middle[len(middle) // 2 :]
        control = random.Random(seed).sample(good, min(self.control, len(good)))
        return {*worst, *best, *control, *(each for each in known if each not in found)}


def _score(datapoint: Datapoint, scores: Mapping[Datapoint, float]) -> float | None:
    # Scores that were read back from JSON have text for keys.
    found = scores.get(datapoint, scores.get(str(datapoint)))
    return None if found is None else float(found)


def copy_datapoints(source: DebugOutputs, target: PageWriter, datapoints: Iterable[Datapoint]) -> int:
    """Copy captures as they are stored, without decoding them; returns how many bytes of tensors that were."""
    before = target.bytes_written
    for datapoint in datapoints:
        entry, read = source.entry(datapoint)
        target.add_draft(_draft(entry, [read(place) for place in entry.places]))
    return target.bytes_written - before


def _draft(entry: Entry, contents: list[memoryview]) -> Draft:
    blobs = [
        Blob(_MARK.sub("", place.name), place.described, place.shape, place.origin, content, place.crc)
        for place, content in zip(entry.places, contents, strict=True)
    ]
    outputs, info = sealed.compact(entry.outputs), sealed.compact(entry.info)
    previews = [bytes(each) for each in entry.previews] if entry.previews is not None else [b""] * len(blobs)
    return Draft(entry.datapoint, entry.time, outputs, info, blobs, previews)


def move_pages(source: Path, target: PageWriter) -> None:
    """Move all sealed pages of a folder to where a writer writes, after its own."""
    for page in names.list_pages(source):
        number = target.take_number()
        # The page first: it can do without its index, and not the other way round.
        for suffix in (names.SEALED, names.INDEX):
            if suffix in page.suffixes:
                shutil.move(
                    names.page_file(source, page.number, suffix), names.page_file(target.folder, number, suffix)
                )
