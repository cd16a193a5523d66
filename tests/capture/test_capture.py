"""Captures reach the disk from any thread, within a bound of memory, and nothing that fails can hang them."""

import contextlib
import errno
import gc
import logging
import os
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from tests.waiting import PATIENCE_S, wait_until

from sonde.capture import Capture, worker
from sonde.capture import capture as capture_module
from sonde.errors import ClosedError, OptionError, RunError, RunExists
from sonde.store.pages import PageWriter, load_debug_outputs, open_page, verify_pages

MIB = 1 << 20


def threads():
    """Return the threads that write and go on: one that has nothing left to do may need a moment to end."""
    found = [thread for thread in threading.enumerate() if thread.name == "sonde-pages"]
    for thread in found:
        thread.join(10)
    return [thread for thread in found if thread.is_alive()]


@pytest.fixture
def make():
    made = []

    def make(**options):
        made.append(Capture(**{"page_bytes": MIB, "on_error": "raise", "sync": False, **options}))
        return made[-1]

    yield make
    for each in made:
        each.on_error = "isolate"
        each.close()


@pytest.fixture
def gate(monkeypatch):
    """Holds writes back until it is set; `reached` tells that one is held."""
    gate, real = threading.Event(), PageWriter.add
    gate.reached = threading.Event()

    def add(self, *args, **kwargs):
        gate.reached.set()
        assert gate.wait(PATIENCE_S)
        real(self, *args, **kwargs)

    monkeypatch.setattr(PageWriter, "add", add)
    yield gate
    gate.set()


def test_captures_are_written_while_they_come(tmp_path, make):
    capture = make()
    capture.open(tmp_path)
    for at in range(20):
        assert capture.add(at, {"x": torch.full((3,), at)}, info={"score": at})
    assert capture.flush()
    assert (capture.written, capture.dropped, capture.failed, capture.pending_bytes) == (20, 0, 0, 0)
    assert capture.stored == set(range(20))
    assert len(load_debug_outputs(tmp_path)) == 20
    assert not threads(), "the thread lives only while there is something to write"
    assert capture.seal()
    assert capture.folder is None
    assert verify_pages(tmp_path).ok


def test_ten_large_captures_with_a_small_page_give_ten_pages(tmp_path, make):
    capture = make()
    for at in range(10):
        capture.add(at, {"x": torch.full((1024, 1024), float(at))})
    capture.open(tmp_path)
    capture.flush()
    assert capture.pages_written == capture.current_page == 10
    assert len(list(tmp_path.glob("*.safetensors"))) == 10


def test_captures_wait_for_a_folder(tmp_path, make):
    capture = make()
    for at in range(5):
        capture.add(at, {"x": torch.ones(2)})
    assert capture.num_pending == 5
    assert [datapoint for datapoint, _ in capture.waiting] == list(range(5))
    assert not capture.flush(0.0)
    capture.open(tmp_path)
    assert capture.flush()
    assert list(load_debug_outputs(tmp_path)) == list(range(5))


@pytest.mark.parametrize("on_full", ["block", "drop"])
def test_what_waits_for_a_folder_beyond_the_memory_waits_on_disk(tmp_path, make, on_full):
    spill = tmp_path / "spill"
    spill.mkdir()
    capture = make(max_pending_bytes=MIB, page_bytes=MIB, spill_folder=spill)
    for at in range(24):
        assert capture.add(at, {"x": torch.full((256, 256), float(at))})
        assert capture.pending_bytes <= MIB
    assert list(spill.iterdir())
    capture.open(tmp_path / "pages")
    capture.add(24, {"x": torch.full((256, 256), 24.0)})
    capture.seal()
    assert not list(spill.iterdir())
    read = load_debug_outputs(tmp_path / "pages")
    assert list(read) == list(range(25))
    assert all((read[at]["x"] == at).all() for at in read)
    assert verify_pages(tmp_path / "pages").ok


