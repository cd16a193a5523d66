"""What to say about the first number that is not finite, by the stage of the step in which it turned up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sonde import vitals
from sonde.diagnosis.case import Case
from sonde.diagnosis.nonfinite import READINGS, TOLD_FROM, Origin, Stage, count_bad, find_origin
from sonde.diagnosis.rule import Rule, above, fact
from sonde.records import Finding


@dataclass(frozen=True, slots=True)
class _Words:
    cause: str
    fix: str
    refute: str


_WORDS: Final[dict[Stage, _Words]] = {
    "data": _Words(
        "{name} is not finite in step {step}: NaN or an infinity comes with the data.",
        "Check the batch with torch.isfinite(x).all() in the dataset; drop or fill what is missing, and look for a "
        "division by a feature's spread that is 0.",
        "Print torch.isfinite(x).all() for that batch before the model: True refutes it.",
    ),
    "weights": _Words(
        "{name} is not finite before the first step: the initial weights or the checkpoint hold NaN or infinities.",
        "Look at what made the weights: the checkpoint that was loaded, or an init with a spread of infinity; empty "
        "tensors (torch.empty) hold anything.",
        "Print torch.isfinite(w).all() right after the model is made.",
    ),
    "forward": _Words(
        "The output of {name} is the first that is not finite, in step {step}; all that came before it is finite.",
        "Look in this module for a division by 0, log or sqrt of 0 or less, exp of a large number, or a softmax over a "
        "row that is masked as a whole; bound the value before it.",
        "Run the same batch with torch.autograd.set_detect_anomaly(True): another module first refutes it.",
    ),
    "loss": _Words(
        "The loss is the first number that is not finite, in step {step}; the model's outputs are finite.",
        "Look for log(0) in the loss, targets outside its range, or a mean over no elements; use the with_logits form "
        "of the loss, or add a small eps.",
        "Print the model's output and the loss for that batch: an output that is not finite refutes it.",
    ),
    "backward": _Words(
        "The gradient of {name} is the first number that is not finite, in step {step}; the forward pass is finite.",
        "Look for sqrt, norm or std at exactly 0, pow below 1, or a division hidden by torch.where: their derivative "
        "is infinite there; add eps inside the root, or clip.",
        "Run that backward pass with torch.autograd.set_detect_anomaly(True): it names the operation.",
    ),
    "update": _Words(
        "Step {step} of the optimizer writes numbers into {name} that are not finite, though the gradients are finite.",
        "Look at the optimizer's settings: eps=0 or eps too small for the dtype, a learning rate that overflowed, "
        "state loaded from a damaged checkpoint.",
        "Repeat the step with plain SGD: if the weights stay finite, the optimizer is at fault.",
    ),
}


def explain_origin(rule: Rule, case: Case, stage: Stage) -> Finding | None:
    """Return the finding of a rule if the first non-finite number turned up in its stage."""
    origin = find_origin(case)
    if origin is None or origin.stage != stage:
        return None
    site, step = origin.site, origin.step
    words = _WORDS[stage]
    name = _name(origin)
    harmless = stage == "data" and not _spreads(case, step)
    return rule.finding(
        case,
        "info" if harmless else "critical",
        0.6 if harmless else 0.9,
        sites=(name, "loader") if stage == "data" else (name,),
        step=step,
        evidence=(
            above("numbers that are not finite", count_bad(case, site, step), 1, f"{site.key} nonfinite"),
            fact("other places of this kind in the same step", origin.others - 1),
        ),
        cause=words.cause.format(name=name if stage != "data" else f"An input ({site.key})", step=step),
        fix=words.fix,
        refute=words.refute,
        data={TOLD_FROM: READINGS, "stage": stage, "site": site.key},
    )


def _name(origin: Origin) -> str:
    return vitals.LOSS if origin.stage == "loss" else origin.site.name


def _spreads(case: Case, step: int) -> bool:
    """Return whether what came with the data went on into outputs, the loss or gradients: some models fill gaps."""
    if case.learning.state == "broken":
        return True
    spread = (site for id_, at in case.history.first_bad.items() if at >= step and (site := case.site(id_)) is not None)
    return any(site.quantity in ("output", "gradient", "update", "parameter") for site in spread)
