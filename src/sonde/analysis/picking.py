"""The former place of `pick`, kept for programs that import it from here."""

from sonde.analysis.samples import pick

__all__ = ["pick"]
