"""A loss of power keeps what was promised, whichever of the writes that were not yet forced to the disk it loses.

Every operation on the disk is noted while a run is written. From that, disks are made as a loss of power may leave
them: of all changes that no `fsync` had forced, each may be there or not, and data may be cut or zero.
`SONDE_POWER_LOSSES` sets how many are tried.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.store.making import HEADER, make_block, make_sites, write_run

from sonde.core import schema
from sonde.errors import SondeError
from sonde.store import RunWriter, layout, open_run, verify

LOSSES = int(os.environ.get("SONDE_POWER_LOSSES", "20"))
SITES = 3
STEPS = 40
MEAN = schema.COLUMNS.index("mean")
_OPERATIONS = ("fsync", "write", "ftruncate", "replace", "rename", "unlink", "link", "mkdir")


@dataclass
class Moment:
    """The disk after one operation: which names there are, what the files hold, and what of that was forced."""

    names: dict[str, int]
    contents: dict[int, bytes | None]
    """By inode; None for a folder."""
    forced_names: dict[str, int]
    forced_contents: dict[int, bytes | None]
    acknowledged: dict[int, int] = field(default_factory=dict)
    """By step: the journal it was written to."""


class Disk:
    """Notes what happens to a folder."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.moments = [Moment({}, {}, {}, {})]
        self._lock = threading.RLock()
        self._read: dict[tuple[int, int, int], bytes] = {}

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note all operations from now on."""
        for name in _OPERATIONS:
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))

    def acknowledge(self, step: int, journal: int) -> None:
        """Note that a step was acknowledged."""
        with self._lock:
            self.moments[-1].acknowledged[step] = journal

    def _noting(self, name: str, call: Any) -> Any:
        def operation(*args: Any, **named: Any) -> Any:
            with self._lock:
                forced = self._forced_by(args[0]) if name == "fsync" else None
                answer = call(*args, **named)
                self._look(forced)
                return answer

        return operation

    def _forced_by(self, fd: int) -> int:
        self._look(None)  # what was created and written until now
        return os.fstat(fd).st_ino

    def _look(self, forced: int | None) -> None:
        before = self.moments[-1]
        names, contents = {}, {**before.contents, self.top.stat().st_ino: None}
        for path in self.top.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                names[path.relative_to(self.top).as_posix()] = found.st_ino
                contents[found.st_ino] = self._content(path, found)
        known = {*before.names.values(), *before.forced_names.values()}  # the number of a deleted file is used again
        forced_names = dict(before.forced_names)
        forced_contents = {inode: content for inode, content in before.forced_contents.items() if inode in known}
        if forced is not None and contents.get(forced, b"") is not None:
            forced_contents[forced] = contents.get(forced, b"")
        elif forced is not None:
            folder = next((name for name, inode in names.items() if inode == forced), "")
            _replace_inside(forced_names, names, folder)
        if (names, contents, forced) != (before.names, before.contents, None):
            self.moments.append(Moment(names, contents, forced_names, forced_contents, dict(before.acknowledged)))

    def _content(self, path: Path, found: os.stat_result) -> bytes | None:
        if stat.S_ISDIR(found.st_mode):
            return None
        key = (found.st_ino, found.st_mtime_ns, found.st_size)
        if key not in self._read:
            self._read[key] = path.read_bytes()
        return self._read[key]


def _replace_inside(forced: dict[str, int], names: dict[str, int], folder: str) -> None:
    """Force the names in a folder to the disk."""
    for name in {each for each in (*forced, *names) if each.rpartition("/")[0] == folder}:
        forced.pop(name, None)
        if name in names:
            forced[name] = names[name]


def lose_power(moment: Moment, target: Path, chance: random.Random) -> None:
    """Make a folder as a loss of power may leave it."""
    survives = chance.choice([0.0, 0.3, 0.7, 1.0])
    names = {}
    for name in sorted({*moment.names, *moment.forced_names}):
        before, after = moment.forced_names.get(name), moment.names.get(name)
        inode = after if chance.random() < survives else before
        if inode is not None:
            names[name] = inode
    target.mkdir(parents=True)
    for name, inode in names.items():
        path = target / name
        if not path.parent.is_dir():
            continue  # its folder was lost
        if moment.contents[inode] is None:
            path.mkdir()
        else:
            path.write_bytes(_remains(moment, inode, chance))


def _remains(moment: Moment, inode: int, chance: random.Random) -> bytes:
    forced, now = moment.forced_contents.get(inode) or b"", moment.contents[inode] or b""
    if not now.startswith(forced):  # it was cut since
        return chance.choice([forced, now])
    cut = chance.randint(len(forced), len(now))
    zeros = bytes(len(now) - cut)
    return chance.choice([forced, now, now[:cut], now[:cut] + zeros])


@pytest.fixture(scope="module", params=["never", "always"])
def history(request, tmp_path_factory):
    """Write a run with several journals and a second attempt, and return what happened to the disk."""
    top = tmp_path_factory.mktemp("disk")
    disk = Disk(top)
    with pytest.MonkeyPatch.context() as patch:
        disk.patch(patch)
        for attempt in range(2):
            writer = RunWriter(top / "run", HEADER, resume=bool(attempt), journal_bytes=1 << 12, sync=request.param)
            writer.take_sites([] if attempt else make_sites(SITES))
            for step in range(attempt * STEPS, (attempt + 1) * STEPS):
                writer.take_block(make_block(step, SITES))
                disk.acknowledge(step, writer._number)
            writer.close()
    return request.param, disk.moments


def promised(moment: Moment, sync: str) -> set[int]:
    """Return the steps that must survive: all that were acknowledged, or those whose journals were sealed."""
    if sync == "always":
        return set(moment.acknowledged)
    folder = layout.rank_folder(Path("run"), 0).as_posix()
    return {
        step
        for step, journal in moment.acknowledged.items()
        if f"{folder}/{layout.journal_name(journal)}" not in moment.names
    }


def test_a_loss_of_power_keeps_what_was_promised_and_invents_nothing(history, tmp_path):
    sync, moments = history
    chance = random.Random(sync)
    for number in range(LOSSES // 2):
        moment = chance.choice(moments)
        disk = tmp_path / str(number)
        lose_power(moment, disk, chance)
        wanted = promised(moment, sync)
        check(disk / "run", wanted)
        if wanted:
            last = max(open_run(disk / "run").steps)
            write_run(disk / "run", range(last + 1, last + 4), SITES, resume=True)
            check(disk / "run", wanted | set(range(last + 1, last + 4)))
        shutil.rmtree(disk)


def check(run: Path, wanted: set[int]) -> None:
    """Compare what is read with what was written."""
    try:
        opened = open_run(run)
    except (SondeError, FileNotFoundError):
        assert not wanted, "the run cannot be opened"
        return
    assert wanted <= set(opened.steps.tolist())
    for site in opened.sites:
        series = opened.series(site, "mean")
        expected = [make_block(step, SITES).rows[site.id][MEAN] for step in series.steps.tolist()]
        np.testing.assert_array_equal(series.values, expected)
        assert wanted <= set(series.steps.tolist())
    verify(run)
