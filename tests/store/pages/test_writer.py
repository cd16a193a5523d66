"""Pages are bounded, never overwritten, and continued where they ended."""

import errno
import os
import threading

import numpy as np
import pytest
from tests.store.pages.making import capture, same, write
from tests.waiting import PATIENCE_S

from sonde.errors import ClosedError, OptionError, RunError, RunExists, RunInUse
from sonde.store.lines import Appender
from sonde.store.pages import PageWriter, load_debug_outputs, open_page, verify_pages

MIB = 1 << 20


def sealed(folder):
    return sorted(int(path.stem.removeprefix("page_")) for path in folder.glob("page_*.safetensors"))


def assert_holds(folder, ids):
    read = load_debug_outputs(folder)
    assert list(read) == sorted(ids)
    assert not read.problems
    for each in ids:
        assert all(same(read[each][name], value) for name, value in capture(each).items())
        assert read.info(each) == {"score": each / 2}
    assert verify_pages(folder).ok


def test_ten_large_captures_with_a_small_page_give_ten_pages(tmp_path):
    with PageWriter(tmp_path, page_bytes=MIB, sync=False) as writer:
        for at in range(10):
            writer.add(at, {"features": np.full((1024, 1024), at, np.float32)})
        assert writer.pages_written == writer.current_page == 10
        assert writer.bytes_written == 10 * 4 * MIB
    assert sealed(tmp_path) == list(range(10))


def test_a_page_holds_no_more_than_its_bytes(tmp_path):
    with PageWriter(tmp_path, page_bytes=1000, sync=False) as writer:
        for at in range(25):
            writer.add(at, {"x": np.zeros(300, np.uint8)})
            assert writer.current_page_bytes <= 1000
    assert len(sealed(tmp_path)) == 9
    assert len(load_debug_outputs(tmp_path)) == 25


def test_a_page_that_is_exactly_full_is_sealed(tmp_path):
    with PageWriter(tmp_path, page_bytes=1024, sync=False) as writer:
        for at in range(8):
            writer.add(at, {"x": np.zeros(256, np.uint8)})
        assert writer.pages_written == 2
        assert writer.current_page_bytes == 0


def test_pages_without_tensors_hold_many_datapoints(tmp_path):
    with PageWriter(tmp_path, page_bytes=MIB, sync=False) as writer:
        for at in range(2000):
            writer.add(at, {"stats": {f"layer{each}": at / (each + 1) for each in range(8)}})
    assert len(sealed(tmp_path)) < 12
    assert load_debug_outputs(tmp_path)[1999]["stats"]["layer1"] == 999.5
    assert verify_pages(tmp_path).ok


def test_a_page_holds_a_bounded_number_of_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(open_page, "MAX_TENSORS", 100)
    with PageWriter(tmp_path, page_bytes=1 << 30, sync=False) as writer:
        for at in range(4):
            writer.add(at, {"x": [np.zeros(1, np.uint8)] * 40})
    assert len(sealed(tmp_path)) == 2
    assert len(load_debug_outputs(tmp_path)[3]["x"]) == 40
    assert verify_pages(tmp_path).ok


def test_a_second_epoch_never_touches_the_first(tmp_path):
    for epoch in range(2):
        write(tmp_path / f"epoch_{epoch}" / "debugger", range(100 * epoch, 100 * epoch + 12), page_bytes=600)
    for epoch in range(2):
        folder = tmp_path / f"epoch_{epoch}" / "debugger"
        assert len(sealed(folder)) >= 3
        assert_holds(folder, range(100 * epoch, 100 * epoch + 12))


def test_a_folder_with_pages_is_refused_unless_it_is_to_be_continued(tmp_path):
    write(tmp_path, range(4), page_bytes=600)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("page_*")}
    with pytest.raises(RunExists, match="resume=True"):
        PageWriter(tmp_path, page_bytes=600)
    writer = write(tmp_path, range(3, 9), page_bytes=600, resume=True)
    assert writer.datapoints == set(range(9))
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    assert_holds(tmp_path, range(9))


def test_of_two_captures_of_a_datapoint_the_later_counts(tmp_path):
    with PageWriter(tmp_path, page_bytes=100, sync=False) as writer:
        for value in range(5):
            writer.add(7, {"x": np.full(4, value, np.float64)})
            writer.add(8, {"x": np.full(4, -value, np.float64)})
    read = load_debug_outputs(tmp_path)
    assert list(read) == [7, 8]
    assert read[7]["x"].tolist() == [4.0] * 4
    assert verify_pages(tmp_path).ok


@pytest.mark.parametrize("page_bytes", [600, MIB])
def test_a_page_left_open_is_finished_by_the_next_writer(tmp_path, page_bytes):
    write(tmp_path, range(5), page_bytes=page_bytes, close=False)
    assert len(load_debug_outputs(tmp_path)) == 5
    assert verify_pages(tmp_path).ok
    write(tmp_path, range(5, 7), page_bytes=page_bytes, resume=True)
    assert not list(tmp_path.glob("*.open"))
    assert not list(tmp_path.glob("*.journal"))
    assert_holds(tmp_path, range(7))


