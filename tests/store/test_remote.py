"""Runs in an object store, over fsspec's file systems of this machine; `test_remote_s3.py` has a server."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.store.making import HEADER, make_block, make_sites, write_run
from typer.testing import CliRunner

from sonde.cli.main import app
from sonde.errors import OptionError, RunExists, RunNotFound
from sonde.store import RunWriter, list_runs, open_run, verify
from sonde.store.remote import address, mirror, spool
from sonde.store.remote.address import ObjectStore, Piece, Stored, assemble, part_name
from sonde.store.remote.carrier import Carrier, Pace, read_state
from sonde.store.remote.follow import FOLDER, PROGRESS, Follower, clear_spools

pytest.importorskip("fsspec")


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://{uuid.uuid4().hex}/runs/first")


@pytest.fixture(autouse=True)
def _listings_are_never_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(mirror, "_FRESH_S", -1.0)
    monkeypatch.setenv("SONDE_SPOOL", str(tmp_path / "spool"))
    yield
    mirror.close()


class FailingStore(ObjectStore):
    """A store whose next operations fail once `allowed` have succeeded."""

    def __init__(self, where: str, allowed: int) -> None:
        super().__init__(where)
        self.allowed = allowed

    def _count(self) -> None:
        self.allowed -= 1
        if self.allowed < 0:
            raise OSError("the store does not answer")

    def put(self, name: str, content: bytes) -> None:
        self._count()
        super().put(name, content)

    def put_file(self, name: str, path: Path) -> None:
        self._count()
        super().put_file(name, path)

    def delete(self, name: str) -> None:
        self._count()
        super().delete(name)


def assert_same_run(path: Path, where: str) -> None:
    local, remote = open_run(path), open_run(where)
    assert remote.steps.tolist() == local.steps.tolist()
    assert [site.key for site in remote.sites] == [site.key for site in local.sites]
    assert remote.problems == local.problems == []
    for site in local.sites:
        for stat in ("norm", "abs_p50"):
            np.testing.assert_array_equal(remote.series(site.key, stat).values, local.series(site.key, stat).values)


def test_a_run_is_carried_while_it_is_written_and_is_plain_files_at_the_end(tmp_path, store):
    writer = RunWriter(tmp_path / "run", HEADER, journal_bytes=1 << 13)
    writer.take_sites(make_sites(3))
    carrier = Carrier(tmp_path / "run", store)
    for step in range(1, 61):
        writer.take_block(make_block(step))
        if step % 7 == 0:
            carrier.carry()
            assert open_run(store.address).steps[-1] == step
    assert any(name.startswith(".parts/") for name in store.objects())
    writer.close()
    while carrier.carry(settle=True):
        pass
    files = {p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert set(store.objects()) == {name for name in files if not name.startswith(FOLDER)}
    assert_same_run(tmp_path / "run", store.address)
    assert verify(store.address).ok


def test_a_store_that_fails_after_any_operation_loses_nothing_that_was_up(tmp_path, store):
    writer = RunWriter(tmp_path / "run", HEADER, journal_bytes=1 << 13)
    writer.take_sites(make_sites(2))
    step = up = 0
    for allowed in [*range(12), 1000]:
        for _ in range(4):
            step += 1
            writer.take_block(make_block(step, 2))
        if allowed == 1000:
            writer.close()
        # A new carrier each time: the one before was killed.
        failing = Carrier(tmp_path / "run", FailingStore(store.address, allowed))
        with contextlib.suppress(OSError):
            while failing.carry(settle=allowed == 1000):
                pass
            up = step
        if up:
            assert set(range(1, up + 1)) <= set(open_run(store.address).steps.tolist())
    assert up == step
    assert_same_run(tmp_path / "run", store.address)


def test_a_tail_that_a_crash_tore_off_is_replaced_in_the_store(tmp_path, store):
    path = tmp_path / "run"
    writer = RunWriter(path, HEADER)
    writer.take_sites(make_sites(1))
    writer.take_block(make_block(1, 1))
    journal = path / "telemetry/r00000/journal-000000.bin"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b"a torn record")
    Carrier(path, store).carry()
    journal.write_bytes(whole + b"something else")
    Carrier(path, store).carry()
    pieces = assemble(store.objects())["telemetry/r00000/journal-000000.bin"]
    assert b"".join(store.get(piece.name) for piece in pieces) == whole + b"something else"


def test_one_series_of_a_large_run_is_read_without_copying_the_rest(tmp_path, store):
    write_run(tmp_path / "run", range(1, 401), num_sites=60)
    while Carrier(tmp_path / "run", store).carry(settle=True):
        pass
    run = open_run(store.address)
    np.testing.assert_array_equal(
        run.series("layer7.weight:gradient", "norm").values,
        open_run(tmp_path / "run").series("layer7.weight:gradient", "norm").values,
    )
    total = sum(stored.size for stored in store.objects().values())
    fetched = mirror._runs[run.path].fetched
    assert total > 3e6
    assert fetched < total / 2, (fetched, total)
    assert_same_run(tmp_path / "run", store.address)


def test_another_run_at_the_address_is_not_overwritten(tmp_path, store):
    write_run(tmp_path / "one", range(1, 4))
    Carrier(tmp_path / "one", store).carry(settle=True)
    write_run(tmp_path / "two", range(1, 9))
    header = json.loads((tmp_path / "two/run.json").read_text())
    (tmp_path / "two/run.json").write_text(json.dumps({**header, "created": 1.0}))
    with pytest.raises(RunExists, match="another run"):
        Carrier(tmp_path / "two", store).carry()
    assert open_run(store.address).steps[-1] == 3


def test_the_runs_below_an_address_are_listed_and_named_by_it(tmp_path, store):
    root = store.address.rpartition("/")[0]
    for name in ("a", "deep/b"):
        write_run(tmp_path / name, range(1, 6))
        Carrier(tmp_path / name, ObjectStore(f"{root}/{name}")).carry(settle=True)
    found = list_runs(root)
    assert {run.address for run in found} == {f"{root}/a", f"{root}/deep/b"}
    assert {run.steps for run in found} == {5}
    answer = CliRunner().invoke(app, ["runs", root, "--json"])
    assert {run["path"] for run in json.loads(answer.stdout)["runs"]} == {f"{root}/a", f"{root}/deep/b"}
    assert f"{root}/a" in CliRunner().invoke(app, ["show", f"{root}/a", "--json"]).stdout
    with pytest.raises(RunNotFound, match=f"{root}/c"):
        open_run(f"{root}/c")


def test_a_run_whose_spool_is_lost_is_resumed_from_the_store(tmp_path):
    where = f"file://{tmp_path}/bucket/run"
    place = spool.local_place(where, resume=False, is_first=True)
    write_run(Path(place), range(1, 6))
    assert spool.push(Path(place)).is_complete
    with pytest.raises(RunExists, match=where):
        spool.local_place(where, resume=False, is_first=True)
    shutil.rmtree(place)
    with pytest.raises(RunExists, match=where):
        spool.local_place(where, resume=False, is_first=True)
    assert spool.local_place(where, resume=True, is_first=True) == place
    before = {name: note.end for name, note in read_state(Path(place)).files.items()}
    assert before["run.json"] == (Path(place) / "run.json").stat().st_size
    write_run(Path(place), range(6, 9), resume=True)
    assert CliRunner().invoke(app, ["push", str(place)]).exit_code == 0
    assert open_run(where).steps.tolist() == list(range(1, 9))


def test_the_store_counts_the_numbers_of_a_star(tmp_path):
    (tmp_path / "bucket/run-7").mkdir(parents=True)
    pattern = spool.local_place(f"file://{tmp_path}/bucket/run-*", resume=False, is_first=True)
    from sonde.store.runs import place_of

    assert place_of(pattern).name == "run-8"


def test_the_pause_grows_while_the_store_fails_and_the_follower_gives_up_in_the_end(tmp_path, store):
    write_run(tmp_path / "run", range(1, 4))
    pauses = []
    follower = Follower(
        Carrier(tmp_path / "run", FailingStore(store.address, 1)), every_s=9.0, linger_s=-1.0, wait=pauses.append
    )
    assert not follower.run()
    follower = Follower(Carrier(tmp_path / "run", FailingStore(store.address, 1)), every_s=9.0, wait=pauses.append)
    follower._carrier.store.allowed = 0
    for _ in range(9):
        follower._pass(settle=True)
        pauses.append(follower._pause(is_live=False))
    assert all(0.5 * 2**n / 2 <= pause <= 2**n / 2 for n, pause in enumerate(pauses[:6], 1))
    assert max(pauses) <= 60
    note = json.loads((tmp_path / "run" / FOLDER / PROGRESS).read_text())
    assert note["left_files"] > 0
    assert "does not answer" in note["error"]


def test_bytes_are_sent_at_the_stated_pace():
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    pace = Pace(1000, sleep=sleep, clock=lambda: now[0])
    for _ in range(10):
        pace.sent(1000)
    assert sum(slept) == pytest.approx(10, abs=1.01)


def test_old_spools_that_are_up_make_room_and_others_stay(tmp_path):
    for number in range(3):
        place = Path(spool.local_place(f"file://{tmp_path}/bucket/{number}", resume=False, is_first=True))
        write_run(place, range(1, 20))
        if number != 1:
            assert spool.push(place).is_complete
    assert clear_spools(1 << 40) == []
    assert {path.name for path in clear_spools(0)} == {"0", "2"}
    assert place.parent.joinpath("1").is_dir()


def test_pieces_that_overlap_make_a_file_up_and_those_after_a_hole_do_not():
    name = "a/journal-000000.bin"
    spans = [(0, 10), (10, 30), (5, 20), (40, 50)]
    objects = {part_name(name, *span): Stored(span[1] - span[0], "") for span in spans}
    assert assemble(objects) == {
        name: [Piece(*span, part_name(name, *span)) for span in spans[:2][:1]]
        + [Piece(5, 20, part_name(name, 5, 20)), Piece(10, 30, part_name(name, 10, 30))]
    }
    assert assemble({name: Stored(30, ""), **objects})[name] == [Piece(0, 30, name)]


@pytest.mark.parametrize("bad", ["s3://", "s3://../x", "nothing"])
def test_what_is_not_an_address_is_refused(bad):
    with pytest.raises(OptionError, match="s3://bucket"):
        address.split(bad)


def test_a_training_is_carried_by_a_process_of_its_own(tmp_path):
    torch = pytest.importorskip("torch")
    import sonde

    where = f"file://{tmp_path}/bucket/run"
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=where, diagnose=False) as session:
        assert session.address == where
        assert session.path.is_relative_to(tmp_path / "spool")
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    deadline = time.monotonic() + 60
    while (
        time.monotonic() < deadline and not (tmp_path / "bucket/run/telemetry/r00000/seg-000000.safetensors").exists()
    ):
        time.sleep(0.05)
    run = sonde.open_run(where)
    assert run.steps[-1] == 5
    assert run.header.environment["spool"] == str(session.path)
