"""What a machine without torch gets: everything that reads, and a clear word about what records."""

import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Block())
import sonde
"""


def run_without_torch(code):
    subprocess.run([sys.executable, "-c", BLOCKED + code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("package", ["sonde", "sonde.debug", "sonde.pytorch_debugging"])
def test_a_name_that_needs_torch_says_how_to_install_it(package):
    run_without_torch(f"""
import {package} as package
hinted = []
for name in package.__all__:
    try:
        getattr(package, name)
    except sonde.MissingExtra as error:
        assert str(error).startswith(f"{{package.__name__}}.{{name}} needs torch, which is not installed."), error
        assert str(error).endswith("Run: pip install 'sonde[torch]'"), error
        hinted.append(name)
if package is sonde:
    verbs = {{"checkup", "load_bundle", "open_session", "watch"}}
    assert set(hinted) == verbs | {{"Bundle", "Capture", "Checkup", "Options", "Session"}}, hinted
else:
    assert hinted
""")


def test_an_import_of_a_name_that_needs_torch_fails_with_the_same_hint():
    run_without_torch("""
try:
    from sonde import watch
except ImportError as error:
    assert "pip install 'sonde[torch]'" in str(error)
else:
    raise AssertionError
""")


def test_reading_and_diagnosing_work_without_torch():
    run_without_torch("sonde.open_run, sonde.diagnose, sonde.list_runs, sonde.load_debug_outputs, sonde.verify")
