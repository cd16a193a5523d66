"""Rules about ranks that are slow, stuck or dead, judged from the times and heartbeats of all ranks."""

from __future__ import annotations

import math
from typing import Final

from sonde.core.heartbeat import Standing
from sonde.core.step_times import RankTimes, Slow, slowest
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Found, Threshold, above, fact, few, rule

LATE_SHARE = Threshold(0.03, "of a step: a rank that costs less than this is not worth a change")
LATE_SECONDS = Threshold(0.002, "s per step: the scheduler of the system delays any rank by about a millisecond")
BY_CHANCE = Threshold(1e-4, "probability: if all ranks were alike, each would be the slowest equally often")
SEVERE_SHARE = Threshold(0.25, "of a step: a quarter of all devices' time is lost to one rank")
MIN_STEPS: Final = 12
CHUNK: Final = 512
"""Steps (or windows of steps) that are judged together, so that a rank that is slow for a while is found."""

_ADVICE: Final = {
    "data_wait": (
        "Look at the loader of rank {rank}: more workers, prefetching, data on a local disk, or shards of equal size. "
        "Compare the storage and the processors of its host with those of the others."
    ),
    "to_device": (
        "Look at what rank {rank} does to a batch between its loader and the forward pass; use pinned memory and "
        "non_blocking copies."
    ),
    "forward": (
        "Compare what rank {rank} computes with the others: longer sequences, more samples, a slower or throttled "
        "device, or other programs on its host."
    ),
    "backward": (
        "Compare the device of rank {rank} with the others: clocks, temperature, other programs on its host, or more "
        "work in its batch."
    ),
    "optimizer": (
        "Compare the optimizer step of rank {rank} with the others: parameters of its own, work in hooks, or a slower "
        "device or host."
    ),
    "evaluation": (
        "Let all ranks take a part of the evaluation that rank {rank} runs alone, or run it in a job of its own."
    ),
    "other": (
        "Look at what rank {rank} does between the phases of a step: saving, logging, printing, or collecting garbage. "
        "Move it to a background thread, or do it less often."
    ),
    "watching": "Record fewer steps, or less, on rank {rank}: every=10, or a smaller budget.",
}


@rule(
    "slow_rank",
    fix=(
        "Look at what that rank does in the phase that the finding names: its loader and its disk, its batches, its "
        "device and host, or saving and logging that only it does."
    ),
    refute="Give that rank the data, device or host of another: if steps take as long, this finding is wrong.",
)
def slow_rank(case: Case) -> Found | None:
    """One rank makes all the others wait.

    Each rank records its own phases, and a wait is inferred where ranks leave a phase together that they entered apart.
    """
    if case.rank_times is None:
        raise NotMeasured("step times of more than one rank")
    slow = max(
        (found for times in case.rank_times for found in _slow(times)), key=lambda each: each.share, default=None
    )
    if slow is None:
        return None
    how = "in almost every step" if slow.is_constant else f"in {slow.phase_steps} of {slow.steps} steps"
    without = slow.step_s - slow.saved_s
    return Found(
        step=slow.first,
        sites=(f"rank {slow.rank}",),
        severity="critical" if slow.share >= SEVERE_SHARE else "warning",
        evidence=(
            above("part of each step that the others wait for it", slow.share, LATE_SHARE),
            fact("seconds of a step", slow.step_s),
            fact("seconds of a step without it", without),
            fact(f"its own seconds in {slow.phase}", slow.phase_s),
            fact(f"the others' seconds in {slow.phase}", slow.others_s),
            fact("steps in which it was late", slow.slow_steps),
        ),
        cause=(
            f"Rank {slow.rank} makes the other ranks wait {how}: its {slow.phase} takes {_ms(slow.phase_s)}, that of "
            f"the others {_ms(slow.others_s)}. A step takes {_ms(slow.step_s)} on average and would take "
            f"{_ms(without)} without it."
        ),
        fix=_ADVICE.get(slow.phase, _ADVICE["other"]).format(rank=slow.rank),
        data={"rank": slow.rank, "phase": slow.phase, "constant": slow.is_constant},
    )


def _slow(times: RankTimes) -> list[Slow]:
    """Return the slowest rank of each stretch of steps in which one is slow by more than chance."""
    found = []
    for first in range(0, max(1, len(times.steps) - MIN_STEPS), CHUNK):
        part = slice(first, first + CHUNK)
        some = RankTimes(times.ranks, times.steps[part], times.stride, times.spent[:, part])
        slow = slowest(some, LATE_SHARE, LATE_SECONDS)
        if (
            slow is not None
            and slow.share >= LATE_SHARE
            and slow.steps >= MIN_STEPS
            and not _is_chance(slow, len(times.ranks))
        ):
            found.append(slow)
    return found


def _is_chance(slow: Slow, ranks: int) -> bool:
    """Return whether one of many equal ranks might be the slowest as often as this one was."""
    tail = _binomial_tail(slow.slow_steps, slow.late_steps, 1 / ranks)
    return tail * ranks > BY_CHANCE


