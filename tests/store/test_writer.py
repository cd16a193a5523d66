"""Opening, continuing and closing runs, and what happens when the disk says no."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.store.making import HEADER, Clock, make_block, make_sites, write_run
from tests.waiting import PATIENCE_S, ask, run_to_end, started, wait_until

from sonde.errors import ClosedError, OptionError, RunDamaged, RunError, RunExists, RunInUse
from sonde.records import Event, Site
from sonde.store import RunWriter, layout, lease, list_runs, open_run, verify


def files(run, rank=0):
    return sorted(path.name for path in layout.rank_folder(run, rank).iterdir())


def test_a_run_is_a_handful_of_plain_files(tmp_path):
    write_run(tmp_path / "run", range(5))
    assert files(tmp_path / "run") == ["contents.json", "seg-000000.safetensors", "writer.json"]
    assert json.loads((tmp_path / "run/run.json").read_text())["format"] == "sonde-run"


def test_a_folder_that_holds_other_things_may_become_a_run(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"mine")
    write_run(tmp_path, range(3))
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"mine"
    assert open_run(tmp_path).steps.tolist() == [0, 1, 2]


def test_a_run_that_exists_is_not_written_over(tmp_path):
    write_run(tmp_path / "run", range(5))
    with pytest.raises(RunExists, match=r"run holds a run already \(4 steps, finished\).*resume=True"):
        RunWriter(tmp_path / "run", HEADER)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("hello")
    with pytest.raises(RunError, match="a file is in the way"):
        RunWriter(tmp_path / "run", HEADER)
    assert (tmp_path / "run").read_text() == "hello"


def test_a_run_json_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "other"}')
    with pytest.raises(RunDamaged, match="not written by Sonde"):
        RunWriter(tmp_path, HEADER)
    assert (tmp_path / "run.json").read_text() == '{"name": "other"}'


def test_two_writers_in_one_process_do_not_share_a_run(tmp_path):
    first = write_run(tmp_path / "run", range(2), close=False)
    with pytest.raises(RunInUse, match=r"a session of this process\. Close it"):
        RunWriter(tmp_path / "run", HEADER, resume=True)
    first.close()


def test_a_run_that_another_process_writes_is_refused(tmp_path):
    code = "import sys; from tests.store.making import *; w = write_run(sys.argv[1], range(3), close=False);"
    code += "print('ready', flush=True); sys.stdin.read(); w.close()"
    with started([sys.executable, "-c", code, tmp_path / "run"]) as child:
        assert ask(child) == "ready\n"
        with pytest.raises(RunInUse, match=f"process {child.pid} on "):
            RunWriter(tmp_path / "run", HEADER, resume=True)
        assert open_run(tmp_path / "run").status == "live"
        child.communicate("", timeout=PATIENCE_S)
    assert child.returncode == 0
    assert open_run(tmp_path / "run").status == "finished"
    write_run(tmp_path / "run", range(3, 5), resume=True)
    assert open_run(tmp_path / "run").steps.tolist() == [0, 1, 2, 3, 4]


def test_continuing_keeps_what_was_there(tmp_path):
    run = tmp_path / "run"
    first = write_run(run, range(5))
    header = (run / "run.json").read_bytes()
    second = RunWriter(run, HEADER, resume=True)
    assert (second.attempt, second.last_step, len(second.sites)) == (1, 4, 3)
    assert second.sites == first.sites == make_sites(3)
    second.take_sites([Site(id=len(second.sites), name="new", quantity="value")])
    second.take_block(make_block(5, 4))
    second.close()
    opened = open_run(run)
    assert opened.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert [site.name for site in opened.sites][-1] == "new"
    assert len(opened.series("layer0.weight", "mean")) == 6
    assert [(a.number, a.start_step) for a in opened.attempts] == [(0, 0), (1, 5)]
    assert [event.event_type for event in opened.events] == ["resumed"]
    assert (run / "run.json").read_bytes() == header
    assert verify(run).ok


@pytest.mark.parametrize("start_step", [None, 3])
def test_a_later_attempt_replaces_what_it_goes_back_over(tmp_path, start_step):
    write_run(tmp_path / "run", range(10))
    second = RunWriter(tmp_path / "run", HEADER, resume=True, start_step=start_step)
    for step in (3, 4):
        second.take_block(make_block(step, seed=99))
    second.close()
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == [0, 1, 2, 3, 4]
    again = [make_block(step, seed=99).rows[0][9] for step in (3, 4)]
    np.testing.assert_array_equal(opened.series("layer0.weight", "mean").values[3:], again)
    assert opened.at(3)[opened.sites[0]].row[9] == again[0]
    assert opened.at(7) == {}
    assert list_runs(tmp_path)[0].steps == 5 if start_step is not None else True


def test_continuing_where_nothing_is_begins(tmp_path):
    write_run(tmp_path / "run", range(2), resume=True)
    assert [a.number for a in open_run(tmp_path / "run").attempts] == [0]


def test_journals_are_sealed_off_the_writing_thread(tmp_path):
    threads = set()

    def note():
        threads.add(threading.current_thread().name)

    writer = write_run(tmp_path / "run", range(0), close=False, journal_bytes=1 << 13)
    seal = writer._sealer._seal
    writer._sealer._seal = lambda: (note(), seal())
    for step in range(60):
        writer.take_block(make_block(step))
    writer.close()
    assert threads == {"sonde-sealer"}
    assert not any(name.startswith("journal") for name in files(tmp_path / "run"))
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == list(range(60))
    assert verify(opened.path).ok


def test_many_small_segments_become_few(tmp_path):
    write_run(tmp_path / "run", range(400), 2, journal_bytes=1 << 12)
    names = [name for name in files(tmp_path / "run") if name.startswith("seg")]
    assert len(names) < 20
    assert any(name.count("-") == 2 for name in names)
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == list(range(400))
    wanted = [make_block(step, 2).rows[1][9] for step in range(400)]
    np.testing.assert_array_equal(opened.series("layer1.weight", "mean").values, wanted)
    assert verify(opened.path).ok


def test_segments_of_many_short_attempts_become_few(tmp_path):
    for attempt in range(20):
        write_run(tmp_path / "run", range(attempt * 2, attempt * 2 + 2), resume=True)
    assert len(files(tmp_path / "run")) < 10
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == list(range(40))
    assert [a.start_step for a in opened.attempts] == list(range(0, 40, 2))


def test_attempts_that_went_back_are_not_put_in_one_segment(tmp_path):
    for attempt in range(10):
        write_run(tmp_path / "run", range(attempt, attempt + 3), resume=True)
    assert len([name for name in files(tmp_path / "run") if name.startswith("seg")]) == 10
    assert open_run(tmp_path / "run").steps.tolist() == list(range(12))


def test_closing_does_not_wait_for_ever(tmp_path):
    writer = write_run(tmp_path / "run", range(20), close=False)
    gate, entered = threading.Event(), threading.Event()
    seal = writer._sealer._seal

    def slow():
        entered.set()
        gate.wait(PATIENCE_S)
        seal()

    writer._sealer._seal = slow
    writer._sealer.submit(99)
    assert entered.wait(PATIENCE_S)
    writer.close(deadline=0.0)
    assert open_run(tmp_path / "run").status == "finished"
    assert "journal-000000.bin" in files(tmp_path / "run")
    gate.set()
    writer._sealer._thread.join(PATIENCE_S)
    assert files(tmp_path / "run") == ["contents.json", "journal-000000.bin", "writer.json"]
    assert open_run(tmp_path / "run").steps.tolist() == list(range(20))


def test_a_closed_writer_says_so(tmp_path):
    writer = write_run(tmp_path / "run", range(1))
    writer.close()
    with pytest.raises(ClosedError, match="is closed"):
        writer.take_block(make_block(2))


def test_a_failed_run_says_so(tmp_path):
    writer = write_run(tmp_path / "run", range(1), close=False)
    writer.final_state = "failed"
    writer.close()
    assert open_run(tmp_path / "run").status == "failed"


def test_ranks_write_side_by_side(tmp_path):
    second = write_run(tmp_path / "run", range(3), rank=1, close=False)
    first = write_run(tmp_path / "run", range(3), rank=0, close=False)
    first.take_event(Event(event_type="note", message="zero", timestamp=1.0))
    second.take_event(Event(event_type="note", message="one", timestamp=2.0))
    first.close()
    second.close()
    opened = open_run(tmp_path / "run")
    assert opened.ranks == [0, 1]
    assert [event.message for event in opened.events] == ["zero", "one"]
    assert (tmp_path / "run/telemetry/r00001/events.jsonl").exists()
    with pytest.raises(RunExists):
        RunWriter(tmp_path / "run", HEADER, rank=1)


def test_a_small_budget_is_refused(tmp_path):
    with pytest.raises(OptionError, match="max_disk_bytes"):
        RunWriter(tmp_path / "run", HEADER, max_disk_bytes=10)


def test_signs_of_life_come_at_most_every_five_seconds(tmp_path):
    clock = Clock()
    writer = write_run(tmp_path / "run", range(1), close=False, clock=clock)
    beats = []
    for step in range(1, 21):
        clock.now += 1.0
        writer.take_block(make_block(step))
        beats.append(lease.read(writer.folder).beat)
    assert len(set(beats)) == 5
    assert lease.read(writer.folder).last_step == 20
    writer.close()


def test_a_writer_whose_folder_was_taken_over_stops(tmp_path):
    clock = Clock()
    writer = write_run(tmp_path / "run", range(1), close=False, clock=clock)
    lease.write(writer.folder, lease.mine("live", 1, clock()))
    clock.now += 10
    with pytest.raises(RunInUse, match="has taken over"):
        writer.take_block(make_block(1))
    writer.take_block(make_block(2))
    assert writer.health == "lost"
    assert writer.dropped_blocks == 1
    writer.close()


def test_a_forked_child_writes_nothing(tmp_path):
    writer = write_run(tmp_path / "run", range(2), close=False)
    pid = os.fork()
    if pid == 0:
        writer.take_sites(make_sites(1, first=7))
        writer.take_block(make_block(2))
        writer.take_event(Event(event_type="note", message="child", timestamp=0.0))
        writer.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert lease.read(writer.folder).state == "live"
    writer.take_block(make_block(3))
    writer.close()
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == [0, 1, 3]
    assert opened.events == []


def test_blocks_that_make_no_sense_are_refused(tmp_path):
    writer = write_run(tmp_path / "run", range(1), close=False)
    good = make_block(1)
    with pytest.raises(ValueError, match="rising order"):
        writer.take_block(make_block(1, sites=good.sites[::-1].copy()))
    with pytest.raises(ValueError, match="shapes"):
        writer.take_block(make_block(1, rows=good.rows[:2]))
    with pytest.raises(ValueError, match="spans 0"):
        writer.take_block(make_block(1, span=0))
    writer.close()
    assert verify(tmp_path / "run").ok


# ---------------------------------------------------------------------- a disk that says no


class FullDisk:
    """Lets `os.write` fail the way a full disk does: some bytes, then none."""

    def __init__(self, monkeypatch, error=errno.ENOSPC):
        self._write, self._error = os.write, error
        self.partial = 0
        self.is_full = False
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd, data):
        if not self.is_full:
            return self._write(fd, data)
        if self.partial:
            taken = self._write(fd, memoryview(data)[: self.partial])
            self.partial = 0
            return taken
        raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("partial", [0, 1, 39, 100])
def test_a_full_disk_is_reported_once_and_survived(tmp_path, monkeypatch, partial):
    disk = FullDisk(monkeypatch)
    writer = write_run(tmp_path / "run", range(3), close=False)
    disk.is_full, disk.partial = True, partial
    with pytest.raises(RunError, match="No space left on device"):
        writer.take_block(make_block(3))
    assert writer.health == "failing"
    writer.take_block(make_block(4))
    writer.take_sites(make_sites(1, first=3))
    writer.take_event(Event(event_type="note", message="kept", timestamp=0.0))
    disk.is_full = False
    writer.take_block(make_block(5, 4))
    assert writer.health == "well"
    assert writer.dropped_blocks == 2
    disk.is_full = True
    with pytest.raises(RunError, match="No space left"):
        writer.take_block(make_block(6))
    disk.is_full = False
    writer.close()
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == [0, 1, 2, 5]
    assert len(opened.sites) == 4
    assert opened.dropped == 3
    assert [event.event_type for event in opened.events] == ["note", "dropped", "dropped"]
    report = verify(opened.path)
    assert report.ok
    assert not report.torn_tails


def test_events_wait_for_better_times(tmp_path, monkeypatch):
    disk = FullDisk(monkeypatch)
    writer = write_run(tmp_path / "run", range(1), close=False)
    disk.is_full, disk.partial = True, 5
    with pytest.raises(RunError, match=r"events\.jsonl could not be written: No space left"):
        writer.take_event(Event(event_type="note", message="one", timestamp=1.0))
    writer.take_event(Event(event_type="note", message="two", timestamp=2.0))
    disk.is_full = False
    writer.close()
    assert [event.message for event in open_run(tmp_path / "run").events] == ["one", "two"]
    assert verify(tmp_path / "run").ok


def test_a_journal_that_cannot_be_sealed_stays_readable(tmp_path, monkeypatch):
    writer = write_run(tmp_path / "run", range(0), close=False, journal_bytes=1 << 12)
    main, write = threading.get_ident(), os.write

    def refuse(fd, data):
        if threading.get_ident() != main and len(data) > 1000:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)
    for step in range(30):
        writer.take_block(make_block(step))
    writer.close()
    assert len([name for name in files(tmp_path / "run") if name.startswith("journal")]) > 1
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == list(range(30))
    assert [event.event_type for event in opened.events] == ["seal_failed"]
    monkeypatch.undo()
    write_run(tmp_path / "run", range(30, 32), resume=True)
    assert not [name for name in files(tmp_path / "run") if name.startswith("journal")]
    assert open_run(tmp_path / "run").steps.tolist() == list(range(32))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk_is_survived(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no tmpfs here")
    try:
        writer = RunWriter(disk / "run", HEADER, max_disk_bytes=1 << 20)
        writer.take_sites(make_sites(50))
        written, refusals = [], []
        for step in range(100):
            before = writer.dropped_blocks
            try:
                writer.take_block(make_block(step, 50))
            except RunError as error:
                refusals.append(str(error))
            if writer.dropped_blocks == before:
                written.append(step)
        writer.close()
        assert all("No space left on device" in refusal for refusal in refusals)
        assert writer.dropped_blocks == 100 - len(written) > 0
        # The sealer comes and goes with space of its own, so the disk may be full more than once.
        assert 1 <= len(refusals) <= writer.dropped_blocks
        opened = open_run(disk / "run")
        assert opened.steps.tolist() == written
        assert opened.problems == []
        report = verify(disk / "run")
        assert report.ok
        assert not report.torn_tails
        del opened, report
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_limit_on_file_sizes_is_survived(tmp_path):
    code = """
