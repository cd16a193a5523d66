"""What a damaged run still says: values that differ from those that were written, and damage that `verify` misses."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.reading import Failure

from sonde.errors import SondeError
from sonde.store import layout, load_debug_outputs, open_run, verify
from sonde.store.series import ALL_COLUMNS

RANKS = (0, 1)
REPLACED_ALL_THE_TIME = ("beat.json", "stacks.txt", "collectives.json", "steps.bin", "fingerprints.bin")
CHECKED = (".safetensors", ".index", layout.EVENTS, layout.FINDINGS)
"""Ends of the names of files of which every byte has a checksum, once a run has ended."""


@dataclass(frozen=True)
class Values:
    """The numbers of a run."""

    rows: dict[tuple[int, str, int], bytes]
    """By rank, site and step."""
    captures: dict[str, str]
    """By sample."""


def values_of(run: Path) -> Values:
    """Read all numbers of a run that can be read."""
    rows, captures = {}, {}
    for rank in RANKS:  # apart: what both measured is merged, and the rest is right if one of them cannot be read
        with contextlib.suppress(SondeError, OSError):
            opened = open_run(run, rank=rank)
            for site, found in zip(opened.sites, opened.stored_many(opened.sites, ALL_COLUMNS), strict=True):
                steps = zip(found.step.tolist(), found.rows, strict=True)
                rows.update(((rank, site.key, step), row.tobytes()) for step, row in steps)
    with contextlib.suppress(SondeError, OSError):
        outputs = load_debug_outputs(run / "epoch_0" / layout.CAPTURES)
        for each in outputs:
            with contextlib.suppress(SondeError, OSError):
                captures[repr(each)] = repr(outputs[each])
    return Values(rows, captures)


def unnoticed(run: Path, name: str, before: bytes, known: Values, *, is_finished: bool) -> list[Failure]:
    """Return what a run with one damaged file says that was never written, and whether `verify` misses the damage."""
    now = values_of(run)
    rows = [key for key, value in now.rows.items() if known.rows.get(key) != value]
    captures = [key for key, value in now.captures.items() if known.captures.get(key) != value]
    found = [Failure("values", f"{key} is not what was written") for key in rows[:1]]
    found += [Failure("captures", f"sample {key} is not what was written") for key in captures[:1]]
    if is_finished and _must_be_noticed(run / name, name, before):
        try:
            is_ok = verify(run).ok
        except (SondeError, OSError):
            is_ok = False
        if is_ok:
            found.append(Failure("verify", f"misses that {name} is damaged"))
    return found


def _must_be_noticed(path: Path, name: str, before: bytes) -> bool:
    if name.endswith(REPLACED_ALL_THE_TIME):
        return not path.exists()
    after = path.read_bytes() if path.exists() else b""
    if not after:
        return bool(before)
    grows = name.endswith((layout.EVENTS, layout.FINDINGS)) and after.startswith(before)
    return after != before and name.endswith(CHECKED) and not grows