def test_what_waits_can_be_forgotten(tmp_path, make):
    capture = make(max_pending_bytes=MIB, spill_folder=tmp_path)
    for at in range(6):
        capture.add(at, {"x": torch.ones(256, 256)})
    capture.discard()
    assert capture.pending_bytes == 0
    assert not list(tmp_path.iterdir())
    capture.add(7, {"x": torch.ones(1)})
    capture.open(tmp_path / "pages")
    capture.seal()
    assert list(load_debug_outputs(tmp_path / "pages")) == [7]


def test_epochs_go_to_their_own_folders(tmp_path, make):
    capture = make(page_bytes=200)
    for epoch in range(3):
        if epoch == 1:
            capture.open(tmp_path / f"epoch_{epoch}")
        for at in range(epoch * 10, epoch * 10 + 10):
            capture.add(at, {"x": torch.full((10,), at)})
        if epoch != 1:
            capture.open(tmp_path / f"epoch_{epoch}")
        capture.seal()
    for epoch in range(3):
        folder = tmp_path / f"epoch_{epoch}"
        assert list(load_debug_outputs(folder)) == list(range(epoch * 10, epoch * 10 + 10))
        assert len(list(folder.glob("*.safetensors"))) >= 3


def test_opening_the_next_folder_seals_the_last(tmp_path, make):
    capture = make()
    capture.open(tmp_path / "a")
    capture.add(0, {"x": 1})
    capture.open(tmp_path / "b")
    capture.add(1, {"x": 2})
    capture.close()
    assert list(load_debug_outputs(tmp_path / "a")) == [0]
    assert list(load_debug_outputs(tmp_path / "b")) == [1]
    assert not list(tmp_path.rglob("*.open"))


def test_pages_that_are_there_are_never_overwritten(tmp_path, make):
    capture = make()
    capture.open(tmp_path)
    capture.add(0, {"x": 1})
    capture.seal()
    capture.add(1, {"x": 2})
    with pytest.raises(RunExists):
        capture.open(tmp_path)
    capture.open(tmp_path, resume=True)
    assert capture.stored >= {0}
    capture.seal()
    assert list(load_debug_outputs(tmp_path)) == [0, 1]


def test_a_full_queue_blocks_and_then_drops(tmp_path, make, gate):
    capture = make(max_pending_bytes=12_000, stall_timeout_s=0.0)
    capture.open(tmp_path)
    taken = [capture.add(at, {"x": torch.zeros(1000)}) for at in range(5)]
    assert taken == [True, True, False, False, False]
    assert capture.dropped == 3
    assert capture.pending_bytes <= 12_000
    gate.set()
    with pytest.raises(RunError, match="3 captures could not be written; the first, of datapoint 2: there is no room"):
        capture.seal(PATIENCE_S)
    assert list(capture.take_lost()) == [2, 3, 4]
    assert list(load_debug_outputs(tmp_path)) == [0, 1]


def test_a_full_queue_blocks_until_there_is_room(tmp_path, make, gate):
    capture = make(max_pending_bytes=12_000, stall_timeout_s=PATIENCE_S)
    capture.open(tmp_path)

    def fill():
        for at in range(20):
            capture.add(at, {"x": torch.zeros(1000)})

    thread = threading.Thread(target=fill)
    thread.start()
    gate.set()
    thread.join(PATIENCE_S)
    capture.seal()
    assert capture.dropped == 0
    assert len(load_debug_outputs(tmp_path)) == 20


class SlowDisk:
    """A disk on which every write takes 50 seconds of a clock that only its writes move."""

    def __init__(self, monkeypatch):
        self.now, self.most_pending, self.capture = 0.0, 0, None
        real = PageWriter.add

        def add(writer, *args, **kwargs):
            self.most_pending = max(self.most_pending, self.capture.pending_bytes)
            self.now += 50.0
            real(writer, *args, **kwargs)

        monkeypatch.setattr(PageWriter, "add", add)


@pytest.fixture
def slow(monkeypatch, make):
    disk = SlowDisk(monkeypatch)
    disk.capture = make(monotonic=lambda: disk.now, max_pending_bytes=20_000, stall_timeout_s=60.0)
    return disk


