"""Record a training with Hugging Face Accelerate, as one of its trackers.

    accelerator = Accelerator(log_with=SondeTracker(run="runs/loop"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("project", config={"lr": 1e-3})

The model and the optimizer that the accelerator has prepared are found when training begins; `accelerator.log` records
numbers, `end_training` finishes.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, Unpack

from torch.optim import Optimizer

from sonde.errors import MissingExtra
from sonde.integrations.discovery import Discovery
from sonde.integrations.recorder import Recorder, plain_settings
from sonde.options import Keywords

try:
    from accelerate import Accelerator
    from accelerate.logging import get_logger
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise MissingExtra("accelerate", "accelerate", "sonde.integrations.accelerate") from error


class SondeTracker(GeneralTracker):  # type: ignore[misc] # its package is not needed for checking types
    """Records the model that is trained, `accelerator.log`, the configuration; reports findings in Accelerate's log.

    Args:
        run: The folder to write; see `sonde.watch`.
        **options: Options of `sonde.watch`.

    """

    name = "sonde"
    requires_logging_directory = False
    main_process_only = False  # every rank records what it computes

    def __init__(self, run: str | os.PathLike[str] = "runs/accelerate-*", **options: Unpack[Keywords]) -> None:
        super().__init__()
        self._recorder = Recorder(run, lambda line: get_logger("accelerate.sonde").warning(line))
        self._options: dict[str, Any] = dict(options)
        self._accelerator: Callable[[], Any] = lambda: None
        self._discovery = Discovery(
            os.fspath(run), self._options, on_start=self._take_session, is_ours=self._is_prepared
        )
        self._discovery.install(existing=True)

    @property
    def tracker(self) -> Any:
        """The session, once training has begun."""
        return self._recorder.session

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration in the run."""
        self._discovery.set_option("config", plain_settings(values))

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Record numbers."""
        self._recorder.log(values)
        self._recorder.report_findings()

    def finish(self) -> None:
        """Finish the run."""
        self._discovery.remove()
        self._recorder.close()

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        """Return whether this tracker's accelerator has prepared an optimizer, as far as it has prepared any."""
        accelerator = self._accelerator()
        if accelerator is None:
            accelerator = next(filter(self._is_tracked, gc.get_objects()), None)
            if accelerator is None:
                return True
            self._accelerator = weakref.ref(accelerator)
        prepared = accelerator._optimizers
        return not prepared or any(optimizer in (each, getattr(each, "optimizer", None)) for each in prepared)

    def _is_tracked(self, thing: Any) -> bool:
        # `isinstance` would run code of lazy objects.
        return Accelerator in type(thing).__mro__ and any(each is self for each in thing.log_with)

    def _take_session(self) -> None:
        self._recorder.session = self._discovery.session
