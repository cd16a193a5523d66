"""What torch's own pattern matcher says of a profile. It is torch's private code, so its failing must not be ours."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

logger = logging.getLogger("sonde")

# Those that torch reports itself; it leaves its pattern for indexing in a loop out, which matches too much.
_NAMES: Final = (
    "ExtraCUDACopyPattern",
    "FP32MatMulPattern",
    "OptimizerSingleTensorPattern",
    "SynchronizedDataLoaderPattern",
    "GradNotSetToNonePattern",
    "Conv2dBiasFollowedByBatchNorm2dPattern",
    "MatMulDimInFP16Pattern",
)
# Whatever private code does when its assumptions break.
_FAILURES: Final = (
    AttributeError,
    AssertionError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    UnicodeDecodeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPattern:
    """A pattern that torch knows to be slow, and where it was matched first."""

    name: str
    description: str
    matches: int
    where: str
    url: str


def torch_patterns(recording: Any) -> list[TorchPattern]:
    """Return the patterns that match a finished recording; one that fails is left out and logged."""
    try:
        from torch.profiler import _pattern_matcher as matcher
    except ImportError:
        return []
    found = []
    for name in _NAMES:
        try:
            pattern = getattr(matcher, name)(SimpleNamespace(profiler=recording))
            events = pattern.matched_events()
            if events:
                found.append(_pattern(pattern, events, matcher))
        except _FAILURES as error:
            logger.debug("torch's pattern %s could not be matched: %s", name, error)
    return found


def _pattern(pattern: Any, events: list[Any], matcher: Any) -> TorchPattern:
    where = matcher.source_code_location(events[0])
    return TorchPattern(
        name=pattern.name,
        description=" ".join(pattern.description.split()),
        matches=len(events),
        where="" if where.startswith(("No source", "sonde/")) else where,
        url=pattern.url or "",
    )
