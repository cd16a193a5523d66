"""Rules about runs with several ranks."""

from __future__ import annotations

from typing import Final, NamedTuple

from sonde.core.signals import BATCH_MARK, BUFFER, DIRECT_PASSES, REDUCED_PASSES, WEIGHT_BEFORE
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.ranks import comparison
from sonde.diagnosis.ranks.comparison import Cause, Difference, Drift, RankComparison
from sonde.diagnosis.rule import Found, Threshold, above, fact, rule

TOLERANCE = Threshold(
    comparison.TOLERANCE, "difference over the weight: ranks may round a mean differently, but by less"
)
LEAST_BATCHES = Threshold(comparison.LEAST_BATCHES, "persistence: batches, of all that are known, that are equal")


class _Why(NamedTuple):
    """A cause in words, and what to do about it."""

    why: str
    fix: str


_CAUSES: Final[dict[Cause, _Why]] = {
    "start": _Why(
        "they had different weights before the first step, and their gradients are the same",
        "Give all ranks the same weights: seed them alike, or load the weights before the model is wrapped in "
        "DistributedDataParallel, which copies those of rank 0 once; change none on a single rank afterwards.",
    ),
    "setting": _Why(
        "a setting of the optimizer is not the same on all ranks",
        "Create the optimizer and its schedulers in the same way on all ranks, and step them equally often.",
    ),
    "skipped": _Why(
        "a rank has left out an optimizer step that the others took",
        "Decide on all ranks together whether to step: reduce the condition (a loss that is not finite, a batch "
        "that is too small) with all_reduce first, or let a gradient scaler judge gradients that are reduced already.",
    ),
    "twice": _Why(
        "a rank has applied the same gradients in two optimizer steps",
        "Call optimizer.step() once for each reduced gradient on every rank.",
    ),
    "around": _Why(
        "the module inside the DistributedDataParallel wrapper was called by itself, so gradients were not reduced",
        "Call the DistributedDataParallel wrapper instead of the module inside it.",
    ),
    "no_sync": _Why(
        "every backward pass before the step ran under no_sync(), so gradients were not reduced",
        "Leave the last backward pass before optimizer.step() outside of no_sync().",
    ),
    "not_reduced": _Why(
        "their gradients differ: nothing reduces them over the ranks",
        "Wrap the model in DistributedDataParallel, or average every gradient with all_reduce before the step.",
    ),
    "not_covered": _Why(
        "the gradients of some parameters are reduced and those of others are not",
        "Wrap the model in DistributedDataParallel after its last change: parameters that were added, replaced or "
        "unfrozen later are not reduced.",
    ),
    "changed": _Why(
        "their gradients differ, although every pass was reduced: they were changed afterwards",
        "Clip, scale or add noise to gradients in the same way on all ranks, and after the backward pass has ended.",
    ),
    "data": _Why(
        "ranks that share the model (tensor parallelism) were given different samples",
        "Draw the batch once for each tensor-parallel group: give its ranks the same sampler, seed and order.",
    ),
    "randomness": _Why(
        "ranks that share the model (tensor parallelism) got the same samples and computed different things, as with "
        "dropout from differently seeded generators",
        "Seed the ranks of a tensor-parallel group alike where activations are replicated.",
    ),
    "state": _Why(
        "their gradients are the same and their updates are not: the optimizers' states differ",
        "Load the optimizer's state on all ranks, or on none.",
    ),
    "written": _Why(
        "their gradients and updates are the same: weights were written outside of the optimizer on one rank",
        "Change weights (loading, averaging, clamping, initialising anew) on all ranks alike.",
    ),
    "unknown": _Why(
        "what the ranks recorded does not tell why",
        "Call the DistributedDataParallel wrapper instead of the module inside it, wrap the model after moving it to "
        "its device and dtype, and clip or change gradients in the same way on all ranks.",
    ),
}


def _comparison(case: Case) -> RankComparison:
    if case.ranks is None:
        raise NotMeasured("readings of more than one rank")
    return case.ranks


@rule(
    "ddp_replicas_diverge",
    needs=["parameter", "gradient", "update", REDUCED_PASSES, DIRECT_PASSES, WEIGHT_BEFORE],
    explains=["ranks_differ_in_settings", "buffers_differ_between_ranks"],
    severity="critical",
    exact=True,
    fix=_CAUSES["unknown"][1],
    refute="Gather one parameter from all ranks after a step: if the values are equal, this finding is wrong.",
)
def ddp_replicas_diverge(case: Case) -> Found | None:
    """The replicas of the model have different weights."""
    ranks = _comparison(case)
    if not ranks.parameters:
        return None
    first = ranks.parameters[0]
    why, fix = _CAUSES[ranks.cause]
    when = f"After step {first.step}" if first.step else "From the start"
    return Found(
        step=first.step,
        sites=tuple(drift.name for drift in ranks.parameters[:8]),
        evidence=(
            above("difference between ranks over the weight, when it began", first.first, TOLERANCE),
            above("difference between ranks at the end", first.last, TOLERANCE, f"{first.name}:parameter mean"),
            fact("parameters that differ", len(ranks.parameters)),
        ),
        cause=f"The replicas diverge. {when} {first.name} is not the same on {_who(first)}: {why}.",
        fix=fix,
        data={"cause": ranks.cause, "ranks": list(first.ranks)},
    )


