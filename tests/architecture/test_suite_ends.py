"""The suite comes to an end, and names the test, even if a test hangs where nothing can interrupt it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
from tests.waiting import run_to_end, started

ROOT = Path(__file__).parents[2]
HANGING = """
import ctypes, os, pathlib, subprocess, sys, time

def test_that_hangs():
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    pathlib.Path("started").write_text(f"{sleeping.pid} {forked}")
    ctypes.CDLL(None).sleep(1000)  # in C: pytest-timeout cannot interrupt it

def test_that_passes():
    pass
"""


def test_a_test_that_hangs_in_c_is_named_and_nothing_of_it_is_left(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ("-o", "faulthandler_timeout=1", "-o", f"pythonpath={ROOT}", "-n", "1", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}", *options]
    around = {**os.environ, "PYTEST_XDIST_WORKER": "gw0", "SONDE_TESTS_OF": "1"}  # as in a worker of another suite
    with started([sys.executable, "-c", "input()"], env=around) as bystander:
        done = run_to_end([*command, tmp_path], cwd=tmp_path, text=True, env=around)
        assert bystander.poll() is None, "it belongs to the other suite"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_hanging.py::test_that_hangs'" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "in test_that_hangs" in done.stdout + done.stderr, "its stack is printed"
    left = [pid for pid in map(int, (tmp_path / "started").read_text().split()) if psutil.pid_exists(pid)]
    assert not [pid for pid in left if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
