"""Pickled pages: written only on request, read only by those who trust them."""

import joblib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sonde.capture import write_legacy_pages
from sonde.cli.main import app
from sonde.errors import RunExists, RunNotFound
from sonde.store.pages import load_debug_outputs, verify_pages


@pytest.fixture
def sonde():
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments], prog_name="sonde")


def captures(count):
    for at in range(count):
        yield (
            at,
            {
                "features": {"map": torch.full((16, 16), float(at))},
                "stats": {"mean": at / 2, "half": torch.ones(2).half()},
            },
        )


def test_legacy_pages_are_what_old_tools_load(tmp_path):
    assert write_legacy_pages(tmp_path, captures(10), page_bytes=3000) == 4
    pages = [joblib.load(path) for path in sorted(tmp_path.glob("page_*.pkl"))]
    assert [list(page) for page in pages] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert pages[3][9]["features"]["map"].equal(torch.full((16, 16), 9.0))
    with pytest.raises(RunExists):
        write_legacy_pages(tmp_path, captures(1), page_bytes=3000)


def test_reading_pickled_pages_names_the_command_that_converts_them(tmp_path, sonde):
    write_legacy_pages(tmp_path, captures(10), page_bytes=3000)
    with pytest.raises(RunNotFound, match=r"pickled pages \(page_0.pkl to page_3.pkl\).*sonde import-pages") as caught:
        load_debug_outputs(tmp_path)
    command = str(caught.value).partition("sonde import-pages ")[2].split()
    assert sonde("import-pages", *command).exit_code == 0
    read = load_debug_outputs(tmp_path)
    assert list(read) == list(range(10)), "converted in place, beside the old pages"
    assert read.problems == []


def test_importing_needs_trust(tmp_path, sonde):
    write_legacy_pages(tmp_path / "old", captures(3), page_bytes=10**6)
    refused = sonde("import-pages", tmp_path / "old", tmp_path / "new")
    assert refused.exit_code == 2
    assert "add --trust" in " ".join(refused.output.split())
    assert not (tmp_path / "new").exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_runs_without_trust(tmp_path, sonde):
    (tmp_path / "old").mkdir()
    joblib.dump({0: {"x": Bomb(tmp_path / "ran")}}, tmp_path / "old" / "page_0.pkl")
    sonde("import-pages", tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def test_imported_pages_hold_the_same(tmp_path, sonde):
    write_legacy_pages(tmp_path / "old", captures(12), page_bytes=3000)
    done = sonde("import-pages", tmp_path / "old", tmp_path / "new", "--trust", "--page-size-mb", "0.004")
    assert done.exit_code == 0, done.output
    assert "12 datapoints from 4 pickled pages" in done.output
    read = load_debug_outputs(tmp_path / "new", tensors="torch")
    assert list(read) == list(range(12))
    for at, outputs in captures(12):
        assert read[at]["features"]["map"].equal(outputs["features"]["map"])
        assert read[at]["stats"]["half"].dtype == torch.float16
        assert read[at]["stats"]["mean"] == at / 2
    assert verify_pages(tmp_path / "new").ok
    again = sonde("import-pages", tmp_path / "old", tmp_path / "new", "--trust")
    assert again.exit_code == 2
    assert "holds" in again.output


@pytest.mark.parametrize("content", ["nothing", "no folder", "a list", "garbage"])
def test_what_is_not_a_page_is_named(tmp_path, sonde, content):
    old = tmp_path / "old"
    if content != "no folder":
        old.mkdir()
    if content == "a list":
        joblib.dump([np.ones(1)], old / "page_0.pkl")
    if content == "garbage":
        (old / "page_0.pkl").write_bytes(b"garbage")
    done = sonde("import-pages", old, tmp_path / "new", "--trust")
    assert done.exit_code == 2
    assert "old" in done.output
