"""Memory that is still held when a block ends, beyond what a model and its optimizer need."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.hooks.unpack import unpack
from sonde.hooks.user_line import Line
from sonde.probes.memory.holders import Holder, find_holder
from sonde.probes.memory.leaks import TensorKind, kind_of, live_tensors
from sonde.probes.memory.process import heap_bytes

KEPT_BYTES: Final = 100 << 20
"""Imports and caches of a first training step take 10 to 30 MiB; other tools warn from here on too."""

_Key = tuple[str, int, int]
"""A storage: its device, address and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMemory:
    """Memory that one block keeps."""

    place: str
    """`process`, or a device such as `cuda:0`."""
    bytes: int
    kind: TensorKind | None
    """The tensors that take most of it; None if tensors do not."""
    tensors: int
    """How many of them there are."""
    holder: Holder | None

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the user's code that keep it, the likeliest first."""
        return () if self.holder is None else self.holder.lines

    @property
    def text(self) -> str:
        """The memory in a sentence, with the line where that is known."""
        where = "the process" if self.place == "process" else self.place
        text = f"{where} holds {self.bytes / 2**20:.0f} MiB more after the block than before it, besides the model"
        if self.kind is None:
            return f"{text}; tensors do not account for it"
        text += f". Most of it is {self.tensors} tensor(s) {self.kind}"
        if self.holder is None or not self.holder.name:
            return text
        line = f": {self.lines[0]}: `{self.lines[0].text}`" if self.lines else ""
        return f"{text} in the {self.holder.container} `{self.holder.name}` of {self.holder.scope}{line}"


class KeptWatch:
    """Compares the memory at the end of a block with that at its beginning."""

    def __init__(self, held: Mapping[str, int], own_bytes: Callable[[], int]) -> None:
        self._before = set(_storages(live_tensors()))
        self._counters = _counters(held)
        self._libraries = _loaded_libraries()
        self._own_bytes = own_bytes
        self._own_before = own_bytes()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def see(self, optimizer: Any) -> None:
        """Note an optimizer that steps inside the block: its state is not counted."""
        if isinstance(optimizer, Optimizer):
            self._optimizers.add(optimizer)

    def find(self, held: Mapping[str, int]) -> list[KeptMemory]:
        """Return the places that hold excessive memory now; `held` are the bytes of each device now."""
        tensors = live_tensors()
        storages = _storages(tensors)
        needed = self._needed(tensors)
        new = {key: each for key, each in storages.items() if key not in self._before}
        kept = {key: each for key, each in new.items() if key not in needed}
        counters, found = _counters(held), []
        if _loaded_libraries() != self._libraries:
            counters.pop("process", None)  # what libraries allocate when they are loaded is not the program's
        for place in counters.keys() | {_place(device) for device, _, _ in new}:
            mine = {key: each for key, each in kept.items() if _place(key[0]) == place}
            excess = sum(size for _, _, size in mine)
            if place in self._counters and place in counters:
                # Counters also include memory without a Python object, such as a graph's.
                excess = counters[place] - self._counters[place]
                excess -= sum(size for device, _, size in new.keys() & needed if _place(device) == place)
                excess -= self._own_bytes() - self._own_before if place == "process" else 0
            if excess >= KEPT_BYTES:
                found.append(_explain(place, excess, list(mine.values())))
        return found

    def _needed(self, tensors: Iterable[Tensor]) -> set[_Key]:
        """Return the storages of parameters, gradients, optimizer state and one further copy of the parameters."""
        # Others have no memory of their own, or no shape to compare: lazy parameters, a compiler's fake tensors.
        tensors = [each for each in tensors if type(each) in (Tensor, nn.Parameter)]
        parameters = [each for each in tensors if isinstance(each, nn.Parameter)]
        states = [each for optimizer in self._optimizers for _, each in unpack(list(optimizer.state.values()))]
        mine = [*parameters, *(each.grad for each in parameters if each.grad is not None), *states]
        needed = set(_storages(mine))
        # An average of the weights, a snapshot to go back to, or the recorder's copy that updates are computed from.
        room = Counter((tuple(each.shape), each.dtype, str(each.device)) for each in parameters)
        for tensor in tensors:
            kind = (tuple(tensor.shape), tensor.dtype, str(tensor.device))
            if room[kind] > 0:
                keys = _storages([tensor]).keys() - needed
                room[kind] -= len(keys)
                needed |= keys
        return needed


def _counters(held: Mapping[str, int]) -> dict[str, int]:
    """Return exact counts of allocated bytes by place."""
    found = {place: size for place, size in held.items() if place != "process"}
    # CUDA loads kernels when they are first used, hundreds of megabytes of the host's memory.
    heap = None if torch.cuda.is_initialized() else heap_bytes()  # type: ignore[no-untyped-call] # torch
    return found if heap is None else found | {"process": heap}


def _loaded_libraries() -> set[str]:
    """Return the shared libraries of this process; empty where the system does not list them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {name for line in lines if ".so" in (name := line.rpartition(" ")[2])}


def _place(device: str) -> str:
    return "process" if device == "cpu" else device


def _storages(tensors: Iterable[Tensor]) -> dict[_Key, Tensor]:
    """Return the storages of tensors, each with one of its tensors."""
    return dict(_keys(tensors))


def _keys(tensors: Iterable[Tensor]) -> Iterator[tuple[_Key, Tensor]]:
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter):
            continue  # a wrapper, whose inner tensors are counted, or a stand-in without memory
        try:
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr(), storage.nbytes())
        except (RuntimeError, NotImplementedError):
            continue  # sparse: its parts are tensors of their own
        if key[1]:
            yield key, tensor


def _explain(place: str, excess: int, tensors: list[Tensor]) -> KeptMemory:
    groups: dict[TensorKind, list[Tensor]] = {}
    for tensor in tensors:
        if (kind := kind_of(tensor)) is not None:
            groups.setdefault(kind, []).append(tensor)
    sizes = {kind: sum(each.untyped_storage().nbytes() for each in group) for kind, group in groups.items()}
    most = max(sizes, key=lambda kind: sizes[kind], default=None)
    if most is None or sizes[most] < excess / 2:
        return KeptMemory(place=place, bytes=excess, kind=None, tensors=0, holder=None)
    group = groups.pop(most)
    tensors.clear()
    return KeptMemory(place=place, bytes=excess, kind=most, tensors=len(group), holder=find_holder(group[:12]))
