"""Explain what makes a step slow, with its numbers: host waits, known patterns, unused arithmetic."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch

from sonde.probes.profile.calls import Copies, Frame, OperatorCall, ProfileTree

# --------------------------------------------------------------------------------
# What torch's own pattern matcher says of a profile. It is torch's private code, so its failing must not be ours.


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


# --------------------------------------------------------------------------------
# How much of the machine's arithmetic a profile uses, against a matrix product measured on the same machine.


_SIZE_CPU: Final = 512
_SIZE_CUDA: Final = 4096
_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """FLOPs per second of the profiled stretch against the best that a plain float32 product reached."""

    flops_per_second: float
    peak_flops_per_second: float

    @property
    def share(self) -> float:
        """Used over possible."""
        return self.flops_per_second / self.peak_flops_per_second


def utilisation(trees: Iterable[ProfileTree], *, peak: Callable[[bool], float] | None = None) -> Utilisation | None:
    """Return the utilisation of all recordings together, or None if no FLOPs were counted."""
    flops, nanoseconds, on_cuda = 0, 0, False
    for tree in trees:
        if tree.calls:
            flops += sum(call.flops for call in tree.calls)
            begin = min(call.start_ns for call in tree.calls)
            nanoseconds += max(call.start_ns + call.duration_ns for call in tree.calls) - begin
            on_cuda = on_cuda or tree.device_ns > 0
    if not flops or not nanoseconds:
        return None
    return Utilisation(
        flops_per_second=flops / nanoseconds * 1e9, peak_flops_per_second=(peak or measure_peak)(on_cuda)
    )


def measure_peak(on_cuda: bool) -> float:
    """Return the FLOPs per second of a large float32 product. Waits for the device: call it outside of a loop."""
    size, device = (_SIZE_CUDA, "cuda") if on_cuda else (_SIZE_CPU, "cpu")
    with torch.no_grad():
        left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
        best = min(_time(left, right, on_cuda) for _ in range(_TRIES + 1))
    return 2.0 * size**3 / best


def _time(left: torch.Tensor, right: torch.Tensor, on_cuda: bool) -> float:
    begin = time.perf_counter()
    left @ right
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# --------------------------------------------------------------------------------
# Where the host waits for the device, or would: code reads a value that must have been computed first.


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
        if (waits or call.name in _ASKING) and not _is_not_the_users(call):
            found.setdefault((_what(call), _line(call.stack)), []).append((call.duration_ns, waits))
    for wait in tree.waits:
        if wait.operator is None:
            found.setdefault((wait.name, None), []).append((wait.duration_ns, True))
    syncs = [_sync(what, frame, times) for (what, frame), times in found.items()]
    return sorted(syncs, key=lambda sync: (-sync.calls, sync.where))


def _is_not_the_users(call: OperatorCall) -> bool:
    """Return whether torch itself reads the value: a step counter, a sampler's seed, anomaly mode's search for NaN.

    What Sonde reads is not the user's either.
    """
    if call.by_sonde or not call.stack:
        return call.by_sonde or call.by_torch
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


# --------------------------------------------------------------------------------
# What makes a step slow, in a sentence with its numbers; nothing on a healthy program.


# Shares of the step above which a part of it is reported.
DATA_WAIT: Final = 0.2
OPTIMIZER: Final = 0.35
OTHER: Final = 0.5
COPIES: Final = 0.1
# A line that makes the host wait this often in a step, or for this share of it. One `.item()` for logging is usual.
SYNCS_PER_STEP: Final = 4
SYNC_SHARE: Final = 0.05
# Of several layers or operations: one that takes this share of the time of all, and this many times as long as the
# median one. In a model of two layers each has a large share.
OUTSTANDING_SHARE: Final = 0.3
OUTSTANDING_FACTOR: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One cause and the evidence for it."""

    kind: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


def judge_phases(
    shares: Mapping[str, float], *, step_ms: float, workers: int | None, optimizer: Mapping[str, Any] | None = None
) -> list[Verdict]:
    """Judge where the time of a step goes. `workers` are those of the slowest DataLoader seen, if one was seen."""
    found = []
    waiting = shares.get("data_wait", 0.0)
    if waiting >= DATA_WAIT:
        found.append(_loader(waiting, step_ms, workers))
    stepping = shares.get("optimizer", 0.0)
    if stepping >= OPTIMIZER:
        found.append(_optimizer(stepping, step_ms, optimizer or {}))
    other = shares.get("other", 0.0)
    if other >= OTHER:
        found.append(
            Verdict(
                kind="other",
                text=f"{other:.0%} of the step is neither loading, forward, backward nor optimizer: look at what the "
                "loop does between them (logging, plotting, moving data). Other loaders than DataLoader count here "
                "unless they are wrapped with session.loading(loader).",
                evidence={"share": other, "step_ms": step_ms},
            )
        )
    return found