def test_a_slow_disk_slows_the_caller_and_loses_nothing(tmp_path, slow):
    slow.capture.open(tmp_path)
    for at in range(1000):  # far more than fits: each waits until there is room
        assert slow.capture.add(at, {"x": torch.zeros(100)})
    assert slow.capture.seal(), "50,000 seconds, of which none passed without progress for more than 50"
    assert slow.now == 1000 * 50.0
    assert slow.most_pending <= 20_000
    assert (slow.capture.written, slow.capture.dropped, slow.capture.take_lost()) == (1000, 0, {})
    assert list(load_debug_outputs(tmp_path)) == list(range(1000))


def test_what_waited_for_a_folder_is_all_written_however_long_that_takes(tmp_path, slow):
    slow.capture.max_pending_bytes = 1 << 30
    for at in range(200):
        assert slow.capture.add(at, {"x": at})
    slow.capture.open(tmp_path)
    slow.capture.close()
    assert slow.now == 200 * 50.0
    assert len(load_debug_outputs(tmp_path)) == 200


def test_a_disk_that_hangs_is_waited_for_once_and_not_for_every_capture(tmp_path, make, gate):
    now = 0.0
    capture = make(monotonic=lambda: now, max_pending_bytes=1, stall_timeout_s=60.0, on_error="isolate")
    capture.open(tmp_path)
    capture.add(0, {"x": 0})
    assert gate.reached.wait(PATIENCE_S)
    now = 61.0
    assert not any(capture.add(at, {"x": 1}) for at in range(1, 51)), "none of them waits another minute"
    assert capture.dropped == 50
    now = 61.0 + 60.0
    gate.set()
    wait_until(lambda: capture.written == 1)
    assert capture.add(100, {"x": 1}), "a disk that comes back is used again"
    capture.seal()
    assert list(load_debug_outputs(tmp_path)) == [0, 100]


def test_a_large_capture_gets_the_time_that_it_needs(tmp_path, make, gate):
    now = 0.0
    capture = make(monotonic=lambda: now, stall_timeout_s=1.0, on_error="isolate")
    capture.open(tmp_path)
    capture.add(0, {"x": np.zeros(100 * MIB, np.uint8)})
    assert gate.reached.wait(PATIENCE_S)
    now = 99.0
    sealed = []
    waiting = threading.Thread(target=lambda: sealed.append(capture.seal()))
    waiting.start()
    wait_until(lambda: capture._changed._waiters or sealed, "the seal to wait")
    gate.set()
    waiting.join(PATIENCE_S)
    assert sealed == [True]
    assert capture.take_lost() == {}


def test_captures_added_while_spilled_ones_move_to_their_folder_keep_their_order(tmp_path, make, monkeypatch):
    capture = make(max_pending_bytes=3000, spill_folder=tmp_path, on_error="raise")
    for at in range(20):
        capture.add(at, {"x": at})
    real, added, threads_ = capture_module.move_pages, [], []

    def move(*args):
        other = threading.Thread(target=lambda: added.extend(capture.add(at, {"x": at}) for at in range(20, 40)))
        other.start()
        threads_.append(other)
        real(*args)

    monkeypatch.setattr(capture_module, "move_pages", move)
    capture.open(tmp_path / "pages")
    threads_[0].join(PATIENCE_S)
    capture.close()
    assert added == [True] * 20
    assert list(load_debug_outputs(tmp_path / "pages")) == list(range(40))
    assert [each.name for each in tmp_path.iterdir()] == ["pages"], "no second temporary folder is left"


def test_dropping_never_blocks(tmp_path, make, gate):
    capture = make(max_pending_bytes=5000, on_full="drop", stall_timeout_s=1e9)
    capture.open(tmp_path)
    assert [capture.add(at, {"x": torch.zeros(1000)}) for at in range(3)] == [True, False, False]
    gate.set()


def test_a_capture_larger_than_the_bound_gets_in_alone(tmp_path, make):
    capture = make(max_pending_bytes=100)
    capture.open(tmp_path)
    for at in range(3):
        assert capture.add(at, {"x": torch.zeros(1000)})
    capture.seal()
    assert len(load_debug_outputs(tmp_path)) == 3


