"""The server's memory: its threads share few arenas."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from sonde.views.web.serve import keep_memory_low

CODE = """
import ctypes, sys, threading
from sonde.views.web.serve import keep_memory_low

if sys.argv[1] == "low":
    assert keep_memory_low()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
gate = threading.Barrier(8)

def work():
    gate.wait()
    libc.malloc(ctypes.c_size_t(5000))
    gate.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
print(open(sys.argv[2]).read().count("<heap nr="))
"""


def arenas(how, path):
    done = subprocess.run([sys.executable, "-c", CODE, how, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="only glibc tells of its arenas")
def test_threads_share_two_arenas(tmp_path):
    assert arenas("low", tmp_path / "low.xml") <= 2 < arenas("usual", tmp_path / "usual.xml")


def test_without_a_c_library_that_can_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_memory_low() is False
