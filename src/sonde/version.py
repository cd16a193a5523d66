"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _installed() -> str:
    try:
        return version("sonde")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "0+source"


VERSION: Final = _installed()
__version__: Final = VERSION
