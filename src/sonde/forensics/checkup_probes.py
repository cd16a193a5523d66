"""The probes of a checkup. Each asks one question of a model, a loss and a batch, and answers in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.forensics.checkup_batch import Batch, Kept
from sonde.records import Evidence, Finding, Severity

STEPS: Final = 100
FEW: Final = 16
"""Samples to be learnt by heart."""
LEARNT: Final = 0.3
"""Part of the first loss that may be left after STEPS steps on one batch."""
RATES: Final = (1e-6, 1.0, 60)
"""From which learning rate to which the range test goes, and in how many steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Patient:
    """What a probe may use. `state.fresh()` brings everything back to the start."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    batches: list[Batch]
    optimizer: Optimizer | None
    state: Kept

    @property
    def batch(self) -> Batch:
        """The first batch."""
        return self.batches[0]

    def loss(self, batch: Batch) -> Tensor:
        """Call the model and the loss."""
        return self.loss_fn(batch.output(self.model), batch.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a probe found: whether all is well (None if it does not apply), in words, and findings if not."""

    probe: str
    passed: bool | None
    said: str
    findings: tuple[Finding, ...] = ()
    data: dict[str, float] = field(default_factory=dict)


def loss_at_init(patient: Patient) -> Outcome:
    """Hold the first loss against that of guessing."""
    patient.model.train()
    with torch.no_grad():
        output = patient.batch.output(patient.model)
        value = float(patient.loss_fn(output, patient.batch.target))
    name = "loss at the start"
    if not math.isfinite(value):
        found = _finding(
            "nan_forward", "critical", "(model)", "The loss is not finite before any training.",
            "Look for log(0), division by 0 or missing values in the batch.", Evidence(name="loss", value=value),
        )  # fmt: skip
        return Outcome(probe=name, passed=False, said=f"the first loss is {value}", findings=(found,))
    classes = _classes(output, patient.batch.target)
    if classes is None:
        return Outcome(probe=name, passed=None, said=f"{value:.3g}; what guessing costs is not known for this loss")
    chance = math.log(classes)
    said = f"{value:.3g}, guessing among {classes} classes costs {chance:.3g}"
    if value <= 2 * chance:
        return Outcome(probe=name, passed=True, said=said)
    found = _finding(
        "large_initial_loss", "warning", "(model)",
        f"The untrained model is sure and wrong: its loss is {value:.3g}, that of guessing {chance:.3g}.",
        "Begin with a smaller last layer, normalise the inputs, or average the loss over the batch.",
        Evidence(name="first loss over that of guessing", value=value / chance, threshold=2.0, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=said, findings=(found,))


def tiled_batch(patient: Patient) -> Outcome:
    """Show every sample twice: an average stays, a sum doubles."""
    patient.model.eval()
    with torch.no_grad():
        once, twice = float(patient.loss(patient.batch)), float(patient.loss(patient.batch.tiled()))
    ratio = twice / once if once else float("nan")
    name, said = "every sample twice", f"the loss changes by a factor of {ratio:.3g}"
    if not ratio > 1.5:
        return Outcome(probe=name, passed=True, said=said)
    found = _finding(
        "wrong_loss_reduction", "warning", "loss_fn",
        "The loss grows with the batch: it is a sum, so that the learning rate depends on the batch size.",
        "Use reduction='mean', or divide by the number of samples.",
        Evidence(name="loss with every sample twice over that of each once", value=ratio, threshold=1.5, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=said, findings=(found,))


def eval_twice(patient: Patient) -> Outcome:
    """Evaluate twice: without dropout nothing may differ."""
    patient.model.eval()
    with torch.no_grad():
        one, two = (_tensor(patient.batch.output(patient.model)) for _ in range(2))
    name = "evaluated twice"
    if one is None or two is None:
        return Outcome(probe=name, passed=None, said="the model returns no tensor of real numbers")
    difference = float((one - two).abs().max())
    if torch.equal(one, two):
        return Outcome(probe=name, passed=True, said="both outputs are the same")
    if difference <= 1e-4 * float(one.abs().max()):
        return Outcome(probe=name, passed=True, said=f"outputs differ by {difference:.1e}: rounding of the device")
    found = _finding(
        "dropout_ignores_mode", "warning", "(model)",
        "Two evaluations of the same batch differ: something random does not heed model.eval().",
        "Use nn.Dropout, or pass training=self.training to F.dropout.",
        Evidence(name="largest difference of the outputs", value=difference, threshold=0.0, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=f"outputs differ by {difference:.3g}", findings=(found,))


def sample_independence(patient: Patient) -> Outcome:
    """Ask by gradient whether the answer to one sample depends on the others."""
    name = "samples on their own"
    if patient.batch.size < 2:
        return Outcome(probe=name, passed=None, said="the batch has one sample only")
    patient.model.eval()
    share = _leak_by_gradient(patient)
    if share is None:
        share = _leak_by_change(patient)
    if share is None:
        return Outcome(probe=name, passed=None, said="the first dimension of the output is not that of the samples")
    if share <= 1e-4:
        return Outcome(probe=name, passed=True, said="the answer to a sample does not depend on the others")
    found = _finding(
        "norm_on_wrong_dim", "warning", "(model)",
        "The answer to one sample depends on the other samples of its batch, even in evaluation.",
        "Look for a norm, a softmax, a mean or a view over dimension 0.",
        Evidence(name="influence of the other samples over its own", value=share, threshold=1e-4, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=f"others count {share:.1e} of its own", findings=(found,))


def repeated_step(patient: Patient) -> Outcome:
    """Repeat a forward and backward pass with the same random numbers: every bit must be the same."""
    gradients = []
    for _ in range(2):
        patient.state.fresh()
        patient.model.train()
        patient.loss(patient.batch).backward()  # type: ignore[no-untyped-call] # torch
        gradients.append([None if each.grad is None else each.grad.clone() for each in patient.model.parameters()])
    names = [name for name, _ in patient.model.named_parameters()]
    differ = [
        name
        for name, one, two in zip(names, *gradients, strict=True)
        if (one is None) != (two is None) or (one is not None and two is not None and not _same_bits(one, two))
    ]
    title = "the same step twice"
    if not differ:
        return Outcome(probe=title, passed=True, said="all gradients are the same, bit for bit")
    on_cpu = all(each.device.type == "cpu" for each in patient.model.parameters())
    found = _finding(
        "nondeterminism", "warning" if on_cpu else "info", differ[0],
        "The same step gives other gradients: an operation is not deterministic, or the hardware errs.",
        "Set torch.use_deterministic_algorithms(True); if it still differs, test the device.",
        Evidence(name="parameters whose gradient differs", value=len(differ), threshold=0, relation=">"),
    )  # fmt: skip
    return Outcome(probe=title, passed=not on_cpu, said=f"{len(differ)} gradients differ", findings=(found,))


def overfit_one_batch(patient: Patient) -> Outcome:
    """Overfit a few samples: a model that cannot do that learns nothing."""
    first, last = _learn(patient, patient.batch.first(FEW))
    left = last / first if first else 0.0
    name, said = "one batch by heart", f"the loss falls from {first:.3g} to {last:.3g} in {STEPS} steps"
    if not left > LEARNT:
        return Outcome(probe=name, passed=True, said=said)
    found = _finding(
        "not_learning", "warning", "(model)",
        f"The model cannot learn {min(FEW, patient.batch.size)} samples by heart: {left:.0%} of the loss is left.",
        "Look at the model and the loss: cut gradients, a wrong loss, dead layers, labels that do not fit.",
        Evidence(name="part of the first loss that is left", value=left, threshold=LEARNT, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=said, findings=(found,))


def zeroed_input(patient: Patient) -> Outcome:
    """Learn the same samples from inputs of zeros: that must go worse."""
    name = "inputs of zeros"
    few = patient.batch.first(FEW)
    _, seeing = _learn(patient, few)
    first, blind = _learn(patient, few.change(torch.zeros_like))
    said = f"{STEPS} steps leave a loss of {blind:.3g}, with the real inputs {seeing:.3g}"
    if blind > 1.05 * seeing or blind > seeing + 0.02 * abs(first):
        return Outcome(probe=name, passed=True, said=said)
    found = _finding(
        "constant_output", "warning", "(model)",
        "The model learns as much from zeros as from its inputs: they do not reach the output.",
        "Look for the layer where samples become equal: dead units, a wrong dimension, a detached branch.",
        Evidence(name="loss from real inputs over that from zeros", value=seeing / blind if blind else 1.0),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=said, findings=(found,))


def rate_range(patient: Patient) -> Outcome:
    """Raise the learning rate from step to step, and see where the loss falls and where it bursts."""
    patient.state.fresh()
    patient.model.train()
    low, high, steps = RATES
    optimizer = _optimizer_like(patient, low)
    rates = [low * (high / low) ** (at / (steps - 1)) for at in range(steps)]
    smooth: list[float] = []
    for at, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        value = float(_step(patient, optimizer, patient.batches[at % len(patient.batches)]))
        smooth.append(value if not smooth else 0.7 * smooth[-1] + 0.3 * value)
        if not math.isfinite(value) or smooth[-1] > 4 * abs(smooth[0]):
            break
    name = "learning rates"
    finite = [value for value in smooth if math.isfinite(value)]
    best = finite.index(min(finite)) if finite else 0
    if not finite or min(finite) > 0.98 * finite[0]:
        return Outcome(probe=name, passed=None, said="the loss falls at no rate within so few steps")
    suggested, burst = rates[best] / 10, rates[min(len(smooth), len(rates)) - 1]
    said = f"about {suggested:.1e} is a good start; the loss is lowest at {rates[best]:.1e}"
    data = {"suggested_lr": suggested}
    yours = None if patient.optimizer is None else float(patient.optimizer.param_groups[0]["lr"])
    if yours is None or len(smooth) == len(rates) or yours < burst:
        return Outcome(probe=name, passed=True, said=said, data=data)
    found = _finding(
        "lr_too_high", "warning", "optimizer",
        f"The learning rate of {yours:.1e} is beyond {burst:.1e}, where the loss bursts.",
        f"Begin with about {suggested:.1e}.",
        Evidence(name="learning rate", value=yours, threshold=burst, relation=">="),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=f"{said}; yours is {yours:.1e}", findings=(found,), data=data)


PROBES: Final[dict[str, Callable[[Patient], Outcome]]] = {
    "loss_at_init": loss_at_init,
    "tiled_batch": tiled_batch,
    "eval_twice": eval_twice,
    "sample_independence": sample_independence,
    "repeated_step": repeated_step,
    "overfit_one_batch": overfit_one_batch,
    "zeroed_input": zeroed_input,
    "rate_range": rate_range,
}


def _finding(kind: str, severity: Severity, site: str, cause: str, fix: str, evidence: Evidence) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        step=0,
        last_step=0,
        sites=(site,),
        evidence=(evidence,),
        cause=cause,
        fix=fix,
        refute="Run the checkup again on another batch: if the probe passes, it was that batch.",
        data={"by": "checkup"},
    )


def _classes(output: Any, target: Any) -> int | None:
    """Return how many classes there are, if a whole number per sample is to be told from a row of scores."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return None
    scores = output.dim() >= 2 and output.shape[1] > 1 and target.dim() == output.dim() - 1
    return int(output.shape[1]) if scores else None


def _tensor(output: Any) -> Tensor | None:
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


def _leak_by_gradient(patient: Patient) -> float | None:
    """Return the gradient of the first answer at other samples over that at its own; None for inputs of ids."""
    inputs: list[Tensor] = []

    def follow(each: Tensor) -> Tensor:
        if each.is_floating_point():
            each = each.detach().clone().requires_grad_()
            inputs.append(each)
        return each

    output = _tensor(patient.batch.change(follow).output(patient.model))
    if not inputs or output is None or not output.requires_grad or not output.dim() or len(output) != len(inputs[0]):
        return None
    # A plain sum may be constant, as that of a softmax is: weight the parts differently.
    weights = torch.arange(1, output[0].numel() + 1, device=output.device).view(output[0].shape)
    (output[0] * weights).sum().backward()  # type: ignore[no-untyped-call] # torch
    own = sum(float(each.grad[0].norm()) for each in inputs if each.grad is not None)
    others = sum(float(each.grad[1:].norm()) for each in inputs if each.grad is not None)
    return others / own if own else (float("inf") if others else 0.0)


def _leak_by_change(patient: Patient) -> float | None:
    """Return how far the first answer moves if all other samples become copies of it, over its size."""
    with torch.no_grad():
        before = _tensor(patient.batch.output(patient.model))
        after = _tensor(patient.batch.change(lambda each: each[:1].expand_as(each)).output(patient.model))
    if before is None or after is None or not before.dim() or len(before) != patient.batch.size:
        return None
    return float((before[0] - after[0]).norm() / before[0].norm().clamp(min=1e-12))


def _learn(patient: Patient, batch: Batch) -> tuple[float, float]:
    """Train from the start on one batch and return the first and the lowest of the last losses."""
    patient.state.fresh()
    patient.model.train()
    trainable = [each for each in patient.model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-2)
    losses = [float(_step(patient, optimizer, batch)) for _ in range(STEPS)]
    return losses[0], min(losses[-10:])


def _step(patient: Patient, optimizer: Optimizer, batch: Batch) -> Tensor:
    loss = patient.loss(batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call] # torch
    optimizer.step()
    return loss.detach()


def _optimizer_like(patient: Patient, rate: float) -> Optimizer:
    """Make an optimizer of the user's kind and settings, without its state; Adam if there is none to go by."""
    trainable = [each for each in patient.model.parameters() if each.requires_grad]
    if patient.optimizer is not None:
        try:
            return type(patient.optimizer)(trainable, **{**patient.optimizer.defaults, "lr": rate})
        except (TypeError, ValueError):  # an optimizer that is made in another way
            pass
    return torch.optim.Adam(trainable, lr=rate)


def _same_bits(one: Tensor, two: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(two)) and torch.equal(one.isnan(), two.isnan())
