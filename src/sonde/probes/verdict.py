"""What makes a step slow, in a sentence with its numbers; nothing on a healthy program."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sonde.probes.host_syncs import HostSync
from sonde.probes.operators import Copies
from sonde.probes.profiling_patterns import TorchPattern

# Shares of the step beyond which a part of it is worth a word.
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
    """One cause, what it was told from, and its numbers."""

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
                "loop does between them (logging, plotting, moving data). A loader that is no DataLoader counts here "
                "unless it is wrapped with session.loading(loader).",
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
            found.append(_sync(sync, per_step, share))
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
        cause = "num_workers is 0, so every batch is made while the model stands still; pass num_workers"
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


def _sync(sync: HostSync, per_step: float, share: float) -> Verdict:
    times = f"{per_step:.0f}" if per_step >= 2 else f"{per_step:.1f}"
    where = f" at {sync.where}" + (f" ({sync.function})" if sync.function not in ("", "<module>") else "")
    cost = f"the host waits for the device in {share:.0%} of the step" if sync.waits else "on a GPU each call waits"
    return Verdict(
        kind="host_sync",
        text=f"{sync.what} called {times} times a step{where if sync.where else ''}: {cost}; keep values on the device "
        "and read them once a step, or less often.",
        evidence={"where": sync.where, "calls_per_step": per_step, "share": share, "waits": sync.waits},
    )
