"""Names of the table of statistics under their first home; see `sonde.core.statistics`."""

from sonde.core.statistics import abs_max as abs_max
from sonde.core.statistics import abs_quantile as abs_quantile
from sonde.core.statistics import compute as compute
from sonde.core.statistics import inf as inf
from sonde.core.statistics import names
from sonde.core.statistics import nonfinite as nonfinite
from sonde.core.statistics import norm as norm
from sonde.core.statistics import std as std

NAMES = names()
