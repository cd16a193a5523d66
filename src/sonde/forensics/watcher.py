"""Watch a training for anything non-finite, at almost no cost, and find the first bad operation once there is one.

On the CPU the present step's numbers can be read at once: a loss just before its backward pass, gradients just before
the optimizer writes. On a GPU reading them would make the training wait. There the worker's readings raise a flag, a
few steps late, and only then the next steps are looked at closely.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.errors import NonFiniteError
from sonde.forensics.findings import finding_of, held_words, late_words
from sonde.forensics.hold_back import HoldBack
from sonde.forensics.investigate import (
    investigate_gradients,
    investigate_loss,
    investigate_output,
    investigate_update,
)
from sonde.forensics.keeper import Keeper, KeptPass, Recent
from sonde.forensics.origin import Incident, Origin
from sonde.forensics.repeat import repeat_alone
from sonde.forensics.traps import LossTails
from sonde.forensics.values import NAN, any_nonfinite, badness
from sonde.hooks.guard import UNGUARDED, Guard, is_capturing
from sonde.hooks.names import named_modules, named_parameters
from sonde.record.kinds import gradients_of, needs_other_ranks, skip_flag
from sonde.records import Finding, Quantity, Site

GuardAction = Literal["skip", "stop", "stop_late"]
MAX_ORIGINS: Final = 3
# A gradient scaler begins with a scale that is too large and skips steps until it fits; that is not a fault.
MAX_CALIBRATION: Final = 3
# Steps on a device for which to wait until something non-finite comes up again, to see it closely.
PATIENCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the watcher needs from the session."""

    step: Callable[[], int]
    nonfinite: Callable[[Quantity], list[Site] | None]
    """Sites of a quantity that are not finite in the present step; None if that cannot be read yet."""
    nonfinite_flag: Callable[[list[int]], Tensor | None]
    """Whether anything at these sites is not finite in the present step, as a number on a device; None elsewhere."""
    measured: Callable[[Optimizer], list[int] | None]
    """The sites of all gradients of an optimizer, if the readings of the present step hold them."""
    report: Callable[[Finding], None]
    event: Callable[[str, str, dict[str, Any]], None]
    flag: Callable[[Tensor], None]
    """Takes a number on a device: whether the optimizer skips this step itself."""
    skip: Callable[[], None]
    """Ends the present step as one that was not taken."""
    save: Callable[[Incident, Finding], None]
    """Saves what is needed to repeat the step."""
    guard: Guard = UNGUARDED


