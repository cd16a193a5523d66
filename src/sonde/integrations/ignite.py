"""Record the training of an Ignite engine.

SondeHandler(model, optimizer, run="runs/ignite").attach(trainer, evaluators={"validation": evaluator})
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Unpack

from torch import nn
from torch.optim import Optimizer

from sonde.errors import MissingExtra, SondeError
from sonde.integrations.recorder import Recorder
from sonde.options import Keywords
from sonde.record.kinds import steps_counted
from sonde.store import open_run
from sonde.store.runs import place_of

try:
    from ignite.engine import Events
except ImportError as error:
    raise MissingExtra("pytorch-ignite", "ignite", "sonde.integrations.ignite") from error

ITERATION: Final = "engine.iteration"
"""The name under which the engine's iterations are recorded."""


class SondeHandler:
    """Records what an engine trains: its output as the loss, its metrics, those of evaluators, epochs.

    Args:
        model: The model, as for `sonde.watch`.
        optimizer: Its optimizer or optimizers.
        run: The folder to write; see `sonde.watch`.
        **options: Options of `sonde.watch`.

    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        run: str | os.PathLike[str] = "runs/ignite-*",
        **options: Unpack[Keywords],
    ) -> None:
        self._model = model
        self._optimizers = [] if optimizer is None else optimizer if isinstance(optimizer, list) else [optimizer]
        self._engine: Any = None
        self._run = run
        self._recorder = Recorder(run, self._report, options)

    @property
    def session(self) -> Any:
        """The session, once training has begun."""
        return self._recorder.session

    def attach(self, trainer: Any, evaluators: Mapping[str, Any] | None = None) -> None:
        """Record this engine; metrics of evaluators are recorded as `name/metric`."""
        self._engine = trainer
        trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: self._recorder.epoch(engine.state.epoch - 1))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._take_iteration)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: self._recorder.log(engine.state.metrics))
        trainer.add_event_handler(Events.COMPLETED, lambda engine: self._recorder.close())
        trainer.add_event_handler(Events.TERMINATE, lambda engine: self._recorder.close())
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._fail)
        for name, evaluator in (evaluators or {}).items():
            evaluator.add_event_handler(Events.COMPLETED, self._take_evaluation, name)

    def _start(self, engine: Any) -> None:
        self._recorder.open(self._model, self._optimizers, steps_before=self._steps_before(engine.state.iteration))

    def _steps_before(self, iterations: int) -> int:
        """Return how many steps were taken before: fewer than iterations if gradients are accumulated."""
        if not iterations:
            return 0
        try:  # the run that goes on has the iterations of each step
            recorded = open_run(place_of(self._run, resume=True)).series(f"{ITERATION}:scalar", "max")
        except (SondeError, OSError):
            return self._steps_counted() or iterations
        return int(recorded.steps[recorded.values <= iterations].max(initial=0))

    def _steps_counted(self) -> int:
        optimizer = next((each for each in self._optimizers if isinstance(each, Optimizer)), None)
        return int((None if optimizer is None else steps_counted(optimizer)) or 0)

    def _take_iteration(self, engine: Any) -> None:
        output = engine.state.output
        self._recorder.log(output if isinstance(output, Mapping) else {"loss": output})
        self._recorder.log({ITERATION: engine.state.iteration})
        self._recorder.report_findings()

    def _take_evaluation(self, engine: Any, name: str) -> None:
        self._recorder.log({f"{name}/{metric}": value for metric, value in engine.state.metrics.items()})

    def _fail(self, engine: Any, error: BaseException) -> None:
        self._recorder.close(error)
        if len(engine._event_handlers[Events.EXCEPTION_RAISED]) == 1:  # ours: without it, Ignite would raise
            raise error

    def _report(self, line: str) -> None:
        self._engine.logger.warning(line)
