"""Build Sonde's packages and install them into fresh environments, away from the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The tests of what records, keeps and reads runs. They need no sources, browser or other ranks.
CORE = ("core", "hooks", "analysis", "store", "stats", "record", "sensors", "session", "diagnosis", "cli")
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "pandas",
    "scikit-learn",
    "PyYAML",
    "joblib",
    "httpx",
)


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command, show it, and stop here if it fails."""
    words = [str(word) for word in command]
    print("$", " ".join(words), flush=True)
    return subprocess.run(words, check=True, text=True, **options)


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and from that the wheel; return both."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return sdist, wheel


def build_without_compiler(sdist: Path, folder: Path) -> Path:
    """Build a wheel where the C compiler fails; the package is whole but for the C library."""
    environment = {**os.environ, "CC": "false"}
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sdist, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment of its own; with `pinned`, of the versions in constraints.txt."""

    def __init__(self, folder: Path, *, pinned: bool = False) -> None:
        self.folder = folder
        self._options = ["-c", ROOT / "constraints.txt"] if pinned else []
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        if not self.python.exists():
            run(sys.executable, "-m", "venv", "--without-pip", folder)

    def install(self, *what: object) -> None:
        """Install packages."""
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        run(*pip, "install", "-q", *self._options, *what)

    def check(self, program: str, *arguments: object) -> None:
        """Run a program of this folder, in an empty one, without anything of ours on the path."""
        empty = self.folder / "empty"
        shutil.rmtree(empty, ignore_errors=True)
        empty.mkdir()
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run(self.python, Path(__file__).parent / program, *arguments, cwd=empty, env=clean)

    def test(self, folders: tuple[str, ...] = CORE) -> int:
        """Run tests against what is installed: a copy of them, without the sources. Return pytest's exit code."""
        place = self.folder / "tests-only"
        shutil.rmtree(place, ignore_errors=True)
        for name in ("tests", "docs"):  # some tests read what a page says
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        paths = [f"tests/{name}" for name in folders]
        command = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto", *paths]
        print("$", " ".join(command), flush=True)
        return subprocess.run(command, cwd=place, env=clean, check=False).returncode