@pytest.fixture
def failing(monkeypatch):
    real = PageWriter.add

    def add(self, datapoint, outputs, **kwargs):
        if datapoint % 3 == 1:
            raise ValueError(f"no place for {datapoint}")
        real(self, datapoint, outputs, **kwargs)

    monkeypatch.setattr(PageWriter, "add", add)


def test_a_capture_that_cannot_be_written_hangs_nothing(tmp_path, make, failing, caplog):
    capture = make(on_error="isolate")
    capture.open(tmp_path)
    for at in range(9):
        capture.add(at, {"x": torch.ones(2)})
    with caplog.at_level(logging.WARNING, "sonde"):
        assert capture.flush(PATIENCE_S)
    assert (capture.written, capture.failed, capture.pending_bytes) == (6, 3, 0)
    assert [failure.datapoint for failure in capture.failures] == [1, 4, 7]
    assert "ValueError: no place for 1" in capture.failures[0].traceback
    capture.seal()
    assert list(load_debug_outputs(tmp_path)) == [0, 2, 3, 5, 6, 8]


def test_failures_are_raised_where_that_was_asked_for(tmp_path, make, failing):
    capture = make(on_error="raise")
    capture.open(tmp_path)
    for at in range(5):
        capture.add(at, {"x": torch.ones(2)})
    with pytest.raises(RunError, match="2 captures could not be written; the first, of datapoint 1: ValueError"):
        capture.flush()
    assert capture.flush(), "each failure is raised once"
    capture.add(7, {"x": 1})
    with pytest.raises(RunError, match="datapoint 7"):
        capture.close()
    capture.close()
    assert not threads()
    assert list(load_debug_outputs(tmp_path)) == [0, 2, 3]


@pytest.mark.parametrize("on_error", ["isolate", "raise"])
def test_a_disk_that_is_full_when_a_page_is_finished_loses_nothing(tmp_path, make, monkeypatch, caplog, on_error):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(open_page, "fill_header", full)
    capture = make(on_error=on_error)
    capture.open(tmp_path)
    capture.add(0, {"x": torch.ones(2)})
    with pytest.raises(OSError, match="No space left") if on_error == "raise" else contextlib.nullcontext():
        capture.seal()
    assert ("No space left on device" in caplog.text) == (on_error == "isolate")
    assert capture.take_lost() == {}
    assert load_debug_outputs(tmp_path)[0]["x"].tolist() == [1, 1]


def test_flushing_ends_in_time(tmp_path, make, gate, caplog):
    capture = make(on_error="isolate")
    capture.open(tmp_path)
    for at in range(3):
        capture.add(at, {"x": torch.ones(2)})
    assert gate.reached.wait(PATIENCE_S)
    assert not capture.flush(0.01)
    capture.on_error = "raise"
    with pytest.raises(RunError, match=r"2 captures wait, and none was written for 0\.01 s"):
        capture.flush(0.01)
    capture.on_error = "isolate"
    with caplog.at_level(logging.WARNING, "sonde"):
        assert not capture.seal(0.01)
    assert capture.dropped == 2
    assert "dropped" in caplog.text
    assert "hung" in caplog.text
    gate.set()
    capture.close()
    assert not threads()


def test_what_one_folder_did_not_get_does_not_end_up_in_the_next(tmp_path, make, gate):
    capture = make(on_error="isolate")
    capture.open(tmp_path / "a")
    for at in range(3):
        capture.add(at, {"x": torch.ones(2)})
    assert gate.reached.wait(PATIENCE_S)
    capture.seal(0.01)
    gate.set()
    assert not threads()
    capture.open(tmp_path / "b")
    capture.add(9, {"x": 1})
    capture.seal()
    assert list(load_debug_outputs(tmp_path / "b")) == [9]


def test_the_order_of_verbs_is_free(tmp_path, make):
    capture = make()
    assert capture.flush()
    assert capture.seal()
    capture.discard()
    assert not capture.is_closed
    capture.close()
    capture.close()
    assert capture.is_closed
    for verb in (capture.flush, capture.seal, lambda: capture.add(0, {}), lambda: capture.open(tmp_path)):
        with pytest.raises(ClosedError):
            verb()


