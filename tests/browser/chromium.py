"""Find the Chromium that browser tests and the gallery drive. Run as a script, it tells whether there is one."""

from __future__ import annotations

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium was found; `make test` installs it, or set SONDE_CHROMIUM=/path/to/chromium"


def find() -> str | None:
    """Return the path of a Chromium: the one named by SONDE_CHROMIUM, or the first on the PATH."""
    named = os.environ.get("SONDE_CHROMIUM")
    if named:
        return shutil.which(named)
    return next((path for path in map(shutil.which, NAMES) if path), None)


if __name__ == "__main__":
    sys.exit(find() is None)
