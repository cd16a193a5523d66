"""Check the packages as users get them: built, installed into fresh environments, without the sources.

    make wheel-test                                  # or: python tests/release/check_wheel.py [--quick]

Builds sdist and wheel (also without a compiler), then checks base dependencies alone, each extra alone, and the core of
the tests against the installed wheel. `--quick` leaves out the large extras and the tests. Takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

from environments import PROJECT, TOOLS, Environment, build, build_without_compiler

SMALL = ("view", "export", "fleet", "tensorboard", "legacy", "yaml", "mcp", "notebook", "remote")
NEED_TORCH = ("ignite", "accelerate", "transformers", "lightning", "wandb", "mlflow", "comet")
NOT_FOR_USERS = {"torch", "bench", "compare", "dev", "docs", "frameworks", "release"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, to be used again")
    options = parser.parse_args()
    missing = set(PROJECT["optional-dependencies"]) - {*SMALL, *NEED_TORCH} - NOT_FOR_USERS
    assert not missing, f"not checked: {missing}"
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        return check(place, Path(temporary) / "dist", quick=options.quick)


def check(place: Path, dist: Path, *, quick: bool) -> int:
    sdist, wheel = build(dist)
    plain = build_without_compiler(sdist, dist / "without-compiler")
    check_contents(wheel, plain)
    base = Environment(place / "base", pinned=True)
    base.install(wheel)
    base.check("without_torch.py")
    for extra in SMALL:
        alone = Environment(place / extra, pinned=True)
        alone.install(f"{wheel}[{extra}]")
        alone.check("with_extra.py", extra)
    full = Environment(place / "full", pinned=True)
    full.install(f"{wheel}[torch,view,export]", *TOOLS)
    full.check("as_a_user.py")
    if quick:
        return 0
    for extra in NEED_TORCH:
        full.install(f"{wheel}[{extra}]")
        full.check("with_extra.py", extra)
    code = full.test()
    slow = Environment(place / "without-compiler", pinned=True)
    slow.install(f"{plain}[torch,view]")
    slow.check("as_a_user.py", "--without-compiler")
    return code


def check_contents(wheel: Path, plain: Path) -> None:
    """Check that the wheel serves every Python from 3.11 on, and holds the library, types and assets."""
    assert "-cp311-abi3-" in wheel.name, wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert any(name.startswith("sonde/stats/_native.abi3") for name in names)
    for needed in ("sonde/py.typed", "sonde/diagnosis/reliability.json", "sonde/stats/cuda/summary.cu"):
        assert needed in names, needed
    assert any(name.startswith("sonde/views/web/assets/pages/") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "src"))]
    assert not [name for name in zipfile.ZipFile(plain).namelist() if name.endswith((".so", ".pyd"))]


if __name__ == "__main__":
    sys.exit(main())
