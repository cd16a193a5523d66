"""What a session holds of forensics: the taps, the watcher and the bundles, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.forensics.watcher import MAX_ORIGINS, GuardAction, Surroundings, Watcher
from sonde.pipe.packer import Packer
from sonde.records import Finding
from sonde.taps.backward_calls import BackwardCalls
from sonde.taps.guard import Guard
from sonde.taps.root_passes import RootPasses
from sonde.taps.step_edges import StepEdges

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

    def __init__(
        self,
        models: dict[str, nn.Module],
        packer: Packer,
        guard: Guard,
        publish: Callable[[Finding], None],
        options: ForensicsOptions,
        run: Path,
    ) -> None:
        self._options = options
        self._packer = packer
        self._publish = publish
        around = Surroundings(
            step=lambda: packer.step,
            nonfinite=packer.nonfinite,
            report=self._report,
            event=packer.put_event,
            flag=self._see_flag,
            save=lambda kept, finding, origin: None,
        )
        self.watcher = Watcher(models, around, guard=options.guard, max_origins=options.max_origins)
        self._passes = RootPasses(models.values(), self.watcher, guard)
        self._backwards = BackwardCalls(guard.wrap("looking at losses", self.watcher.before_backward))
        self._before_step = guard.wrap("looking at gradients", self.watcher.before_step)
        self._after_step = guard.wrap("looking at updates", self.watcher.after_step)
        self.after_skip = guard.wrap("looking at skipped steps", self.watcher.after_skip)
        self._steps = StepEdges(models.values(), self._begin_step, self._after_step)
        self._flag_site = -1

    @property
    def is_holding(self) -> bool:
        """Say whether the present optimizer step is held back."""
        return self.watcher.hold_back.is_holding

    def attach(self) -> None:
        """Begin to watch; after the optimizers' own tap, whose numbers it reads."""
        if self._options.enabled:
            self._passes.attach()
            self._backwards.attach()
            self._steps.attach()

    def remove(self) -> None:
        """Stop watching, and let go of everything kept."""
        self._passes.remove()
        self._backwards.remove()
        self._steps.remove()
        self.watcher.hold_back.release()
        self.watcher.keeper.forget()

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._before_step(optimizer)
        self.watcher.stop_if_asked()

    def _report(self, finding: Finding) -> None:
        logger.warning("step %d: %s %s", finding.step, finding.cause, finding.fix)
        self._publish(finding)

    def _see_flag(self, flag: Tensor) -> None:
        if self._flag_site < 0:
            self._flag_site = self._packer.site("guard.found_inf", "scalar")
        self._packer.see(self._flag_site, flag)
        self._packer.mark_skipped_if(self._flag_site)
