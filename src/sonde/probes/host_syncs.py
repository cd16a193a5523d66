"""Where the host waits for the device, or would: code reads a value that must have been computed first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sonde.probes.profiling_tree import Frame, OperatorCall, ProfileTree

# These hand a value, or a shape that depends on values, to the host. On the CPU they cost little.
_ASKING: Final = {"aten::_local_scalar_dense": "a number", "aten::nonzero": "a shape"}
_SPELLED: Final = {
    "item": ".item()",
    "tolist": ".tolist()",
    "nonzero": ".nonzero()",
    "cpu": ".cpu()",
    "to": ".to()",
    "where": "torch.where()",
    "synchronize": "synchronize()",
    "_cuda_synchronize": "torch.cuda.synchronize()",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSync:
    """One line of code that makes the host wait."""

    what: str
    """As the user wrote it: `.item()`, `.cpu()`, `bool(tensor)`; else the operator's name."""
    where: str
    """`file:line`; empty if the profile has no stacks."""
    function: str
    calls: int
    ms: float
    """Time on the host in these calls, waiting included."""
    waits: bool
    """Whether a wait for a CUDA device was seen; on the CPU the value is there already."""


def host_syncs(tree: ProfileTree) -> list[HostSync]:
    """Return the lines that make the host wait, the most frequent first. Torch's own optimizers are left out."""
    found: dict[tuple[str, Frame | None], list[tuple[int, bool]]] = {}
    waited = {id(wait.operator) for wait in tree.waits if wait.operator is not None}
    for call in tree.calls:
        waits = id(call) in waited
        if (waits or call.name in _ASKING) and not _is_torchs_own(call):
            found.setdefault((_what(call), _line(call.stack)), []).append((call.duration_ns, waits))
    for wait in tree.waits:
        if wait.operator is None:
            found.setdefault((wait.name, None), []).append((wait.duration_ns, True))
    syncs = [_sync(what, frame, times) for (what, frame), times in found.items()]
    return sorted(syncs, key=lambda sync: (-sync.calls, sync.where))


def _is_torchs_own(call: OperatorCall) -> bool:
    """Return whether torch itself reads the value: a step counter, a sampler's seed, anomaly mode's search for NaN."""
    if not call.stack:
        return call.by_torch
    nearest = next((frame.file for frame in call.stack if frame.file), "")
    return nearest.startswith(("torch/optim", "torch/utils/data")) and not call.cuda_ns


def _what(call: OperatorCall) -> str:
    if call.builtin:
        return _SPELLED.get(call.builtin, call.builtin)
    if call.parent == "aten::item" and not call.stack:
        return ".item()"
    return "bool(tensor)" if call.parent in ("aten::is_nonzero", "aten::item") else call.name


def _line(stack: Iterable[Frame]) -> Frame | None:
    return next((frame for frame in stack if frame.is_users), None)


def _sync(what: str, frame: Frame | None, times: list[tuple[int, bool]]) -> HostSync:
    return HostSync(
        what=what,
        where=str(frame) if frame else "",
        function=frame.function if frame else "",
        calls=len(times),
        ms=sum(duration for duration, _ in times) / 1e6,
        waits=any(waits for _, waits in times),
    )
