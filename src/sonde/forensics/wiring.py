"""Connect forensics to a session: the taps, the watcher and the bundles."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sonde.core import files
from sonde.errors import OptionError
from sonde.forensics.bundle import Note, save_bundle
from sonde.forensics.keeper import GUARD_SITE
from sonde.forensics.origin import Incident
from sonde.forensics.watcher import MAX_ORIGINS, GuardAction, Surroundings, Watcher
from sonde.hooks.guard import During, Handle, backward_id, is_capturing, remove_all
from sonde.hooks.on_backward import before_backward, what_is_differentiated
from sonde.hooks.on_call import RootPasses
from sonde.hooks.on_step import has_closure, on_step
from sonde.hooks.replace_function import BACKWARD
from sonde.record.extensions import Watched
from sonde.records import Finding, Sink

logger = logging.getLogger("sonde")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForensicsOptions:
    """What a session does when something non-finite appears."""

    enabled: bool = True
    guard: GuardAction | None = None
    bundles: bool = True
    max_bundle_bytes: int = 512 << 20
    max_bundles: int = 3
    max_origins: int = MAX_ORIGINS


class Forensics:
    """Finds the first bad operation while a session is attached, and holds the optimizer back if asked to."""

    def __init__(self, watched: Watched, options: ForensicsOptions) -> None:
        models, packer, guard = watched.models, watched.packer, watched.guard
        self._options = options
        self._guard = guard
        self._packer = packer
        self._publish = watched.publish
        around = Surroundings(
            step=lambda: packer.step,
            nonfinite=packer.nonfinite,
            nonfinite_flag=packer.nonfinite_flag,
            measured=watched.measured,
            report=self._report,
            event=packer.put_event,
            flag=self._see_flag,
            skip=lambda: packer.end_step(skipped=True),
            save=guard.wrap("saving a bundle", self._save),
            guard=guard,
        )
        self._run = watched.path
        self._clock = watched.clock
        self._bundles_left = options.max_bundles if options.bundles else 0
        self.watcher = Watcher(models, around, guard=options.guard, max_origins=options.max_origins)
        # A guard looks at every step; else a step that is not recorded is left alone.
        self._raise_alarm = watched.raise_alarm
        self._is_skipped = watched.is_skipped if options.guard is None else lambda: False
        self._passes = RootPasses(models.values(), self.watcher, guard, is_wanted=lambda: not self._is_skipped())
        self._parameters = {id(parameter) for model in models.values() for parameter in model.parameters()}
        self._before_backward = guard.wrap("looking at losses", self._look_at_losses)
        self._before_step = guard.wrap("looking at gradients", self.watcher.before_step)
        self._after_step = guard.wrap("looking at updates", self.watcher.after_step)
        self.after_skip = guard.wrap("looking at skipped steps", self.watcher.after_skip)
        self.forget_passes = self.watcher.keeper.forget
        self._finish = guard.wrap("letting go of kept passes", self.watcher.finish)
        self._flag_site = -1
        self._handles: list[Handle] = []

    @property
    def is_holding(self) -> bool:
        """Whether the present optimizer step is held back."""
        return self.watcher.hold_back.is_holding

    @property
    def sink(self) -> Sink | None:
        """What takes the run's readings."""
        return self.watcher.recent if self._options.enabled else None

    def attach(self) -> None:
        """Start watching; after the optimizers' own tap, whose numbers it reads."""
        if self._options.enabled:
            self._passes.attach()
            # A guard looks at every step; else a step that is only counted is left alone while its loss is finite.
            during: During = "awake" if self._options.guard is None else "always"
            self._handles.append(before_backward(self._before_backward, during))
            catch = self._guard.catch  # what looks is measured by itself
            before, after = catch("holding steps back", self._begin_step), catch("updates", self._end_step)
            self._handles += on_step(before, after, during)
            if self._options.guard is None:
                look = self._guard.wrap("looking at losses", self._look_asleep)
                self._handles.append(BACKWARD.listen(before=look, during="asleep"))

    def remove(self) -> None:
        """Stop watching, and release everything kept."""
        self._passes.remove()
        remove_all(self._handles)
        self._parameters.clear()
        self._finish()

    def save_bundle(self, reason: str) -> Path:
        """Save what is needed to repeat the present step.

        Raises:
            OptionError: No pass of this step is kept.

        """
        passes = self.watcher.keeper.passes
        # Within a backward pass the step cannot be repeated: a second one would wait for the first.
        in_backward = backward_id() != -1
        if in_backward or is_capturing() or not passes or not passes[-1].returned:
            found = "was called within a backward pass" if in_backward else "found no training pass to save"
            raise OptionError(f"save_bundle() {found}: call it after the backward, before optimizer.step().")
        incident = self.watcher.look_again(passes[-1])
        if incident is None:
            raise OptionError(
                "save_bundle() cannot save this step: the model talks to other processes in its forward (FSDP, tensor "
                "parallelism, SyncBatchNorm), and no process can repeat it alone."
            )
        return self._write(incident, Note(reason=reason, step=self._packer.step, created=self._clock()))

    def _save(self, incident: Incident, finding: Finding) -> None:
        if self._bundles_left > 0:
            self._bundles_left -= 1
            note = Note(reason=finding.kind, step=finding.step, created=self._clock(), finding=finding)
            self._write(incident, note)

    def _write(self, incident: Incident, note: Note) -> Path:
        path, left_out = save_bundle(self._run, incident, note, max_bytes=self._options.max_bundle_bytes)
        without = f", without {left_out}: raise max_bundle_mb to keep them" if left_out else ""
        message = f"the step can be repeated: sonde replay {files.short(path)} --model MODULE:NAME{without}"
        logger.warning("%s", message)
        self._packer.put_event("bundle", message, {"path": str(path.relative_to(self._run)), "reason": note.reason})
        return path

    def _look_at_losses(self, *args: Any) -> None:
        if self._is_skipped() and self.watcher.is_loss_bad(args[0]):
            self._raise_alarm()
        if not self._is_skipped():
            self.watcher.before_backward(*args)

    def _look_asleep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        root = args[0] if args else None
        if type(root) is Tensor and root.is_cpu and root.numel() == 1:  # in every step, where steps are short
            number = None if is_capturing() else root.item()
            is_bad = isinstance(number, float) and not math.isfinite(number)
        else:
            roots, _ = what_is_differentiated(args, kwargs)
            is_bad = self.watcher.is_loss_bad(roots)
        if is_bad:
            self._raise_alarm()

    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_skipped() and not has_closure(args, kwargs) and self._is_ours(optimizer):
            self._before_step(optimizer)
            self.watcher.stop_if_asked()

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_skipped() and self._is_ours(optimizer):
            self._after_step(optimizer)
        if not self._is_skipped():
            self._passes.wake()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds a parameter of the watched models."""
        if is_capturing():
            return False
        ours = self._parameters
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _report(self, finding: Finding) -> None:
        logger.warning("step %d: %s %s", finding.step, finding.cause, finding.fix)
        self._publish(finding)

    def _see_flag(self, flag: Tensor) -> None:
        if self._flag_site < 0:
            self._flag_site = self._packer.site(GUARD_SITE, "scalar")
        self._packer.see(self._flag_site, flag)
        self._packer.mark_skipped_if(self._flag_site)
