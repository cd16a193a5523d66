"""A checkup before a long training: try the model, the loss and a batch for common faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.errors import OptionError
from sonde.forensics.checkup_batch import kept, take
from sonde.forensics.checkup_probes import PROBES, Outcome, Patient
from sonde.records import SEVERITIES, Finding

BATCHES: Final = 8
"""How many batches are drawn at most."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """What a checkup found. Print it, or look at its findings."""

    outcomes: tuple[Outcome, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, gravest first."""
        found = [finding for outcome in self.outcomes for finding in outcome.findings]
        return tuple(sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity)))

    @property
    def passed(self) -> bool:
        """Whether no probe found anything wrong."""
        return all(outcome.passed is not False for outcome in self.outcomes)

    @property
    def suggested_lr(self) -> float | None:
        """A learning rate to begin with; None if none was found."""
        return next((each.data["suggested_lr"] for each in self.outcomes if "suggested_lr" in each.data), None)

    def __rich__(self) -> Any:
        """Return the page as rich draws it."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 1))
        marks = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("-", "dim")}
        for outcome in self.outcomes:
            mark, style = marks[outcome.passed]
            table.add_row(Text(mark, style), Text(outcome.probe), Text(outcome.said, "dim"))
        words: list[Text | Table] = [Text("Checkup", "bold"), table]
        for finding in self.findings:
            words += [Text(), Text(f"{finding.kind}: {finding.cause}", "bold"), Text(f"  {finding.fix}")]
        words += [Text(), Text("All is well." if self.passed else f"{len(self.findings)} finding(s).", "bold")]
        return Group(*words)


def checkup(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    loader: Any,
    optimizer: Optimizer | None = None,
    *,
    probes: Iterable[str] | None = None,
    quiet: bool = False,
) -> Checkup:
    """Try a model out before a long training, and print a page about it.

    Everything is left as it was, bit for bit: weights, buffers, gradients, modes, random numbers. The optimizer is only
    read. The probes train for a few hundred small steps in all; hooks of yours run as in any step.

    Args:
        model: The model, on the device on which it will train.
        loss_fn: Called as `loss_fn(output, target)`.
        loader: Goes through batches `(inputs, target)`, or dicts with a `target`, `labels` or the like.
        optimizer: The optimizer, to judge its learning rate by.
        probes: Names of the probes to run; all by default.
        quiet: Whether to leave printing to you: `rich.print(checkup)`.

    Example:
        report = sonde.checkup(model, torch.nn.CrossEntropyLoss(), loader, optimizer)
        assert report.passed

    """
    chosen = list(PROBES) if probes is None else list(probes)
    unknown = [name for name in chosen if name not in PROBES]
    if unknown:
        raise OptionError(f"probes={unknown!r}: choose from {', '.join(PROBES)}.")
    if not isinstance(model, nn.Module):
        raise OptionError(f"checkup takes a model (an nn.Module) first; got {type(model).__name__}: {model!r:.80}.")
    if not callable(loss_fn):
        raise OptionError(f"checkup takes a loss function second; got {type(loss_fn).__name__}: {loss_fn!r:.80}.")
    modules = [each for each in (model, loss_fn) if isinstance(each, nn.Module)]
    device = next((each.device for each in model.parameters()), None)
    with kept(modules, loader) as state:
        patient = Patient(model, loss_fn, take(loader, BATCHES, device), optimizer, state)
        report = Checkup(tuple(_run(name, patient) for name in chosen))
    if not quiet:
        from rich.console import Console

        Console().print(report)
    return report


def _run(name: str, patient: Patient) -> Outcome:
    patient.state.fresh()
    try:
        return PROBES[name](patient)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return Outcome(
            probe=name.replace("_", " "), passed=None, said=f"could not run: {type(error).__name__}: {error}"
        )
