"""Which DataLoaders are iterated inside a scope, and with how many workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader

from sonde.probes.wrapped_calls import LOADING, Listener


class LoaderWatch:
    """Remembers the smallest number of workers of any DataLoader that an iteration was begun or continued on."""

    def __init__(self) -> None:
        self.workers: int | None = None
        self._listener = Listener(lambda: None, lambda: None, self._see)

    def attach(self) -> None:
        """Begin to listen."""
        LOADING.attach(self._listener)

    def remove(self) -> None:
        """Stop listening."""
        LOADING.remove(self._listener)

    def _see(self, args: tuple[Any, ...]) -> None:
        iterator = args[0] if args else None
        if isinstance(iterator, dataloader._BaseDataLoaderIter):
            workers = int(iterator._num_workers)
            self.workers = workers if self.workers is None else min(self.workers, workers)