@rule(
    "buffers_differ_between_ranks",
    needs=[BUFFER],
    exact=True,
    fix=(
        "Convert batch norms with SyncBatchNorm.convert_sync_batchnorm, leave broadcast_buffers=True in "
        "DistributedDataParallel, or broadcast the buffers of rank 0 before evaluating and saving."
    ),
    refute="Gather one buffer from all ranks before a forward pass: if the values are equal, this finding is wrong.",
)
def buffers_differ_between_ranks(case: Case) -> Found | None:
    """Buffers such as the running statistics of batch norms are not the same on all ranks, though the weights are."""
    buffers = _comparison(case).buffers
    if not buffers:
        return None
    first = buffers[0]
    return Found(
        step=first.step,
        sites=tuple(drift.name for drift in buffers[:8]),
        evidence=(
            above("difference between ranks over the buffer, when it began", first.first, TOLERANCE),
            fact("buffers that differ", len(buffers)),
        ),
        cause=f"Before step {max(1, first.step)} {first.name} is not the same on {_who(first)}, while the weights are: "
        "each rank evaluates a model of its own.",
        data={"ranks": list(first.ranks)},
    )


@rule(
    "same_batch_on_every_rank",
    needs=[BATCH_MARK],
    exact=True,
    fix=(
        "Give the loader a DistributedSampler (DataLoader(dataset, sampler=DistributedSampler(dataset))) and call its "
        "set_epoch(epoch) at the beginning of each epoch, or split the data by rank yourself."
    ),
    refute="Print the first sample of a batch on each rank: if they differ, this finding is wrong.",
    since=LEAST_BATCHES,
)
def same_batch_on_every_rank(case: Case) -> Found | None:
    """All ranks train on the same batches, so that more ranks do the same work again."""
    count = _comparison(case).same_batches
    if count < LEAST_BATCHES:
        return None
    return Found(
        step=1,
        sites=("loader",),
        evidence=(above("batches that are equal on all ranks", count, LEAST_BATCHES),),
        cause=f"All {count} batches that were compared are the same on every rank: each repeats the others' work.",
    )


@rule(
    "ranks_differ_in_settings",
    exact=True,
    fix=(
        "Create the optimizer, its schedulers and the gradient scaler in the same way on all ranks, and give all ranks "
        "equally many batches (DistributedSampler, drop_last=True, or DistributedDataParallel's join)."
    ),
    refute="Print the setting, or count the steps, on each rank: if they are equal, this finding is wrong.",
)
def ranks_differ_in_settings(case: Case) -> Found | None:
    """Ranks have different learning rates, loss scales or numbers of steps."""
    ranks = _comparison(case)
    if ranks.settings:
        first = ranks.settings[0]
        return Found(
            step=first.step,
            sites=("optimizer" if not first.name.startswith("scaler") else "scaler",),
            evidence=tuple(fact(f"{first.name} on rank {rank}", value) for rank, value in _extremes(first)),
            cause=f"{first.name} is not the same on all ranks from step {first.step} on.",
        )
    if not ranks.step_counts:
        return None
    counts = Difference("steps", 0, {rank: float(count) for rank, count in ranks.step_counts.items()})
    least, most = _extremes(counts)
    return Found(
        step=int(least[1]),
        sites=("(loop)",),
        evidence=tuple(fact(f"last step of rank {rank}", value) for rank, value in (least, most)),
        cause=f"Rank {least[0]} ended after step {least[1]:.0f}, rank {most[0]} after step {most[1]:.0f}.",
    )


def _extremes(difference: Difference) -> tuple[tuple[int, float], tuple[int, float]]:
    ordered = sorted(difference.values.items(), key=lambda item: item[1])
    return ordered[0], ordered[-1]


def _who(drift: Drift) -> str:
    if drift.ranks == drift.compared:
        return f"ranks {', '.join(map(str, drift.ranks[:4]))}"
    return f"{'rank' if len(drift.ranks) == 1 else 'ranks'} {', '.join(map(str, drift.ranks[:4]))} as on the others"
