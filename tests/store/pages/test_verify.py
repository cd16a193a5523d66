"""`sonde.verify` looks at the captures of a run as well."""

import shutil

import pytest
from tests.store.making import write_run
from tests.store.pages.making import write

from sonde.store import verify
from sonde.store.pages import verify_pages
from sonde.store.pages.names import page_folders


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    write_run(run, range(3))
    write(run / "debugger", range(4), page_bytes=600)
    for epoch in (2, 10):
        write(run / f"epoch_{epoch}" / "debugger", range(epoch), page_bytes=600)
    write(run / "epoch_2" / "samples", range(2), rank=1)
    (run / "epoch_10" / "checkpoint.pt").write_bytes(b"not ours")
    (run / "epoch_11").write_text("no folder")
    return run


def test_all_folders_with_pages_are_found(run):
    found = [str(folder.relative_to(run)) for folder in page_folders(run)]
    assert found == ["debugger", "epoch_2/debugger", "epoch_2/samples", "epoch_10/debugger"]


def test_a_whole_run_is_whole(run):
    report = verify(run)
    assert report.ok, report
    assert report.num_captures == 4 + 2 + 2 + 10
    assert "18 captures" in str(report)


@pytest.mark.parametrize("name", ["page_0.safetensors", "page_1.safetensors", "page_0.index"])
def test_damage_in_captures_is_damage_of_the_run(run, name):
    path = run / "epoch_10" / "debugger" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    problems = verify(run).problems
    assert {problem.file for problem in problems} == {path}


def test_pages_and_indexes_must_belong_together(run):
    folder = run / "epoch_10" / "debugger"
    shutil.copy(run / "debugger" / "page_0.index", folder / "page_3.index")
    assert "different datapoints" in str(verify_pages(folder))


def test_a_missing_page_is_named(run):
    folder = run / "epoch_10" / "debugger"
    for path in folder.glob("page_2.*"):
        path.unlink()
    assert "page_2.safetensors: is missing" in str(verify(run))


def test_an_open_page_and_its_torn_tail_are_no_damage(run):
    folder = run / "epoch_12" / "debugger"
    write(folder, range(3), close=False)
    with (folder / "page_0.journal").open("ab") as file:
        file.write(b"SNDJ half a record")
    report = verify(run)
    assert report.ok, report
    assert len(report.torn_tails) == 1
    assert report.num_captures == 21