def test_what_never_got_a_folder_is_counted(make):
    capture = make(on_error="isolate")
    capture.add(0, {"x": 1})
    capture.close()
    assert capture.dropped == 1


def test_bad_options_are_refused():
    for options in (
        {"page_bytes": 0},
        {"page_bytes": 1, "max_pending_bytes": 0},
        {"page_bytes": 1, "on_full": "wait"},
        {"page_bytes": 1, "on_error": "ignore"},
        {"page_bytes": 1, "save_dtype": torch.int8},
        {"page_bytes": 1, "keep": "most"},
    ):
        with pytest.raises(OptionError):
            Capture(**options)


def test_four_threads_capture_four_hundred_datapoints_right(tmp_path, make):
    capture = make(page_bytes=5000)
    capture.open(tmp_path)

    def evaluate(first):
        for at in range(first, 400, 4):
            capture.add(at, {"x": torch.full((20,), at)}, info={"at": at})

    evaluators = [threading.Thread(target=evaluate, args=(first,)) for first in range(4)]
    for each in evaluators:
        each.start()
    for each in evaluators:
        each.join(PATIENCE_S)
    capture.seal()
    read = load_debug_outputs(tmp_path)
    assert list(read) == list(range(400))
    assert all((read[at]["x"] == at).all() and read.info(at) == {"at": at} for at in read)