class Watcher:
    """Listens to passes, backward calls and optimizer steps of the watched models.

    While a CUDA graph is captured it looks at nothing: to read a number would break the capture.
    """

    def __init__(
        self,
        models: dict[str, nn.Module],
        around: Surroundings,
        *,
        guard: GuardAction | None = None,
        max_origins: int = MAX_ORIGINS,
    ) -> None:
        self.keeper = Keeper(around.guard)
        self.recent = Recent()
        self.hold_back = HoldBack()
        self._models = dict(models)
        self._around = around
        self._guard_action = guard
        self._left = max_origins
        self._looks_left = 2 * max_origins
        self._is_ill = False
        self._is_poisoned = False
        self._patience = PATIENCE
        self._skips = 0
        self._tails = LossTails()
        self._seen: dict[tuple[Any, ...], Finding] = {}
        self._last_report: tuple[int, Finding | None] = (-1, None)
        self._names: dict[int, str] | None = None

    # ------------------------------------------------------------------ passes

    def begin_pass(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep what is needed to repeat a training pass that begins."""
        if is_capturing():
            return
        self._look_at_unused_pass()
        self.keeper.begin(model, args, self._around.step())

    def end_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Keep what a training pass was called with."""
        if not is_capturing():
            self.keeper.end(model, args, kwargs, output)

    def _look_at_unused_pass(self) -> None:
        # A program may test its loss itself and skip the backward: that pass has not been checked yet.
        last = self.keeper.passes[-1] if self.keeper.passes else None
        if last is None or last.backwards or not self._may_look():
            return
        outputs = [tensor for reference in last.outputs if (tensor := reference()) is not None and _is_near(tensor)]
        if any(badness(tensor) & NAN for tensor in outputs):
            self._begin_look()
            incident = investigate_output(last, self._all_names())
            self._is_ill = incident is not None
            if incident is not None:
                self._report(incident)

    # ------------------------------------------------------------------ backward

    def before_backward(self, roots: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Look at the loss in the last moment at which its graph is whole."""
        if is_capturing():
            return
        unused = [kept for kept in self.keeper.passes if not kept.backwards]
        passes = unused or self.keeper.passes[-1:]
        for kept in passes:
            kept.backwards += 1
        looked = [root for root in roots if _is_near(root) or self._is_armed]
        if not looked:
            self._remember(roots, passes)
            return
        if not any(badness(root) for root in looked):
            self._is_ill = False
            self._remember(roots, passes)
        elif self._may_look() and self._are_ours(roots):
            self._begin_look()
            incident = investigate_loss(roots, passes, self._all_names(), sys._getframe(1))
            if _is_scaled_away(incident.origin, roots):
                self._is_ill = False
            else:
                self._report_first(incident)

    def is_loss_bad(self, roots: tuple[Tensor, ...]) -> bool:
        """Return whether a loss is not finite, as far as no device has to be waited for."""
        return not is_capturing() and any(_is_near(root) and badness(root) for root in roots)

    def _remember(self, roots: tuple[Tensor, ...], passes: list[KeptPass]) -> None:
        if passes and self._left > 0:
            self._tails.add(roots, passes[-1].sequence)

    def _are_ours(self, roots: tuple[Tensor, ...]) -> bool:
        return bool(self.keeper.passes) or any(root.requires_grad for root in roots)

    # ------------------------------------------------------------------ optimizer

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at the gradients while nothing has been written yet."""
        if is_capturing():
            return
        if self._may_look():
            sites = self._around.nonfinite("gradient")
            if sites is None and self._is_armed:
                sites = self._measure(optimizer)
            if sites and skip_flag(optimizer) is None:  # else a gradient scaler handles it
                self._look_at_gradients(sites)
        if self._guard_action == "stop_late":
            self._notice(optimizer)
        elif self._guard_action is not None:
            self._hold_back(optimizer)

    def stop_if_asked(self) -> None:
        """Raise if something is not finite and the user asked to stop: the one error that guards let through.

        What a device computes is known a step or two later, when its readings arrive: whether a fused optimizer held
        itself back, and everything that `stop_late` goes by.

        Raises:
            NonFiniteError: A gradient or a weight is not finite, and `guard` is "stop" or "stop_late".

        """
        now = self._around.step()
        if self._guard_action == "stop":
            step = now if self.hold_back.is_holding else self.recent.take_guarded()
            words = held_words(now - 1 - step) if step is not None else ""
        elif self._guard_action == "stop_late":
            step = self.recent.take_spoilt(now)
            words = late_words(step, now - step) if step is not None else ""
        else:
            return
        if step is None:
            return
        self.hold_back.release()
        if self._is_armed and self._may_look():
            self._report_from_readings()
        # Otherwise a program that catches this and goes on would find its bad gradients in the next step, too.
        self._around.skip()
        self._tails.clear()
        self.keeper.forget()
        at, finding = self._last_report
        because = f" {finding.cause} {finding.fix}" if finding is not None and at >= step else ""
        raise NonFiniteError(f"step {step}: {words}{because}")

    def after_step(self, optimizer: Optimizer) -> None:
        """Look at what the optimizer has written, and release the step."""
        if is_capturing():
            return
        held = self.hold_back.is_holding
        self._is_poisoned |= self._is_ill and not held
        self.hold_back.release()
        self._tails.clear()
        self.keeper.forget(self._models_of(optimizer))
        if not held and self._may_look():
            self._look_at_update(optimizer)

    def after_skip(self) -> None:
        """Look at a step that a gradient scaler has held back."""
        if is_capturing():
            return
        self._skips += 1
        if self._skips == MAX_CALIBRATION + 1 and self._may_look():
            sites = self._around.nonfinite("gradient")
            if sites:
                self._look_at_gradients(sites)
        self._tails.clear()
        self.keeper.forget()

    def _look_at_gradients(self, sites: list[Site]) -> None:
        frame = sys._getframe(1)
        self._begin_look()
        incident = investigate_gradients(self.keeper.passes, self._tails, self._all_names(), frame)
        if incident is None:
            name = sites[-1].name if sites else ""
            origin = Origin(stage="backward", module=name.rpartition(".")[0], tensor=name, repeated=False)
            incident = Incident(origin, self.keeper.passes[-1] if self.keeper.passes else None)
        self._report_first(incident)

    def _look_at_update(self, optimizer: Optimizer) -> None:
        sites = self._around.nonfinite("parameter")
        if sites is None:
            self._wait_for_another(optimizer)
            return
        if not sites:
            return
        # Without a gradient nothing was written: a parameter may be a mask of intended infinities.
        stepped = {id(parameter) for parameter, _ in gradients_of(optimizer)}
        parameters = {name: each for name, each, _ in named_parameters(self._models) if id(each) in stepped}
        found = next((site.name for site in sites if site.name in parameters), None)
        if found is not None:
            if self._guard_action == "stop_late":
                self.recent.note_spoilt(self._around.step())
            self._report(Incident(investigate_update(optimizer, found, parameters[found])))

    def _wait_for_another(self, optimizer: Optimizer) -> None:
        """On a device: wait a few steps for it to happen again, unless the weights are spoilt already."""
        if not self._is_armed:
            return
        self._patience -= 1
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._patience < 0 or bool(any_nonfinite(parameters)):
            self._patience = PATIENCE
            self._report_from_readings()

    def _notice(self, optimizer: Optimizer) -> None:
        """Note gradients that are not finite where that can be known without waiting: on the CPU."""
        gradients = [gradient for _, gradient in gradients_of(optimizer)]
        if skip_flag(optimizer) is not None or not all(map(_is_on_host, gradients)):
            return  # a gradient scaler's business, or that of the readings to come
        sites = None if self._around.measured(optimizer) is None else self._around.nonfinite("gradient")
        if sites or (sites is None and bool(any_nonfinite(gradients))):
            if sites is None and self._may_look():
                self._look_at_gradients([])
            self.recent.note_spoilt(self._around.step())

    def _hold_back(self, optimizer: Optimizer) -> None:
        measured = self._around.measured(optimizer)
        sites = None if measured is None else self._around.nonfinite("gradient")
        bad: bool | Tensor | None = None if sites is None else bool(sites)
        if bad is None and measured:
            bad = self._around.nonfinite_flag(measured)
        held = self.hold_back.begin(optimizer, bad)
        if self.hold_back.flag is not None:
            self._around.flag(self.hold_back.flag)
        if held and self._may_look() and sites is None:
            self._look_at_gradients([])
        if held:
            message = "the optimizer was held back: gradients are not finite"
            self._around.event("guard_skipped", message, {"guard": self._guard_action})

    def finish(self) -> None:
        """Report what the readings show if training ends before the step could be repeated, and release everything."""
        if self._is_armed and self._may_look():
            self._report_from_readings()
        self.hold_back.release()
        self.keeper.forget()
        self._models.clear()
        self._names = None

    def look_again(self, kept: KeptPass) -> Incident | None:
        """Repeat a pass to see what it returns, without judging it; None if one process alone cannot."""
        repetition = repeat_alone(kept, self._all_names(), backward=False)
        return None if repetition is None else Incident(Origin(stage="forward"), kept, repetition.outputs)

    # ------------------------------------------------------------------ telling

    @property
    def _is_armed(self) -> bool:
        """Whether readings have shown that something is wrong, and there is something left to tell about it."""
        return self.recent.bad_step is not None and self._left > 0 and self._looks_left > 0

    def _may_look(self) -> bool:
        """Return whether to repeat a step: not again and again, and not while an origin's consequences go on."""
        return self._left > 0 and self._looks_left > 0 and not self._is_ill

    def _begin_look(self) -> None:
        """Count a look before it begins: what makes it fail once would make it fail again in this step."""
        self._looks_left -= 1
        self._is_ill = True

    def _measure(self, optimizer: Optimizer) -> list[Site]:
        """Look at gradients on a device and wait for it: the readings have shown that something is wrong.

        All are asked together, which waits once; only if that says so, each by itself.
        """
        if not bool(any_nonfinite(gradient for _, gradient in gradients_of(optimizer))):
            return []
        names = {id(each): name for name, each, _ in named_parameters(self._models)}
        found = [parameter for parameter, gradient in gradients_of(optimizer) if badness(gradient)]
        return [Site(id=-1, name=names.get(id(each), ""), quantity="gradient") for each in found]

    def _report_first(self, incident: Incident) -> None:
        """Report what was found; for weights that were already bad, what the readings show of the step that did it."""
        if incident.origin.stage == "weights" and self._is_armed and not self._is_poisoned:
            self._report_from_readings()
        else:
            self._report(incident)

    def _report_from_readings(self) -> None:
        """Report what the readings alone show, where the step can no longer be repeated."""
        sites, step = self.recent.bad_sites(), self.recent.bad_step
        outputs = [site for site in sites if site.quantity == "output"]
        gradients = [site for site in sites if site.quantity == "gradient"]
        if outputs:
            origin = Origin(stage="forward", module=outputs[0].name, repeated=False)
        elif gradients:
            name = gradients[-1].name
            origin = Origin(stage="backward", module=name.rpartition(".")[0], tensor=name, repeated=False)
        else:
            origin = Origin(stage="optimizer", tensor=sites[0].name if sites else "", repeated=False)
        self._report(Incident(origin), step)

    def _report(self, incident: Incident, step: int | None = None) -> None:
        origin, kept = incident.origin, incident.kept
        self._is_ill = True
        self.recent.forget_bad()
        identity = (origin.stage, origin.op, origin.module, origin.tensor, str(origin.line))
        if origin.stage == "weights" and self._is_poisoned:
            return  # it is what the optimizer made of something that has been reported
        now = self._around.step()
        if identity in self._seen:
            self._last_report = (now, self._seen[identity])
            return
        self._left -= 1
        history = self.recent.history(origin.module)
        finding = finding_of(origin, now if step is None else step, history)
        if kept is not None and not kept.is_intact:
            finding = replace(finding, data=finding.data | {"inputs_written_over": True})
        self._seen[identity] = finding
        self._last_report = (now, finding)
        self._around.report(finding)
        if kept is not None and kept.is_alone and not needs_other_ranks(kept.model):
            self._around.save(incident, finding)

    def _all_names(self) -> dict[int, str]:
        if self._names is None:
            self._names = {id(module): name for name, module, _ in named_modules(self._models)}
            self._names |= {id(parameter): name for name, parameter, _ in named_parameters(self._models)}
        return self._names

    def _models_of(self, optimizer: Optimizer) -> set[int]:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {
            id(kept.model)
            for kept in self.keeper.passes
            if any(id(parameter) in owned for parameter in kept.model.parameters())
        }


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_near(tensor: Tensor) -> bool:
    return _is_on_host(tensor) and tensor.numel() <= 1 << 16


def _is_scaled_away(origin: Origin, roots: tuple[Tensor, ...]) -> bool:
    """Return whether a finite loss only overflowed when a gradient scaler multiplied it: the scaler handles that."""
    last = roots[0].grad_fn
    is_last = last is not None and last.name().startswith("MulBackward")
    return is_last and (origin.stage, origin.name, origin.makes, origin.total) == ("loss", "mul", "inf", 1)
