"""Information: whether the loss of the batch depends on which target belongs to which sample."""

from __future__ import annotations

import statistics
from typing import Final

import torch

from sonde.forensics.experiments.program import Change
from sonde.forensics.experiments.subject import DoesNotApply, Measured, Subject

DEALS: Final = 16
"""How often the targets are dealt out."""
LEAST_SAMPLES: Final = 8
"""Fewer samples have too few different orders."""


def information(subject: Subject) -> Measured:
    """Deal the targets out anew among the samples of the batch, and see whether the loss rises.

    A model that has learnt something of how inputs and targets belong together loses by that. The loss of one that has
    only learnt how frequent the answers are, or nothing, stays within the scatter of the deals.
    """
    size = subject.batch_size
    targets = {each: subject.exact.values[each].detach() for each in subject.targets}
    targets = {each: content for each, content in targets.items() if content.shape[:1] == (size,)}
    if size < LEAST_SAMPLES or not targets:
        raise DoesNotApply("the tape shows no targets, one for each sample of the batch")
    if all(bool((content == content[:1]).all()) for content in targets.values()):
        raise DoesNotApply("all samples have the same target")
    program, generator = subject.program, torch.Generator().manual_seed(0)
    dealt = []
    with torch.no_grad():
        for _ in range(DEALS):
            order = torch.randperm(size, generator=generator)
            change = Change(
                values={each: content[order] for each, content in targets.items()}, double=subject.is_double
            )
            world = program.world(double=subject.is_double)
            dealt.append(float(program.repeat(world, change).loss))
    start, mean = float(subject.exact.loss), statistics.fmean(dealt)
    scatter = statistics.stdev(dealt)
    numbers = {"start": start, "dealt": mean, "scatter": scatter}
    if scatter > 0:
        numbers["rise"] = (mean - start) / scatter
    return Measured(f"with targets dealt out anew the loss goes from {start:.4g} to {mean:.4g}", numbers)
