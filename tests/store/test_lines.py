"""Lines reach their file in order, whatever the disk refuses in between."""

import pytest

from sonde.core import files
from sonde.records import Event
from sonde.store.lines import MOST_MEMORY, Appender, LineFile, LineWriter, Memory
from sonde.store.log.retention import MOST_LINES_BYTES
from sonde.store.timeline import encode_event


@pytest.fixture
def disk(monkeypatch):
    """A disk that refuses while `disk.full` is true."""

    class Disk:
        full = False

    real = Appender.append

    def append(self, record):
        if Disk.full:
            raise OSError(28, "No space left on device")
        real(self, record)

    monkeypatch.setattr(Appender, "append", append)
    return Disk


def test_what_the_disk_refused_comes_before_what_follows(tmp_path, disk):
    writer = LineWriter(tmp_path / "lines", max_waiting=10)
    assert writer.put(b"0\n") is None
    disk.full = True
    assert [str(writer.put(line).strerror) for line in (b"1\n", b"2\n")] == ["No space left on device"] * 2
    disk.full = False
    assert writer.put(b"3\n") is None
    writer.close()
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n3\n"
    assert writer.dropped == 0


def test_only_so_many_wait_and_the_rest_is_counted(tmp_path, disk):
    writer = LineWriter(tmp_path / "lines", max_waiting=3)
    disk.full = True
    for number in range(5):
        writer.put(f"{number}\n".encode())
    assert writer.dropped == 2
    disk.full = False
    writer.close()
    assert (tmp_path / "lines").read_text() == "2\n3\n4\n"


def test_the_file_is_made_with_its_first_line_unless_asked_for(tmp_path):
    idle, opened = LineWriter(tmp_path / "idle", 1), LineWriter(tmp_path / "opened", 1)
    opened.open()
    for writer in (idle, opened):
        writer.sync()
        writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["opened"]


def test_a_line_that_comes_after_closing_is_not_written_and_breaks_nothing(tmp_path):
    writer = LineWriter(tmp_path / "lines", 5)
    writer.put(b"0\n")
    writer.close()
    writer.close()
    assert writer.put(b"1\n") is None
    assert (tmp_path / "lines").read_text() == "0\n"


def test_files_of_lines_are_read_within_a_bound_of_memory_that_they_share_and_say_so(tmp_path):
    one, two, memory = tmp_path / "events.jsonl", tmp_path / "findings.jsonl", Memory(100_000)
    for path in (one, two):
        path.write_bytes(b"{}\n" * 300)
    first, second = (LineFile(path, files.loads, memory) for path in (one, two))
    first.refresh()
    second.refresh()
    assert (len(first.items), first.bad_lines) == (300, [])
    held = len(second.items)
    assert 50 < held < 200
    assert "The rest is left out" in second.bad_lines[0][1]
    second.refresh()
    assert (len(second.items), len(second.bad_lines)) == (held, 1)
    two.write_bytes(b"{}\n")  # a shorter file in its place
    second.refresh()
    assert (len(second.items), second.bad_lines) == (1, [])


def test_what_a_writer_may_write_is_what_a_reader_reads():
    event = Event(event_type="note", message="a note", timestamp=1.0, step=5, data={"loss": 0.5, "epoch": 3})
    line = encode_event(event)
    assert MOST_LINES_BYTES / len(line) * files.memory_of(line) < MOST_MEMORY