def test_a_forked_child_leaves_captures_alone(tmp_path, make, gate):
    capture = make()
    capture.open(tmp_path)
    capture.add(0, {"x": torch.ones(2)})
    pid = os.fork()
    if pid == 0:
        silent = not capture.add(1, {"x": 1}) and not capture.flush(5) and not capture.seal() and capture.close()
        capture.open(tmp_path / "child")
        os._exit(0 if silent and not (tmp_path / "child").exists() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    gate.set()
    capture.seal()
    assert list(load_debug_outputs(tmp_path)) == [0]


def test_a_capture_that_waits_for_room_is_dropped_when_it_is_closed(tmp_path, make, gate):
    capture = make(max_pending_bytes=1, stall_timeout_s=PATIENCE_S, on_error="isolate")
    capture.open(tmp_path)
    capture.add(0, {"x": 0})
    assert gate.reached.wait(PATIENCE_S)
    added = []
    waiting = threading.Thread(target=lambda: added.append(capture.add(1, {"x": 1})))
    waiting.start()
    wait_until(lambda: capture._changed._waiters, "the second capture to wait")
    assert not capture.close(timeout_s=0.01)
    waiting.join(PATIENCE_S)
    assert added == [False]
    assert (capture.dropped, capture.num_pending) == (1, 0)
    gate.set()


def test_a_capture_that_is_forgotten_while_it_writes_lives_until_all_is_written(tmp_path, gate):
    capture = Capture(page_bytes=MIB)
    capture.open(tmp_path)
    for at in range(3):
        capture.add(at, {"x": at})
    assert gate.reached.wait(PATIENCE_S)
    del capture
    gc.collect()
    assert len(worker.living) == 1  # at the end of the process it would be closed
    gate.set()
    assert not threads()
    gc.collect()
    assert not list(worker.living)
    assert list(load_debug_outputs(tmp_path)) == [0, 1, 2]


def test_a_forgotten_capture_dies_and_its_folder_can_be_continued(tmp_path):
    capture = Capture(page_bytes=MIB)
    capture.open(tmp_path)
    capture.add(0, {"x": torch.ones(2)})
    capture.flush()
    del capture
    gc.collect()
    assert not threads()
    assert not list(worker.living)
    with Capture(page_bytes=MIB) as other:
        other.open(tmp_path, resume=True)
        other.add(1, {"x": 1})
    assert list(load_debug_outputs(tmp_path)) == [0, 1]


def test_memory_stays_within_the_bound(tmp_path, make):
    # Numpy's memory is seen by tracemalloc, torch's is not; the same queue holds both.
    bound = 8 * MIB
    capture = make(max_pending_bytes=bound, page_bytes=4 * MIB)
    capture.open(tmp_path)
    tracemalloc.start()
    try:
        for at in range(60):
            capture.add(at, {"x": np.full(MIB, at, np.uint8)})
        capture.seal()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound + 4 * MIB
    assert len(load_debug_outputs(tmp_path)) == 60


class TestKeep:
    def fill(self, capture, count=60):
        for at in range(count):
            capture.add(at, {"x": torch.full((50,), at)}, info={"at": at})

    def test_only_the_worst_and_a_control_stay(self, tmp_path, make):
        capture = make(keep="worst:6+control:2", page_bytes=2000, seed=3)
        capture.open(tmp_path)
        self.fill(capture)
        kept = capture.keep_only({at: at / 60 for at in range(60)}, higher_is_better=True)
        assert set(range(6)) <= kept
        assert len(kept) == 8
        assert capture.discarded == 52
        read = load_debug_outputs(tmp_path)
        assert set(read) == kept
        assert all((read[at]["x"] == at).all() and read.info(at) == {"at": at} for at in read)
        assert verify_pages(tmp_path).ok
        assert not list(tmp_path.glob("spill*"))

    def test_captures_may_come_before_the_folder(self, tmp_path, make):
        capture = make(keep="worst:5+control:0", max_pending_bytes=20_000, page_bytes=2000)
        self.fill(capture, 300)
        capture.open(tmp_path)
        assert capture.keep_only(dict.fromkeys(range(300), 1.0) | {7: 9.0}, higher_is_better=False) >= {7}
        assert len(load_debug_outputs(tmp_path)) == 5

    def test_the_next_epoch_goes_on(self, tmp_path, make):
        capture = make(keep="worst:2+control:0")
        for epoch in range(2):
            capture.open(tmp_path / f"epoch_{epoch}")
            self.fill(capture, 9)
            capture.keep_only({at: at for at in range(9)}, higher_is_better=bool(epoch))
        assert list(load_debug_outputs(tmp_path / "epoch_0")) == [7, 8]
        assert list(load_debug_outputs(tmp_path / "epoch_1")) == [0, 1]

    def test_without_scores_everything_stays(self, tmp_path, make):
        capture = make(keep="worst:2")
        capture.open(tmp_path)
        self.fill(capture, 9)
        capture.close()
        assert list(load_debug_outputs(tmp_path)) == list(range(9))
        assert verify_pages(tmp_path).ok
        assert not list(tmp_path.glob("spill*"))

    def test_a_crash_before_the_scores_loses_nothing(self, tmp_path, make):
        capture = make(keep="worst:2+control:0")
        capture.open(tmp_path)
        self.fill(capture, 9)
        capture.flush()
        capture._abandon()
        again = make(keep="worst:2+control:0")
        again.open(tmp_path, resume=True)
        assert again.stored == set(range(9))
        again.add(9, {"x": 1})
        assert again.keep_only({at: at for at in range(10)}, higher_is_better=False) == {8, 9}
        assert list(load_debug_outputs(tmp_path)) == [8, 9]

    def test_it_needs_to_be_asked_for_and_a_folder(self, tmp_path, make):
        with pytest.raises(OptionError, match="keep_only needs"):
            make().keep_only({}, higher_is_better=True)
        with pytest.raises(OptionError, match="keep_only needs"):
            make(keep="worst:2").keep_only({}, higher_is_better=True)

    def test_ranks_keep_apart(self, tmp_path, make):
        captures = [make(keep="worst:1+control:0", rank=rank) for rank in range(2)]
        for rank, capture in enumerate(captures):
            capture.open(tmp_path)
            for at in range(rank, 6, 2):
                capture.add(at, {"x": at})
        for capture in captures:
            capture.keep_only({at: at for at in range(6)}, higher_is_better=True)
        assert list(load_debug_outputs(tmp_path)) == [0, 1]
        assert verify_pages(tmp_path).ok
