import subprocess
import sys


def test_the_store_does_without_torch_and_pickle(tmp_path):
    code = """
import sys
from tests.store.making import *
from sonde.store import open_run, verify, list_runs
write_run(sys.argv[1], range(3))
run = open_run(sys.argv[1]); run.series("layer0.weight"); run.at(1); verify(sys.argv[1]); list_runs(sys.argv[1])
assert not {"torch", "pandas", "pyarrow"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)


def test_no_code_of_the_store_mentions_pickle():
    from pathlib import Path

    import sonde.store

    for path in Path(sonde.store.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert "pickle" not in text
        assert "import torch" not in text