def test_an_open_page_cut_anywhere_keeps_what_is_whole(tmp_path):
    whole = tmp_path / "whole"
    write(whole, range(3), close=False)
    journal, page = ((whole / f"page_0.{suffix}").read_bytes() for suffix in ("journal", "open"))
    ends = []
    for at in range(3):
        folder = tmp_path / f"count{at}"
        ends.append(len((write_only(folder, range(at + 1)) / "page_0.journal").read_bytes()))
    for cut in range(0, len(journal), 67):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "page_0.journal").write_bytes(journal[:cut])
        (folder / "page_0.open").write_bytes(page)
        kept = sum(end <= cut for end in ends)
        assert len(load_debug_outputs(folder)) == kept
        write(folder, range(kept, 3), resume=True)
        assert_holds(folder, range(3))


def write_only(folder, ids):
    write(folder, ids, close=False)
    return folder


def test_a_page_whose_tensors_were_cut_stays_as_it_is_and_the_others_go_on(tmp_path):
    write(tmp_path, range(3), close=False)
    os.truncate(tmp_path / "page_0.open", (tmp_path / "page_0.open").stat().st_size - 8)
    writer = write(tmp_path, range(3, 5), resume=True)
    assert "page_0.open" in writer.damaged[0]
    read = load_debug_outputs(tmp_path)
    assert same(read[4]["logits"], capture(4)["logits"])
    assert same(read[0]["logits"], capture(0)["logits"])


@pytest.mark.parametrize("state", ["sealed with a journal", "only a journal", "an empty page"])
def test_a_crash_between_two_steps_of_the_writer_is_mended(tmp_path, state):
    write(tmp_path, range(2))
    if state == "sealed with a journal":
        (tmp_path / "page_0.index").rename(tmp_path / "page_0.journal")
    elif state == "only a journal":
        (tmp_path / "page_1.journal").write_bytes(b"SND")
    else:
        write(tmp_path / "other", [], close=False)
        PageWriter(tmp_path / "third", page_bytes=10)
        (tmp_path / "page_1.journal").write_bytes(b"")
        (tmp_path / "page_1.open").write_bytes(bytes(16 << 10))
    assert len(load_debug_outputs(tmp_path)) == 2
    writer = write(tmp_path, range(2, 4), resume=True)
    assert not writer.damaged
    assert sealed(tmp_path) == [0, 1]
    assert_holds(tmp_path, range(4))


def test_only_one_writer_at_a_time(tmp_path):
    writer = write(tmp_path, [0], close=False)
    with pytest.raises(RunInUse, match=str(os.getpid())):
        PageWriter(tmp_path, page_bytes=1, resume=True)
    writer.close()
    writer.close()
    PageWriter(tmp_path, page_bytes=1, resume=True).close()
    with pytest.raises(ClosedError):
        writer.add(1, {})


def test_a_writer_that_was_forgotten_holds_nothing(tmp_path):
    write(tmp_path, [0], close=False)
    write(tmp_path, [1], resume=True)
    assert_holds(tmp_path, [0, 1])


def test_threads_may_add_at_once(tmp_path):
    with PageWriter(tmp_path, page_bytes=4000, sync=False) as writer:

        def add(first):
            for at in range(first, 200, 4):
                writer.add(at, capture(at), info={"score": at / 2})

        threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert_holds(tmp_path, range(200))


def test_ranks_write_apart_and_are_read_together(tmp_path):
    for rank in (1, 0, 2):
        write(tmp_path, range(rank, 9, 3), page_bytes=600, rank=rank)
    assert (tmp_path / "r00001" / "page_0.safetensors").exists()
    assert_holds(tmp_path, range(9))


def test_a_full_disk_leaves_the_page_as_it_was(tmp_path, monkeypatch):
    writer = write(tmp_path, range(2), close=False)
    real = Appender.append
    for failing in (".open", ".journal"):

        def append(self, content, failing=failing):
            if self.path.name.endswith(failing):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(self, content)

        monkeypatch.setattr(Appender, "append", append)
        with pytest.raises(OSError, match="No space"):
            writer.add(2, capture(2), info={"score": 1.0})
    monkeypatch.setattr(Appender, "append", real)
    writer.add(2, capture(2), info={"score": 1.0})
    writer.close()
    assert_holds(tmp_path, range(3))


def test_a_page_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch):
    def refuse(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append", refuse)
        writer = PageWriter(tmp_path, page_bytes=10)
        with pytest.raises(OSError, match="No space"):
            writer.add(0, capture(0))
    assert not list(tmp_path.glob("page_*"))
    writer.add(0, capture(0), info={"score": 0.0})
    writer.close()
    assert_holds(tmp_path, [0])


def test_a_forked_child_leaves_the_folder_alone(tmp_path):
    writer = write(tmp_path, [0], close=False)
    pid = os.fork()
    if pid == 0:
        writer.add(1, capture(1))
        writer.seal()
        writer.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    writer.close()
    assert_holds(tmp_path, [0])


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(OptionError, match="page_bytes"):
        PageWriter(tmp_path, page_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        PageWriter(tmp_path / "file", page_bytes=1)


def test_a_live_folder_is_followed(tmp_path):
    writer = write(tmp_path, range(2), page_bytes=600, close=False)
    read = load_debug_outputs(tmp_path)
    for at in range(2, 12):
        writer.add(at, capture(at), info={"score": at / 2})
        read.refresh()
        assert list(read) == list(range(at + 1))
        assert same(read[at]["logits"], capture(at)["logits"])
    writer.close()
    assert same(read[11]["logits"], capture(11)["logits"])
    read.refresh()
    assert len(read) == 12
    assert not read.problems
