"""Record, read and check a run where Python offers what it offers on Windows.

It runs on Linux: what Windows lacks is taken away once torch is imported. What only a real machine can show (sharing of
open files, permissions, another compiler) is not tested; docs/install.md says so. macOS lacks a part of the same.
"""

import subprocess
import sys

from tests.waiting import PATIENCE_S

# Not `os.statvfs`: on Linux `shutil.disk_usage` calls it, and Windows has that function.
MISSING = {
    "os": "register_at_fork fork nice sched_setscheduler sched_getaffinity O_CLOEXEC O_NOFOLLOW O_NONBLOCK getloadavg "
    "pread preadv pwrite posix_fadvise getuid geteuid uname killpg setsid mkfifo",
    "mmap": "MADV_WILLNEED MADV_RANDOM MADV_SEQUENTIAL MADV_DONTNEED MADV_FREE MADV_NORMAL",
    "signal": "SIGALRM SIGHUP SIGKILL SIGUSR1 SIGUSR2 setitimer ITIMER_REAL pthread_sigmask",
}
CODE = f"""
import importlib, psutil, sys, torch  # psutil has a module of its own for each system
sys.modules.update(dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp")))
for name, missing in {MISSING}.items():
    module = importlib.import_module(name)
    for each in missing.split():
        assert not hasattr(module, each) or delattr(module, each) is None
import sonde
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with sonde.watch(model, optimizer, run=sys.argv[1], budget=None) as session:
    for _ in range(30):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
run = sonde.open_run(sys.argv[1])
assert len(run.series("0.weight:gradient", "norm").values) == 30
assert "missing_zero_grad" in [finding.kind for finding in sonde.diagnose(run).findings]
assert sonde.verify(sys.argv[1]).ok
from typer.testing import CliRunner
from sonde.cli.main import app
assert "missing_zero_grad" in CliRunner().invoke(app, ["diagnose", sys.argv[1]]).stdout
import sonde.capture, sonde.integrations.discovery, sonde.views.web
"""


def test_a_run_is_recorded_and_read_without_what_windows_lacks(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
