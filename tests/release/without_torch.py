"""What base dependencies give: everything that reads, and a clear message about what records. Run by check_wheel.py."""

import importlib.util
import resource
import shutil
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "store" / "golden_0_2"
IMPORT_S = 0.25
"""The most processor time that importing the reader may take, beyond starting Python. It uses one core."""


def sonde(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "sonde", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def seconds(code):
    """Return the processor time of a start, the least of several: others use the machine too."""
    times = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


assert importlib.util.find_spec("torch") is None
import sonde as package  # noqa: E402

assert "site-packages" in package.__file__
for name in ("watch", "open_session", "checkup"):
    try:
        getattr(package, name)
    except package.MissingExtra as error:
        assert str(error) == f"sonde.{name} needs torch, which is not installed. Run: pip install 'sonde[torch]'", error
    else:
        raise AssertionError(name)
shutil.copytree(GOLDEN, "runs/golden")
run = package.open_run("runs/golden")
assert run.sites
assert len(run.series(run.sites[0], "mean").values)
package.diagnose(run)
assert "golden" in sonde("runs", "runs")
assert sonde("show", "runs/golden")
assert sonde("diagnose", "runs/golden", code=2)
assert sonde("export", "runs/golden", "--to", "csv", "--out", "-")
assert "not possible: torch is not installed" in sonde("version", "--verbose")
assert "pip install 'sonde[view]'" in sonde("view", "runs", code=2)
Path("train.py").write_text("import torch\n")
sonde("run", "train.py", code=1)
spent = seconds("import sonde; sonde.open_run") - seconds("pass")
print(f"importing the reader: {spent:.3f} s")
assert spent <= IMPORT_S
