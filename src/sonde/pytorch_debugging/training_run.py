"""A training that can be called plainly or awaited, and that stops cleanly when it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any


class TrainingResults(dict[str, Any]):
    """What a training came to. Awaiting it gives it back, so that `await optimizer.train()` is right everywhere."""

    def __await__(self) -> Generator[Any, None, TrainingResults]:
        yield from ()
        return self


class PendingTraining:
    """A training that begins when it is awaited, in a thread of its own, so that the event loop goes on."""

    def __init__(self, run: Callable[[], TrainingResults], stop: Callable[[], None]) -> None:
        self._run, self._stop = run, stop

    def __await__(self) -> Generator[Any, None, TrainingResults]:
        return self._wait().__await__()

    async def _wait(self) -> TrainingResults:
        training = asyncio.ensure_future(asyncio.to_thread(self._run))
        try:
            return await asyncio.shield(training)
        except asyncio.CancelledError:
            # The step that is under way is finished and the weights are saved before the cancellation goes on.
            self._stop()
            await asyncio.gather(training, return_exceptions=True)
            raise


def begin(run: Callable[[], TrainingResults], stop: Callable[[], None]) -> TrainingResults | PendingTraining:
    """Train now, unless an event loop runs in this thread: then return what can be awaited."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    return PendingTraining(run, stop)
