"""The probes of a checkup. Each asks one question of a model, a loss and a batch, and answers in a sentence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.core.examination import Result
from sonde.core.tape import Tape
from sonde.forensics.checkup_batch import Batch, Kept
from sonde.forensics.experiments import examine
from sonde.forensics.tape.recorder import tape_once
from sonde.records import Evidence, Finding, Severity

FEW: Final = 16
"""Samples to be learnt by heart."""
LEARNT: Final = 0.3
"""Share of the way from a guess to the lowest loss that a fit of one batch must go."""
MOVED: Final = 1e-6
"""Change of an answer, relative, in float64."""
MOST_BYTES: Final = 1 << 30
"""The largest model whose step is repeated on the CPU."""
MOST_SECONDS: Final = 30.0
RATES: Final = (1e-6, 1.0, 60)
"""From which learning rate to which the range test goes, and in how many steps."""


@dataclass(frozen=True, eq=False)
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

    @functools.cached_property
    def tape(self) -> Tape:
        """The tape of one step on a few samples."""
        few = self.batch.first(FEW)

        def run_step() -> None:
            self.loss(few).backward()  # type: ignore[no-untyped-call] # torch

        self.state.fresh()
        self.model.train()
        optimizer = self.optimizer or _optimizer_like(self, 1e-2)
        return tape_once(self.model, optimizer, run_step, max_bytes=MOST_BYTES)

    def examine(self, experiment: str) -> Result:
        """Run an experiment on the tape.

        Raises:
            RuntimeError: It cannot be run.

        """
        found = examine(self.tape, only=[experiment], seconds=MOST_SECONDS)
        if found.note or found.results[0].skipped:
            raise RuntimeError(found.note or found.results[0].skipped)
        return found.results[0]


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
    text = f"{value:.3g}, guessing among {classes} classes costs {chance:.3g}"
    if value <= 2 * chance:
        return Outcome(probe=name, passed=True, said=text)
    found = _finding(
        "large_initial_loss", "warning", "(model)",
        f"The untrained model is sure and wrong: its loss is {value:.3g}, that of guessing {chance:.3g}.",
        "Begin with a smaller last layer, normalise the inputs, or average the loss over the batch.",
        Evidence(name="first loss over that of guessing", value=value / chance, threshold=2.0, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=text, findings=(found,))


def tiled_batch(patient: Patient) -> Outcome:
    """Show every sample twice: an average stays, a sum doubles."""
    patient.model.eval()
    with torch.no_grad():
        once, twice = float(patient.loss(patient.batch)), float(patient.loss(patient.batch.tiled()))
    ratio = twice / once if once else float("nan")
    name, text = "every sample twice", f"the loss changes by a factor of {ratio:.3g}"
    if not ratio > 1.5:
        return Outcome(probe=name, passed=True, said=text)
    found = _finding(
        "wrong_loss_reduction", "warning", "loss_fn",
        "The loss grows with the batch: it is a sum, so that the learning rate depends on the batch size.",
        "Use reduction='mean', or divide by the number of samples.",
        Evidence(name="loss with every sample twice over that of each once", value=ratio, threshold=1.5, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=text, findings=(found,))


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
    """Change one sample: the answers to the others must stay."""
    name = "samples on their own"
    if patient.batch.size < 2:
        return Outcome(probe=name, passed=None, said="the batch has one sample only")
    share = patient.examine("dependence").number("other_samples")
    if share is None:
        return Outcome(probe=name, passed=None, said="the first dimension of the output is not that of the samples")
    if share <= MOVED:
        return Outcome(probe=name, passed=True, said="the answer to a sample does not depend on the others")
    found = _finding(
        "norm_on_wrong_dim", "warning", "(model)",
        "The answer to one sample depends on the other samples of its batch, even in evaluation.",
        "Look for a norm, a softmax, a mean or a view over dimension 0.",
        Evidence(name="change of other answers over that of its own", value=share, threshold=MOVED, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=f"others change by {share:.1e} of its own", findings=(found,))


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
    """Fit a few samples, with your settings and with one changed: a model that cannot do that learns nothing."""
    result = patient.examine("learnability")
    skills = result.part("skill")
    name, text = "one batch by heart", result.said
    if not skills:
        return Outcome(probe=name, passed=None, said="what a guess costs is not known for this loss")
    learnt = [each for each, skill in skills.items() if skill >= LEARNT]
    if "as is" in learnt or any(each.startswith("learning rate") for each in learnt):
        return Outcome(probe=name, passed=True, said=text)
    fix = f"It can with {learnt[0]}." if learnt else (
        "Look at the model and the loss: cut gradients, a wrong loss, dead layers, labels that do not fit."
    )  # fmt: skip
    found = _finding(
        "not_learning", "warning", "(model)",
        f"The model cannot learn {min(FEW, patient.batch.size)} samples by heart: {text}.", fix,
        Evidence(name="share of what there is to learn", value=skills["as is"], threshold=LEARNT, relation="<"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=text, findings=(found,))


def zeroed_input(patient: Patient) -> Outcome:
    """Give every sample the inputs of another: that must change the output."""
    name = "inputs of other samples"
    result = patient.examine("dependence")
    inputs, ignored = result.number("inputs"), result.number("ignored")
    if not inputs:
        return Outcome(probe=name, passed=None, said="the inputs of all samples are the same")
    if ignored != inputs:
        return Outcome(probe=name, passed=True, said="the outputs depend on the inputs")
    found = _finding(
        "constant_output", "warning", "(model)",
        "The outputs do not depend on the inputs.",
        "Look for an input that is overwritten, multiplied by zero or not used, and for a detached branch.",
        Evidence(name="inputs that change no output", value=ignored, threshold=0, relation=">"),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said="no input changes an output", findings=(found,))


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
    text = f"about {suggested:.1e} is a good start; the loss is lowest at {rates[best]:.1e}"
    data = {"suggested_lr": suggested}
    yours = None if patient.optimizer is None else float(patient.optimizer.param_groups[0]["lr"])
    if yours is None or len(smooth) == len(rates) or yours < burst:
        return Outcome(probe=name, passed=True, said=text, data=data)
    found = _finding(
        "lr_too_high", "warning", "optimizer",
        f"The learning rate of {yours:.1e} is beyond {burst:.1e}, where the loss bursts.",
        f"Begin with about {suggested:.1e}.",
        Evidence(name="learning rate", value=yours, threshold=burst, relation=">="),
    )  # fmt: skip
    return Outcome(probe=name, passed=False, said=f"{text}; yours is {yours:.1e}", findings=(found,), data=data)


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
    """Return how many classes there are, if a whole number per sample is to be distinguished from a row of scores."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return None
    scores = output.dim() >= 2 and output.shape[1] > 1 and target.dim() == output.dim() - 1
    return int(output.shape[1]) if scores else None


def _tensor(output: Any) -> Tensor | None:
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() else None


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
