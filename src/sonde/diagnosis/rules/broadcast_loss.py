"""A loss whose input and target have shapes that are blown up to fit each other."""

from __future__ import annotations

from math import prod

import numpy as np

from sonde import vitals
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.rule import Rule, above, fact
from sonde.facts import ColumnFacts
from sonde.records import Finding

_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss")


def check(case: Case) -> Finding | None:
    """Find an input and a target that are compared in all pairs, as (N, 1) and (N,) are."""
    if case.facts.columns:
        return _met_a_row(case, case.facts.columns[0])
    if not case.facts.losses:
        raise NotMeasured("a loss function of torch.nn.functional")
    for loss in case.facts.losses:
        if loss.kind not in _ELEMENTWISE or loss.input_shape == loss.target_shape:
            continue
        try:
            whole = np.broadcast_shapes(loss.input_shape, loss.target_shape)
        except ValueError:
            continue
        largest = max(prod(loss.input_shape), prod(loss.target_shape))
        if prod(whole) > largest:
            return RULE.finding(
                case,
                "critical",
                0.98,
                sites=(vitals.LOSS,),
                step=1,
                evidence=(
                    above("pairs that are compared", prod(whole), largest),
                    fact("numbers in the output", prod(loss.input_shape)),
                    fact("numbers in the target", prod(loss.target_shape)),
                ),
                cause=f"{loss.kind} compares an output of shape {loss.input_shape} with a target of shape "
                f"{loss.target_shape}: they are blown up to {whole}, and every output is held against every target. "
                "The best the model can do is the mean of all targets.",
                fix="Give both the same shape: output.squeeze(1), or target.unsqueeze(1).",
                refute="If output.shape == target.shape where the loss is called, it is wrong.",
            )
    return None


def _met_a_row(case: Case, met: ColumnFacts) -> Finding:
    count = met.column[0]
    return RULE.finding(
        case,
        "critical",
        0.97,
        sites=(vitals.LOSS,),
        step=1,
        evidence=(
            above("pairs that are made", prod(met.result), count),
            fact("samples in the batch", count),
        ),
        cause=f"Within the loss a column of shape {met.column} meets a row of shape ({count},) ({met.operation}): both "
        f"are blown up to {met.result}, and what belongs to one sample is combined with every other.",
        fix="Give both the same shape: squeeze(1) the column, or unsqueeze(1) the row.",
        refute="Print the shapes on the line of that operation: if they are equal, it is wrong.",
    )


RULE = Rule(kind="broadcast_loss", check=check, since=1)
