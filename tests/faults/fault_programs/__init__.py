"""Small training programs with one known fault each, and healthy ones: the fault benchmark.

They know nothing of Sonde. `load()` returns all of them; see `registry.Program` for what each says about itself.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from fault_programs.registry import PROGRAMS, Program


def load() -> list[Program]:
    """Return all programs, in the order of their files' names and of the code."""
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        import_module(f"fault_programs.{path.parent.name}.{path.stem}")
    return sorted(PROGRAMS.values(), key=lambda program: (program.kind is None, program.set, program.group))
