"""Which DataLoaders are iterated inside a scope, and with how many workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader

from sonde.hooks.guard import Guard, Handle, remove_all
from sonde.hooks.replace_function import LOADING


class LoaderWatch:
    """Remembers the smallest number of workers of any DataLoader that an iteration was begun or continued on."""

    def __init__(self, guard: Guard) -> None:
        self.workers: int | None = None
        self._see = guard.wrap("data loaders", self._note_workers)
        self._handles: list[Handle] = []

    def attach(self) -> None:
        """Begin to listen."""
        self._handles.append(LOADING.listen(before=self._see))

    def remove(self) -> None:
        """Stop listening."""
        remove_all(self._handles)

    def _note_workers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        iterator = args[0] if args else None
        if isinstance(iterator, dataloader._BaseDataLoaderIter):
            workers = int(iterator._num_workers)
            self.workers = workers if self.workers is None else min(self.workers, workers)
