import ast
import sys
from pathlib import Path

import pytest
from tests.waiting import run_to_end

import sonde.store

STORE = Path(sonde.store.__file__).parent


def test_the_store_does_without_torch_and_pickle(tmp_path):
    code = """
import sys
from tests.store.making import *
from sonde.store import open_run, verify, list_runs
write_run(sys.argv[1], range(3))
run = open_run(sys.argv[1]); run.series("layer0.weight"); run.at(1); verify(sys.argv[1]); list_runs(sys.argv[1])
assert not {"torch", "pandas", "pyarrow"} & set(sys.modules)
"""
    done = run_to_end([sys.executable, "-c", code, tmp_path / "run"], text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(STORE.rglob("*.py")), ids=lambda path: str(path.relative_to(STORE)))
def test_nothing_in_the_store_can_run_code_from_a_file(path):
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"pickle", "joblib", "torch", "marshal", "shelve", "dill"}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}