def outstanding(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return those layers or operations that take far more time than the others, with their share of it.

    >>> outstanding({"a": 1.0, "b": 1.0, "c": 8.0})
    {'c': 0.8}
    """
    total = sum(seconds.values())
    if total <= 0 or len(seconds) < 2:
        return {}
    middle = statistics.median(seconds.values())
    return {
        name: spent / total
        for name, spent in seconds.items()
        if spent / total > OUTSTANDING_SHARE and spent > OUTSTANDING_FACTOR * middle
    }


def judge_syncs(syncs: Iterable[HostSync], *, steps: int, step_ms: float) -> list[Verdict]:
    """Name the lines that make the host wait often, or long."""
    found = []
    for sync in syncs:
        per_step, share = sync.calls / max(steps, 1), sync.ms / max(steps, 1) / step_ms if step_ms else 0.0
        # On the CPU asking costs nothing, so its time proves nothing there.
        if per_step >= SYNCS_PER_STEP or (sync.waits and share >= SYNC_SHARE):
            found.append(_verdict_sync(sync, per_step, share))
    return found


def judge_copies(copies: Iterable[Copies], *, steps: int, step_ms: float) -> list[Verdict]:
    """Name copies from memory that is not pinned, which hold the host up, if they take long."""
    found = []
    for each in copies:
        share = each.ms / max(steps, 1) / step_ms if step_ms else 0.0
        if each.what.startswith("HtoD (Pageable") and share >= COPIES:
            found.append(
                Verdict(
                    kind="copies",
                    text=f"copying to the device takes {share:.0%} of the step, from memory that is not pinned: pass "
                    "pin_memory=True to the loader and non_blocking=True to .to(device).",
                    evidence={"share": share, "calls": each.calls, "ms": each.ms},
                )
            )
    return found


def judge_patterns(patterns: Sequence[TorchPattern], *, quiet: Iterable[str] = ()) -> list[Verdict]:
    """Pass on what torch's own pattern matcher found, unless a verdict of ours says it already."""
    silent = set(quiet)
    return [
        Verdict(
            kind=f"torch: {pattern.name}",
            text=f"torch's pattern matcher: {pattern.description} ({pattern.matches} times"
            + (f", first at {pattern.where})" if pattern.where else ")"),
            evidence={"matches": pattern.matches, "where": pattern.where, "url": pattern.url},
        )
        for pattern in patterns
        if pattern.name not in silent
    ]


def _loader(waiting: float, step_ms: float, workers: int | None) -> Verdict:
    if workers is None:
        cause = "the loader is slower than the model; prepare batches ahead, in other processes"
    elif workers == 0:
        cause = "num_workers is 0, so every batch is made while the model waits; pass num_workers"
    else:
        cause = f"{workers} worker(s) are too few or each is too slow; add workers or make the dataset cheaper"
    return Verdict(
        kind="data_wait",
        text=f"{waiting:.0%} of the step waits for data: {cause}.",
        evidence={"share": waiting, "step_ms": step_ms, "data_wait_ms": waiting * step_ms, "num_workers": workers},
    )


def _optimizer(stepping: float, step_ms: float, optimizer: Mapping[str, Any]) -> Verdict:
    if optimizer.get("fused"):
        cause = "it is fused already; fewer or larger parameters, or a larger batch, would make it count less"
    elif optimizer.get("foreach") is False:
        cause = "it steps one tensor after the other; pass foreach=True or fused=True"
    else:
        cause = "pass fused=True if its class takes it, or let a step see a larger batch"
    return Verdict(
        kind="optimizer",
        text=f"the optimizer takes {stepping:.0%} of the step: {cause}.",
        evidence={"share": stepping, "step_ms": step_ms, **optimizer},
    )


def _verdict_sync(sync: HostSync, per_step: float, share: float) -> Verdict:
    times = f"{per_step:.0f}" if per_step >= 2 else f"{per_step:.1f}"
    where = f" at {sync.where}" + (f" ({sync.function})" if sync.function not in ("", "<module>") else "")
    cost = f"the host waits for the device in {share:.0%} of the step" if sync.waits else "on a GPU each call waits"
    return Verdict(
        kind="host_sync",
        text=f"{sync.what} called {times} times a step{where if sync.where else ''}: {cost}; keep values on the device "
        "and read them once a step, or less often.",
        evidence={"where": sync.where, "calls_per_step": per_step, "share": share, "waits": sync.waits},
    )
