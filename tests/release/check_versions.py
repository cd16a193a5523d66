"""Run the core of the tests on the oldest and the newest versions of what Sonde needs.

    make compat                                      # or: python tests/release/check_versions.py [oldest|newest]

The oldest are the lower bounds of pyproject.toml, for base dependencies and the extras torch, view and export; the
newest are what pip finds. Torch's own packages for Linux bring CUDA: the two environments take about
12 GB and, at 10 MB/s, a quarter of an hour to download. Pip's own settings can
choose an index with a smaller torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from environments import PROJECT, TOOLS, Environment, build

EXTRAS = ("torch", "view", "export")
OF_THAT_TIME = ["pandas<3"]
"""Tools of the tests that work with the oldest versions: pyarrow 15 uses what pandas 3 warns about."""


def lowest() -> list[str]:
    """Return the lower bounds as pins: `numpy>=1.26` is `numpy==1.26`."""
    extras = PROJECT["optional-dependencies"]
    needs = [*PROJECT["dependencies"], *(need for extra in EXTRAS for need in extras[extra])]
    pins = [re.sub(r">=([\d.]+).*", r"==\1", need) for need in needs]
    assert all("==" in pin for pin in pins), pins
    return pins


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", choices=["oldest", "newest"], default=["oldest", "newest"])
    parser.add_argument("--keep", type=Path, help="a folder for the environments, to be used again")
    options = parser.parse_args()
    codes = {}
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        _, wheel = build(Path(temporary) / "dist")
        for which in options.which:
            environment = Environment(place / which)
            environment.install(
                f"{wheel}[{','.join(EXTRAS)}]",
                *([*lowest(), *OF_THAT_TIME] if which == "oldest" else ["--upgrade"]),
                *TOOLS,
            )
            environment.check("as_a_user.py")
            codes[which] = environment.test()
    print(codes)
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
