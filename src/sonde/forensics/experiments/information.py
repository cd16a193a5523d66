"""Information: whether the loss of the batch depends on which target belongs to which sample."""

from __future__ import annotations

import statistics
from typing import Final

import torch

from sonde.forensics.experiments.program import Change
from sonde.forensics.experiments.subject import DoesNotApply, Measured, Subject

PERMUTATIONS: Final = 16
"""How many orders of the targets are tried."""
LEAST_SAMPLES: Final = 8
"""Fewer samples have too few different orders."""


def information(subject: Subject) -> Measured:
    """Permute the targets among the samples of the batch, and see whether the loss rises.

    A model that has learnt something of how inputs and targets belong together loses by that. The loss of one that has
    only learnt how frequent the answers are, or nothing, stays within the scatter of the permutations.
    """
    size = subject.batch_size
    targets = {each: subject.exact.values[each].detach() for each in subject.targets}
    targets = {each: content for each, content in targets.items() if content.shape[:1] == (size,)}
    if size < LEAST_SAMPLES or not targets:
        raise DoesNotApply("the tape shows no targets, one for each sample of the batch")
    if all(bool((content == content[:1]).all()) for content in targets.values()):
        raise DoesNotApply("all samples have the same target")
    program, generator = subject.program, torch.Generator().manual_seed(0)
    permuted = []
    with torch.no_grad():
        for _ in range(PERMUTATIONS):
            order = torch.randperm(size, generator=generator)
            change = Change(
                values={each: content[order] for each, content in targets.items()}, double=subject.is_double
            )
            world = program.world(double=subject.is_double)
            permuted.append(float(program.repeat(world, change).loss))
    start, mean = float(subject.exact.loss), statistics.fmean(permuted)
    scatter = statistics.stdev(permuted)
    numbers = {"start": start, "permuted": mean, "scatter": scatter}
    if scatter > 0:
        numbers["rise"] = (mean - start) / scatter
    return Measured(f"with permuted targets the loss goes from {start:.4g} to {mean:.4g}", numbers)
