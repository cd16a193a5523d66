import os
import subprocess
import sys
from dataclasses import replace

from sonde.store import lease


def test_a_writer_on_this_host_lives_as_long_as_its_process():
    holder = lease.mine("live", 0, beat=0.0)
    assert lease.is_alive(holder, now=1e12)
    assert not lease.is_alive(replace(holder, state="finished"), now=0.0)


def test_a_process_number_that_was_used_again_does_not_count():
    holder = replace(lease.mine("live", 0, beat=0.0), process_start="1")
    assert not lease.is_alive(holder, now=0.0)


def test_a_dead_process_is_dead_even_before_its_parent_has_noticed():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    holder = replace(lease.mine("live", 0, beat=0.0), pid=child.pid, process_start=lease.process_start(child.pid))
    assert not lease.is_alive(holder, now=0.0)
    child.wait()
    assert not lease.is_alive(holder, now=0.0)


def test_a_writer_elsewhere_lives_as_long_as_it_gives_signs():
    holder = replace(lease.mine("live", 0, beat=1000.0), host="elsewhere")
    assert lease.is_alive(holder, now=1000.0 + lease.STALE_S - 1)
    assert not lease.is_alive(holder, now=1000.0 + lease.STALE_S)
    assert lease.status(holder, now=1e9) == "crashed"
    assert lease.status(None, now=0.0) == "crashed"


def test_start_times_can_be_had_without_proc():
    found = lease._process_start_psutil(os.getpid())
    assert found == lease._process_start_psutil(os.getpid())
    assert lease._process_start_psutil(2**22 + 5) is None