def _binomial_tail(least: int, trials: int, share: float) -> float:
    """Return the probability of at least this many successes.

    >>> round(_binomial_tail(2, 2, 0.5), 3), _binomial_tail(0, 5, 0.5)
    (0.25, 1.0)
    """
    if least <= 0:
        return 1.0
    logs = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(share) + (trials - k) * math.log1p(-share)
        for k in range(least, trials + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, logs))


def _ms(seconds: float) -> str:
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms"


# --------------------------------------------------------------------------------


@rule(
    "dead_rank",
    severity="critical",
    exact=True,
    explains=["stuck_rank"],
    fix=(
        "Look at the log of that rank and of its host: a process that ends without an exception was usually killed, "
        "often because memory ran out (dmesg). Resume from the last checkpoint."
    ),
    refute="Find the process of that rank on its host: if it runs, this finding is wrong.",
    lasting=True,
)
def dead_rank(case: Case) -> Found | None:
    """The process of a rank is gone, and the others go on or wait for it."""
    standing = _need(case)
    died = standing.those("died")
    if not died:
        return None
    beat = standing.beats[died[0]]
    where = f" at {beat.where}" if beat.where else ""
    return Found(
        step=beat.step,
        sites=_names(died),
        evidence=(
            fact("ranks that died", len(died)),
            fact("the last step it ended", beat.step),
            fact("bytes of memory it held last", float(beat.memory or math.nan)),
        ),
        cause=(
            f"{_ranks(died)} died: {standing.gone[died[0]]}. Its last heartbeat was at step {beat.step}, in "
            f"{beat.phase}{where}."
        ),
        data={"ranks": died[:64], "host": beat.host, "pid": beat.pid, "phase": beat.phase},
    )


@rule(
    "stuck_rank",
    severity="critical",
    fix=(
        "Find out why that rank did not reach the collective: its stack is in its folder of the run, in stacks.txt. A "
        "branch that only some ranks take, an exception that was caught, unequal numbers of batches, or a lock are the "
        "usual causes."
    ),
    refute="Wait: if the ranks go on by themselves, one of them was slow and not stuck.",
)
def stuck_rank(case: Case) -> Found | None:
    """Some ranks wait in a collective that another rank has not entered."""
    standing = _need(case)
    behind = standing.behind
    if not behind:
        return None
    waiting = [rank for rank in standing.those("waiting") if rank not in behind]
    first = standing.beats[waiting[0]]
    still = standing.age_s(waiting[0])
    return Found(
        step=first.step,
        sites=_names(behind),
        evidence=(
            fact("seconds that the others have waited", still),
            fact("ranks that wait", len(waiting)),
            fact("ranks that never came", len(behind)),
        ),
        cause=(
            f"{_ranks(waiting)} {'has' if len(waiting) == 1 else 'have'} waited for {still:.0f} s in "
            f"{_collective(standing, waiting[0])} after step {first.step}. {_missing(standing, behind)}"
        ),
        data={
            "waiting": waiting[:64],
            "missing": behind[:64],
            "files": [f"telemetry/r{rank:05d}/stacks.txt" for rank in standing.stacks],
            "stacks": {str(rank): text for rank, text in standing.stacks.items()},
        },
    )


def _need(case: Case) -> Standing:
    if case.standing is None or len(case.standing.beats) < 2:
        raise NotMeasured("heartbeats of more than one rank")
    return case.standing


def _missing(standing: Standing, behind: list[int]) -> str:
    beat = standing.beats[behind[0]]
    never = f"{_ranks(behind)} never came: "
    where = f" at {beat.where}" if beat.where else ""
    condition = standing.conditions[behind[0]]
    if condition == "ended":
        return f"{never}it ended its session ({beat.state}) after step {beat.step}."
    if condition == "died":
        return f"{never}it died: {standing.gone[behind[0]]}."
    if condition == "silent":
        return (
            f"{never}its interpreter gives no sign of life, though its process is there; last in {beat.phase}{where}."
        )
    if condition == "waiting":
        verb = "waits" if len(behind) == 1 else "wait"
        return f"{_ranks(behind)} {verb} in another collective, {_collective(standing, behind[0])}{where}."
    inside = f" in module {beat.module}" if beat.module else ""
    return f"{never}it has been in {beat.phase}{inside}{where} for {standing.age_s(behind[0]):.0f} s."


def _collective(standing: Standing, rank: int) -> str:
    recorded = standing.recorded.get(rank)
    if recorded:
        return recorded
    beat = standing.beats[rank]
    if beat.collective and beat.collectives:
        return f"{beat.collective} (its call {beat.collectives} of torch.distributed)"
    return "a collective"


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {few([str(rank) for rank in ranks], 6)}"


def _names(ranks: list[int]) -> tuple[str, ...]:
    return tuple(f"rank {rank}" for rank in ranks[:8])
