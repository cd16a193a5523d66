"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

import sonde

SOURCE = Path(sonde.__file__).parent
WAITS = {"item", "cpu", "tolist", "numpy", "synchronize"}
# On the CPU reading a number is no wait; these files serve the CPU only.
CPU_ONLY = {"torch_on_cpu.py", "compiled.py", "tables.py", "preparation.py"}


def modules(*folders):
    return [path for folder in folders for path in (SOURCE / folder).rglob("*.py")]


@pytest.mark.parametrize("path", modules("sensors", "stats", "record", "hooks"), ids=lambda path: path.name)
def test_nothing_in_the_training_thread_waits_for_a_device(path):
    if path.name in CPU_ONLY:
        return
    tree = ast.parse(path.read_text())
    # Shipment.take is called by the worker thread, warm_up before the first step: waiting is their purpose.
    may_wait = ("take", "warm_up", "_value_on_cpu")
    free = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in may_wait]
    allowed = {id(node) for function in free for node in ast.walk(function)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in allowed]
    waiting = [ast.unparse(call) for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS]
    assert not waiting


def test_only_the_thread_edges_catch_everything():
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    broad = {
        name
        for name, text in texts.items()
        if re.search(r"except\s*(:|\(?(Base)?Exception)", text) and any(swallowing(ast.parse(text)))
    }
    assert "hooks/guard.py" in broad
    # The doctor isolates one rule's fault from the others, a fleet one run's; hooks and exceptions are the user's code.
    edges = {"hooks/guard.py", "record/worker.py", "record/heart.py", "capture/worker.py", "store/log/sealer.py"}
    assert broad <= edges | {"core/outcome.py", "diagnosis/doctor.py", "analysis/fleet.py", "debug/hooks.py"}


def swallowing(tree):
    """Yield handlers that catch everything and do not raise it again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            if caught in ("Exception", "BaseException") and not isinstance(node.body[-1], ast.Raise):
                yield node


def test_reading_leaves_torch_alone():
    code = (
        "import sys, sonde; sonde.open_run, sonde.Run, sonde.verify, sonde.every, sonde.Reading;"
        "import sonde.cli.main, sonde.views.terminal, sonde.analysis;"
        "assert not {'torch', 'pandas', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_recording_imports_only_what_a_training_container_has():
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'rich', 'typer', 'psutil', 'pandas', 'pyarrow', 'ml_dtypes'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import tempfile, torch, sonde\n"
        "model = torch.nn.Linear(2, 2)\n"
        "folder = tempfile.mkdtemp()\n"
        "with sonde.watch(model, run=folder + '/run', on_error='raise') as session:\n"
        "    model(torch.ones(1, 2)).sum().backward(); session.step()\n"
        "import os; os._exit(0)  # tearing torch down takes a second\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_the_public_names_are_sorted_exact_and_there():
    assert sonde.__all__ == sorted(sonde.__all__)
    for name in sonde.__all__:
        assert getattr(sonde, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'wacth'"):
        sonde.wacth  # noqa: B018
