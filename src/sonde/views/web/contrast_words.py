"""What separates failed samples from good ones, as the page *Good against failed* takes it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.analysis.contrast import Contrast, Separation
from sonde.views.web.sample_store import sample_text

_MOST_SEPARATIONS: Final = 60
_DRAWN: Final = 12
_EXAMPLES: Final = 8


def describe_contrast(found: Contrast) -> dict[str, Any]:
    """Return what separates best, with the values of the first few to be drawn, and samples to look at."""
    return {
        "failed": len(found.failed),
        "good": len(found.good),
        "features": found.features,
        "rough": found.is_rough,
        "of_batches": list(found.of_batches[:_MOST_SEPARATIONS]),
        "separations": [
            _separation(each, found.values[each.feature] if rank < _DRAWN else None, len(found.failed))
            for rank, each in enumerate(found.separations[:_MOST_SEPARATIONS])
        ],
        "examples": _examples(found),
    }


def _separation(each: Separation, values: NDArray[np.float64] | None, failed: int) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "words": each.feature.words,
        "debugger": each.feature.debugger,
        "path": each.feature.path,
        "statistic": each.feature.statistic,
        "channel": each.feature.channel,
        "effect": each.effect,
        "d": each.cohens_d,
        "p": each.p,
        "q": each.q,
        "failed_median": each.failed_median,
        "good_median": each.good_median,
    }
    if values is not None:
        plain |= {"failed_values": values[:failed], "good_values": values[failed:]}
    return plain


def _examples(found: Contrast) -> dict[str, list[str]]:
    """Return the worst of the failed and the best of the good."""
    return {
        "failed": [sample_text(each) for each in found.failed[:_EXAMPLES]],
        "good": [sample_text(each) for each in found.good[::-1][:_EXAMPLES]],
    }
