"""The programs of the guides find what the guides say, with the right line."""

from __future__ import annotations

import gc
import re
import runpy
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Write the code of a page, or its first blocks, to a file and run it."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.ones(1)], 0.1)
    gc.freeze()  # torch's own objects need not be walked through

    def run(page, blocks):
        code = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.S)
        file = tmp_path / "train.py"
        file.write_text("\n".join(code[:blocks]))
        return file.read_text().splitlines(), runpy.run_path(str(file))

    yield run
    gc.unfreeze()
    torch.set_num_threads(threads)


def test_the_leak_of_the_guide_is_found_with_its_line(program, capsys):
    lines, names = program("my-run-leaks.md", 1)
    line = 1 + next(index for index, text in enumerate(lines) if "losses.append" in text)
    assert [leak.lines[0].line for leak in names["scope"].leaks()] == [line]
    assert f"train.py:{line}: `losses.append(check)`" in capsys.readouterr().out


def test_the_slow_program_of_the_guide_gets_both_verdicts(program):
    lines, names = program("my-run-is-slow.md", 2)
    line = 1 + next(index for index, text in enumerate(lines) if ".item()" in text)
    texts = {verdict.kind: verdict.text for verdict in names["scope"].verdict()}
    assert "num_workers is 0" in texts["data_wait"]
    assert ".item() called 6 times a step at " in texts["host_sync"]
    assert f"train.py:{line} (forward)" in texts["host_sync"]
    assert names["found"].shares["data_wait"] > 0
