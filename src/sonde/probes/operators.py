"""The table of operators of a profile: how often, how long, how much memory, how many FLOPs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sonde.probes.profiling_tree import OperatorCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """All calls of one operator with one set of input shapes. Times in milliseconds, over the whole profile."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int
    self_cpu_ms: float
    cpu_ms: float
    self_cuda_ms: float
    cuda_ms: float
    self_bytes: int
    """Memory it allocated itself, less what it freed."""
    flops: int | None
    """None where torch has no formula."""
    share: float
    """Of all operators' own time: on CUDA devices if any worked, else on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """All copies of one direction, as the device saw them."""

    what: str
    """`HtoD (Pageable -> Device)`: to the device, from memory that is not pinned."""
    calls: int
    ms: float


def copy_table(copies: Iterable[tuple[str, int]]) -> list[Copies]:
    """Return copies by direction, the longest first, from names and nanoseconds.

    >>> copy_table([("HtoD", 2_000_000), ("HtoD", 1_000_000)])
    [Copies(what='HtoD', calls=2, ms=3.0)]
    """
    groups: dict[str, list[int]] = {}
    for what, nanoseconds in copies:
        groups.setdefault(what, []).append(nanoseconds)
    table = [Copies(what=what, calls=len(group), ms=sum(group) / 1e6) for what, group in groups.items()]
    return sorted(table, key=lambda row: -row.ms)


def operator_table(calls: Iterable[OperatorCall], *, by_shape: bool = True) -> list[Operator]:
    """Return operators, the most expensive first."""
    groups: dict[tuple[str, tuple[tuple[int, ...], ...]], list[OperatorCall]] = {}
    for call in calls:
        groups.setdefault((call.name, call.shapes if by_shape else ()), []).append(call)
    on_cuda = any(call.self_cuda_ns for group in groups.values() for call in group)
    whole = sum(_cost(call, on_cuda) for group in groups.values() for call in group)
    table = [_operator(name, shapes, group, on_cuda, whole) for (name, shapes), group in groups.items()]
    return sorted(table, key=lambda row: -row.share)


def _cost(call: OperatorCall, on_cuda: bool) -> int:
    return call.self_cuda_ns if on_cuda else call.self_ns


def _operator(
    name: str, shapes: tuple[tuple[int, ...], ...], group: list[OperatorCall], on_cuda: bool, whole: int
) -> Operator:
    flops = sum(call.flops for call in group)
    # An overload that calls another of the same name is one call, and its time must not count twice.
    outer = [call for call in group if call.parent != name]
    return Operator(
        name=name,
        shapes=shapes,
        calls=len(outer),
        self_cpu_ms=sum(call.self_ns for call in group) / 1e6,
        cpu_ms=sum(call.duration_ns for call in outer) / 1e6,
        self_cuda_ms=sum(call.self_cuda_ns for call in group) / 1e6,
        cuda_ms=sum(call.cuda_ns for call in outer) / 1e6,
        self_bytes=sum(call.self_bytes for call in group),
        flops=flops or None,
        share=sum(_cost(call, on_cuda) for call in group) / whole if whole else 0.0,
    )