import resource, signal, sys
from sonde.errors import RunError
from tests.store.making import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
w = write_run(sys.argv[1], range(0), 20, close=False)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, resource.RLIM_INFINITY))
raised, done = 0, []
for step in range(40):
    before = w.dropped_blocks
    try:
        w.take_block(make_block(step, 20))
    except RunError as error:
        raised += 1
        assert "File too large" in str(error), error
    if w.dropped_blocks == before:
        done.append(step)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
w.take_block(make_block(40, 20))
w.close()
print(raised, done[-1], w.dropped_blocks)
"""
    answer = run_to_end([sys.executable, "-c", code, tmp_path / "run"], text=True)
    assert answer.returncode == 0, answer.stderr
    raised, last, dropped = map(int, answer.stdout.split())
    assert raised == 1
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == [*range(last + 1), 40]
    assert opened.dropped == dropped == 39 - last
    assert verify(tmp_path / "run").ok


def test_a_deleted_run_is_lost_and_reported_once(tmp_path):
    writer = write_run(tmp_path / "run", range(3), close=False)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match="the folder was deleted"):
        writer.take_block(make_block(3))
    writer.take_block(make_block(4))
    writer.take_sites(make_sites(1, first=9))
    assert writer.health == "lost"
    assert writer.dropped_blocks == 2
    writer.close()
    assert not (tmp_path / "run").exists()


def test_a_deleted_journal_is_replaced(tmp_path):
    writer = write_run(tmp_path / "run", range(3), close=False)
    (writer.folder / "journal-000000.bin").unlink()
    with pytest.raises(RunError, match="its journal was deleted"):
        writer.take_block(make_block(3))
    writer.take_block(make_block(4))
    writer.close()
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == [4]
    assert "missing" in opened.problems[0]
    assert len(opened.sites) == 3


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    if os.geteuid() == 0:
        with pytest.raises(RunError, match="/proc/sonde"):
            RunWriter(Path("/proc/sonde"), HEADER)
        return
    tmp_path.chmod(0o500)
    with pytest.raises(RunError, match="Permission denied"):
        RunWriter(tmp_path / "run", HEADER)


def test_a_writer_that_cannot_be_made_leaves_no_thread_and_can_be_made_again(tmp_path, monkeypatch):
    write_run(tmp_path / "run", range(3), close=False)._journal.close()
    lease.OPEN.clear()  # as if that process had died
    real = RunWriter._report_resumed
    monkeypatch.setattr(RunWriter, "_report_resumed", lambda *given: 1 / 0)
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        RunWriter(tmp_path / "run", HEADER, resume=True)
    assert set(threading.enumerate()) <= before
    monkeypatch.setattr(RunWriter, "_report_resumed", real)
    write_run(tmp_path / "run", range(3, 5), resume=True)
    assert open_run(tmp_path / "run").steps.tolist() == list(range(5))
    assert verify(tmp_path / "run").ok


def test_a_power_loss_is_survived_if_asked_for(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    writer = write_run(tmp_path / "run", range(0), close=False, sync="always")
    before = len(synced)
    writer.take_block(make_block(0))
    assert len(synced) == before + 1
    writer.sync()
    assert len(synced) == before + 4
    writer.close()


def test_what_a_crash_left_in_the_middle_of_compaction_is_cleared_away(tmp_path):
    run = tmp_path / "run"
    write_run(run, range(10))
    folder = layout.rank_folder(run, 0)
    shutil.copy(folder / "seg-000000.safetensors", folder / "seg-000000-000002.safetensors")
    shutil.copy(folder / "seg-000000.safetensors", folder / "seg-000001.safetensors")
    (folder / "journal-000002.bin").write_bytes(b"old")
    (folder / ".seg-000007.safetensors.1.tmp").write_bytes(b"half")
    assert open_run(run).steps.tolist() == list(range(10))
    writer = RunWriter(run, HEADER, resume=True)
    writer.take_block(make_block(10))
    wait_until(lambda: writer._number == 3)
    writer.close()
    assert files(run) == ["contents.json", "seg-000000-000002.safetensors", "seg-000003.safetensors", "writer.json"]
    assert open_run(run).steps.tolist() == list(range(11))


def test_journals_that_wait_are_sealed_together(tmp_path):
    writer = write_run(tmp_path / "run", range(0), close=False, journal_bytes=1 << 12)
    gate, seal, calls = threading.Event(), writer._sealer._seal, []

    def slow():
        assert gate.wait(PATIENCE_S)
        calls.append(list(writer._sealer._waiting))
        seal()

    writer._sealer._seal = slow
    for step in range(40):
        writer.take_block(make_block(step))
    gate.set()
    writer.close()
    # The first may have gone alone; the others waited at the gate and went together.
    assert len(calls) <= 3
    assert max(map(len, calls)) > 1
    opened = open_run(tmp_path / "run")
    assert opened.steps.tolist() == list(range(40))
    assert verify(opened.path).ok


def test_what_a_damaged_segment_was_made_from_is_kept(tmp_path):
    run = tmp_path / "run"
    writer = write_run(run, range(5), close=False)
    journal = (writer.folder / "journal-000000.bin").read_bytes()
    writer.close()
    sealed = writer.folder / "seg-000000.safetensors"
    sealed.write_bytes(sealed.read_bytes()[:-5])
    (writer.folder / "journal-000000.bin").write_bytes(journal)
    write_run(run, range(5, 6), resume=True)
    assert (writer.folder / "journal-000000.bin").read_bytes() == journal


def test_a_writer_whose_sealer_cannot_be_ended_at_first_leaves_no_thread(tmp_path, monkeypatch):
    writer = write_run(tmp_path / "run", range(3), close=False)
    close, calls = writer._sealer.close, []

    def fails_once(deadline):
        calls.append(deadline)
        if len(calls) == 1:
            raise MemoryError
        return close(deadline)

    monkeypatch.setattr(writer._sealer, "close", fails_once)
    with pytest.raises(MemoryError):
        writer.close()
    writer._sealer._thread.join(PATIENCE_S)
    assert not writer._sealer._thread.is_alive()
